"""Norm, rotate, quantise, and write both caches: the one place where a token's record is made.

May import torch. Invariant: a row's bytes are a function of that row's inputs and position alone.

Suffixes: T rows · R latent rank · P rope dim · D indexer dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.kernels.interface import IndexCache, LatentCache
from longfill.kernels.reference.linear import rms_norm
from longfill.kernels.reference.quant import encode_latent, quantise_index_keys


def rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the last dim (P = 2 F) of `x` [T, ..., P], in fp32, back in x's dtype.

    Pairs are (0, 1), (2, 3)... when `interleaved` (DeepSeek's main attention, GLM's indexer), else (i, i + P/2)
    (DeepSeek-V3.2's indexer). The rotated vector is laid out as its pairs were.
    """
    shape = (x.shape[0], *([1] * (x.dim() - 2)), cos_TF.shape[-1])
    cos, sin = cos_TF.view(shape), sin_TF.view(shape)
    half = x.shape[-1] // 2
    pairs = x.float().reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2)
    return turned.flatten(-2).to(x.dtype)


def store_latent(
    kv_TX: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    cache: LatentCache,
    slots_T: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Write a layer's latent rows: RMS-normalised first R values, rotated last P ones, at `slots_T` (int64)."""
    latent_TR, rope_TP = torch.split(kv_TX, [cache.rank, cache.rope_dim], -1)
    latent_TR = rms_norm(latent_TR, norm_R, eps)
    rope_TP = rotate(rope_TP, cos_TF, sin_TF, interleaved)
    page_size = cache.rows_NBX.shape[1]
    rows = encode_latent(latent_TR, rope_TP, cache.format, cache.scale, cache.rope_scale)
    cache.rows_NBX[slots_T // page_size, slots_T % page_size] = rows


def store_index_keys(
    k_TD: Tensor,
    norm: tuple[Tensor, Tensor],
    cos_TF: Tensor,
    sin_TF: Tensor,
    cache: IndexCache,
    slots_T: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Write a full layer's index keys: LayerNorm (eps 1e-6, weight and bias in fp32), first P dims rotated."""
    k_TD = F.layer_norm(k_TD.float(), (cache.dim,), *norm, eps=1e-6)
    rope_dim = 2 * cos_TF.shape[-1]
    k_TD = torch.cat([rotate(k_TD[:, :rope_dim], cos_TF, sin_TF, interleaved), k_TD[:, rope_dim:]], -1)
    page_size = cache.values_NBX.shape[1]
    pages, offsets = slots_T // page_size, slots_T % page_size
    if cache.scales_NB is None:
        cache.values_NBX[pages, offsets] = k_TD.contiguous().view(torch.uint8)
        return
    values, scales = quantise_index_keys(k_TD)
    cache.values_NBX[pages, offsets] = values
    cache.scales_NB[pages, offsets] = scales


def put_rows(rows_SX: Tensor, order_K: Tensor, cache_NBX: Tensor, slots_K: Tensor) -> None:
    """`cache[slot k] = rows[order k]`, for bytes."""
    page_size = cache_NBX.shape[1]
    cache_NBX[slots_K // page_size, slots_K % page_size] = rows_SX[order_K]
