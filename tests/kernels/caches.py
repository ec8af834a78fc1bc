"""One request's rows in a paged cache: pages in random order, everything that is not written filled with NaN bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.cache.layout import RecordLayout
from longfill.kernels.interface import IndexCache, LatentCache, RequestRows
from longfill.kernels.reference.quant import encode_latent, quantise_index_keys
from longfill.units import NumPages, PageSize
from longfill.worker.pool import LatentScales, allocate_pool, layer_caches

RANK, ROPE, INDEX_DIM = 32, 8, 16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_caches(
    length: int,
    *,
    latent_format: str = "float32",
    index_format: str = "float32",
    page_size: int = 8,
    scale: float = 1.0,
    rope_scale: float = 1.0,
    query_len: int = 1,
    seed: int = 0,
) -> tuple[LatentCache, IndexCache, RequestRows]:
    """Layer 1 of a two-layer pool holding `length` random rows and index keys; the request's last `query_len` rows
    are those of the step."""
    layout = RecordLayout(
        page_size=PageSize(page_size),
        num_layers=2,
        full_layers=(0, 1),
        latent_format=latent_format,
        index_format=index_format,
        kv_lora_rank=RANK,
        rope_dim=ROPE,
        index_head_dim=INDEX_DIM,
    )
    count = -(-length // page_size)
    pool = allocate_pool(layout, NumPages(count + 3)).fill_(0xFF)
    caches = layer_caches(pool, layout, (LatentScales(scale, rope_scale),) * 2)
    pages = torch.randperm(count + 2, generator=torch.Generator().manual_seed(seed))[:count] + 1
    positions = torch.arange(length)
    at = (pages[positions // page_size], positions % page_size)
    rows = random(length, RANK + ROPE, seed=seed)
    caches.latent[1].rows_NBX[at] = encode_latent(rows[:, :RANK], rows[:, RANK:], latent_format, scale, rope_scale)
    index = caches.index[1]
    keys = random(length, INDEX_DIM, seed=seed + 1)
    if index.scales_NB is None:
        index.values_NBX[at] = keys.view(torch.uint8)
    else:
        index.values_NBX[at], index.scales_NB[at] = quantise_index_keys(keys)
    request = RequestRows(first_row=0, query_len=query_len, start=length - query_len, pages=pages)
    return caches.latent[1], index, request
