"""Cases of the row operations: RMS norm, and both cache writes with their norm, rotation and quantisation.

All are bound by memory, so their rows are more than the caches hold.
"""

from __future__ import annotations

from functools import partial

import torch

from longfill.bench.work import Case, Setting, TorchPeer, Work
from longfill.cache.formats import latent_row_bytes
from longfill.kernels.cpu.rows import rms_norm, store_index_keys, store_latent
from longfill.kernels.interface import IndexCache, LatentCache
from longfill.kernels.reference import store as reference

PAGE_SIZE = 64
EPS = 1e-6
SCALE = 2.0**-4
ROPE_DIM = 64


def _angles(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles_TF = torch.rand(rows, ROPE_DIM // 2, generator=torch.Generator().manual_seed(2)) * 6.28
    return angles_TF.cos(), angles_TF.sin()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def norm_case(rows: int, width: int, setting: Setting) -> Work:
    x_TC, weight_C = _random(setting.size(rows), width).bfloat16(), torch.ones(width, dtype=torch.bfloat16)
    return Work(
        call=partial(rms_norm, x_TC, weight_C, EPS, num_threads=setting.threads),
        flops=0,
        bytes=2 * x_TC.nbytes,
        math=setting.math,
        traffic="copy",
        items=x_TC.shape[0],
        item="row",
        torch=TorchPeer(partial(torch.rms_norm, x_TC, (width,), weight_C, EPS), "torch.rms_norm"),
    )


def latent_case(rows: int, rank: int, format: str, setting: Setting) -> Work:
    height = setting.size(rows)
    kv_TX, norm_R = _random(height, rank + ROPE_DIM).bfloat16(), torch.ones(rank, dtype=torch.bfloat16)
    cos_TF, sin_TF = _angles(height)
    row_bytes = latent_row_bytes(format, rank, ROPE_DIM)
    rows_NBX = torch.zeros(-(-height // PAGE_SIZE), PAGE_SIZE, row_bytes, dtype=torch.uint8)
    cache = LatentCache(rows_NBX, format, rank, ROPE_DIM, SCALE, SCALE)
    inputs = (kv_TX, norm_R, EPS, cos_TF, sin_TF, cache, torch.arange(height))
    return Work(
        call=partial(store_latent, *inputs, interleaved=True, num_threads=setting.threads),
        flops=0,
        bytes=kv_TX.nbytes + 2 * cos_TF.nbytes + height * row_bytes,
        math=setting.math,
        traffic="copy",
        items=height,
        item="row",
        torch=TorchPeer(partial(reference.store_latent, *inputs, interleaved=True), "the reference kernel"),
    )


def index_case(rows: int, dim: int, setting: Setting) -> Work:
    height = setting.size(rows)
    k_TD, norm = _random(height, dim).bfloat16(), (torch.ones(dim), torch.zeros(dim))
    cos_TF, sin_TF = _angles(height)
    num_pages = -(-height // PAGE_SIZE)
    values = torch.zeros(num_pages, PAGE_SIZE, dim, dtype=torch.uint8)
    cache = IndexCache(values, torch.zeros(num_pages, PAGE_SIZE), "fp8", dim)
    inputs = (k_TD, norm, cos_TF, sin_TF, cache, torch.arange(height))
    return Work(
        call=partial(store_index_keys, *inputs, interleaved=True, num_threads=setting.threads),
        flops=0,
        bytes=k_TD.nbytes + 2 * cos_TF.nbytes + height * (dim + 4),
        math=setting.math,
        traffic="copy",
        items=height,
        item="key",
        torch=TorchPeer(partial(reference.store_index_keys, *inputs, interleaved=True), "the reference kernel"),
    )


CASES = (
    Case("rms_norm", "8,192 rows of 6,144", partial(norm_case, 8192, 6144)),
    *(
        Case("norm_rope_store", f"65,536 latent rows, {f}", partial(latent_case, 65_536, 512, f))
        for f in ("bfloat16", "fp8", "fp8_ds_mla")
    ),
    Case("norm_rope_store", "131,072 index keys, fp8", partial(index_case, 131_072, 128)),
)
