"""The KV pool's bytes, and each layer's strided view of them.

May import torch, `cache.layout` and the kernels' interface. Invariant: a page is one contiguous range of bytes; every
layer's view lies inside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longfill.cache.layout import RecordLayout
from longfill.errors import ModelError
from longfill.kernels.interface import IndexCache, LatentCache, LayerCaches
from longfill.kernels.reference.quant import E4M3_MAX
from longfill.models.weights import ModelWeights
from longfill.units import NumPages


def allocate_pool(layout: RecordLayout, num_pages: NumPages) -> Tensor:
    """uint8 [pages, record bytes], untouched: memory is taken as pages are written."""
    return torch.empty(num_pages, layout.record_bytes, dtype=torch.uint8)


def layer_caches(pool: Tensor, layout: RecordLayout, latent_scales: tuple[float, ...]) -> LayerCaches:
    """Views of `pool` (uint8 [N, record bytes]) for every layer; `latent_scales` are those of `latent_scales()`."""
    shape = (pool.shape[0], layout.page_size, layout.latent_row_bytes)
    strides = (layout.record_bytes, layout.latent_row_bytes, 1)
    latent = tuple(
        LatentCache(
            rows_NBX=pool.as_strided(shape, strides, layout.latent_offset(layer)),
            format=layout.latent_format,
            rank=layout.kv_lora_rank,
            rope_dim=layout.rope_dim,
            scale=latent_scales[layer],
        )
        for layer in range(layout.num_layers)
    )
    return LayerCaches(latent, {layer: _index_cache(pool, layout, layer) for layer in layout.full_layers})


def _index_cache(pool: Tensor, layout: RecordLayout, layer: int) -> IndexCache:
    assert layout.index_format is not None
    quantised = layout.index_format == "fp8"
    key_bytes = layout.index_head_dim * (1 if quantised else 4)
    values_NBX = pool.as_strided(
        (pool.shape[0], layout.page_size, key_bytes),
        (layout.record_bytes, key_bytes, 1),
        layout.index_values_offset(layer),
    )
    scales_NB = None
    if quantised:
        scales_NB = pool.view(torch.float32).as_strided(
            (pool.shape[0], layout.page_size),
            (layout.record_bytes // 4, 1),
            layout.index_scales_offset(layer) // 4,
        )
    return IndexCache(values_NBX, scales_NB, layout.index_format, layout.index_head_dim)


def latent_scales(weights: ModelWeights) -> tuple[float, ...]:
    """One power of two a layer that format "fp8" can never saturate with, and never wastes range on.

    An RMS-normalised vector of R values has none above sqrt(R), so the stored latent is bounded by sqrt(R) x max |w|
    of its norm. The bound comes from the weights, so it needs no calibration and no scale in the checkpoint.
    """
    scales: list[float] = []
    for layer in weights.layers:
        norm = layer.attention.kv_a_norm.float()
        bound = math.sqrt(norm.numel()) * float(norm.abs().max())
        if not math.isfinite(bound):
            raise ModelError(f"layer {len(scales)}: kv_a_layernorm.weight contains NaN or inf; the file is damaged")
        scales.append(2.0 ** math.ceil(math.log2(max(bound, 1e-4) / E4M3_MAX)))
    return tuple(scales)
