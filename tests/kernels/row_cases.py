"""Rows and caches for the tests of the native row operations: strided, and with NaN wherever nothing belongs."""

from __future__ import annotations

import torch
from tests.kernels.caches import random
from torch import Tensor

from longfill.cache.formats import index_value_bytes, latent_row_bytes
from longfill.kernels.interface import IndexCache, LatentCache

NAN, INF = float("nan"), float("inf")


def tables(num_rows: int, pairs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Cosines and sines with YaRN's factor, as views with more behind every row."""
    angles = 100 * random(num_rows, pairs + 3, seed=seed)
    return 1.2 * angles.cos()[:, :pairs], 1.2 * angles.sin()[:, :pairs]


def strided(x: Tensor) -> Tensor:
    """The same values in rows that lie further apart, with NaN between."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), NAN, dtype=x.dtype)
    view = wide[..., 2:-3]
    view.copy_(x)
    return view


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def unit_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of +1 and -1: their root mean square is 1 in every order of summation."""
    return random(num_rows, width, seed=5).sign().to(dtype)


def latent_cache(cache_format: str, rank: int, rope_dim: int, pages: int = 4, page_size: int = 5) -> LatentCache:
    """Rows inside larger records of NaN bytes."""
    row_bytes = latent_row_bytes(cache_format, rank, rope_dim)
    records = torch.full((pages, 12 + page_size * row_bytes + 8), 0xFF, dtype=torch.uint8)
    rows_NBX = records[:, 12:-8].unflatten(1, (page_size, row_bytes))
    return LatentCache(rows_NBX, cache_format, rank, rope_dim, 2.0**-5, 2.0**-3)


def slots(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:num_rows]


def index_cache(cache_format: str, dim: int, pages: int = 4, page_size: int = 5) -> IndexCache:
    """Values, then scales, inside larger records of NaN bytes."""
    plane = page_size * index_value_bytes(cache_format, dim)
    records = torch.full((pages, 12 + plane + 4 * page_size + 8), 0xFF, dtype=torch.uint8)
    values_NBX = records[:, 12 : 12 + plane].unflatten(1, (page_size, -1))
    scales_NB = records[:, 12 + plane : -8].view(torch.float32) if cache_format == "fp8" else None
    return IndexCache(values_NBX, scales_NB, cache_format, dim)
