"""The KV pool's bytes, and each layer's strided view of them.

May import torch, `cache.layout` and the kernels' interface. Invariant: a page is one contiguous range of bytes; every
layer's view lies inside it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longfill.cache.layout import RecordLayout
from longfill.errors import CapacityError, ModelError
from longfill.kernels.interface import IndexCache, LatentCache, LayerCaches
from longfill.kernels.reference.quant import E4M3_MAX
from longfill.models.weights import LayerWeights, ModelWeights
from longfill.units import NumPages


class LatentScales(NamedTuple):
    """Static scales of one layer's rows in format "fp8"."""

    latent: float
    rope: float


def allocate_pool(layout: RecordLayout, num_pages: NumPages) -> Tensor:
    """uint8 [pages, record bytes], untouched: memory is taken as pages are written.

    Raises CapacityError where the system does not even promise that much address space.
    """
    try:
        return torch.empty(num_pages, layout.record_bytes, dtype=torch.uint8)
    except RuntimeError:
        size = layout.pool_bytes(num_pages)
        raise CapacityError(
            f"the system refuses {size:,} bytes for {num_pages:,} KV pages; give a smaller --memory-budget"
        ) from None


def layer_caches(pool: Tensor, layout: RecordLayout, latent_scales: tuple[LatentScales, ...]) -> LayerCaches:
    """Views of `pool` (uint8 [N, record bytes]) for every layer; `latent_scales` are those of `latent_scales()`."""
    shape = (pool.shape[0], layout.page_size, layout.latent_row_bytes)
    strides = (layout.record_bytes, layout.latent_row_bytes, 1)
    latent = tuple(
        LatentCache(
            rows_NBX=pool.as_strided(shape, strides, layout.latent_offset(layer)),
            format=layout.latent_format,
            rank=layout.kv_lora_rank,
            rope_dim=layout.rope_dim,
            scale=latent_scales[layer].latent,
            rope_scale=latent_scales[layer].rope,
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


def latent_scales(weights: ModelWeights, rope_gain: float) -> tuple[LatentScales, ...]:
    """Two powers of two a layer, the draft layer last, that format "fp8" can never saturate with.

    Both come from bounds that the weights give, so they need no calibration and no scale in the checkpoint. An
    RMS-normalised vector of n values has the length sqrt(n) at most, hence

    - no value of the latent is above sqrt(R) x max |w| of its norm;
    - a row v of the rotary projection, whose input has the norm weights w, gives sqrt(C) x |v * w| at most, and a
      rotation no more than the length of its pair: sqrt(2) times the largest row's. `rope_gain` is the factor that
      YaRN multiplies cosines and sines by.

    The second is wide: values of usual size lie a factor of about sqrt(2 C) below it. That costs e4m3, whose steps are
    relative down to 2**-15 of its largest value, none of its precision for them.

    Raises ModelError for weights that contain NaN or inf.
    """
    scales: list[LatentScales] = []
    drafts = () if weights.mtp is None else (weights.mtp.layer,)
    for layer, part in enumerate([*weights.layers, *drafts]):
        norm = part.attention.kv_a_norm.float()
        latent = math.sqrt(norm.numel()) * float(norm.abs().max())
        rope = rope_gain * _rope_bound(part)
        for name, bound in (("kv_a_layernorm", latent), ("kv_a_proj_with_mqa or input_layernorm", rope)):
            if not math.isfinite(bound):
                raise ModelError(f"layer {layer}: {name}.weight contains NaN or inf; the file is damaged")
        scales.append(LatentScales(_scale_for(latent), _scale_for(rope)))
    return tuple(scales)


def _rope_bound(layer: LayerWeights) -> float:
    """Most that a rotated pair of the layer's key can be, before YaRN's factor."""
    projection, input_norm = layer.attention.kv_a, layer.input_norm.float()
    rank, end = layer.attention.kv_a_norm.numel(), projection.out_size
    if end == rank:
        return 0.0
    rows_PC = projection.rows(rank, end)
    longest_P = math.sqrt(input_norm.numel()) * (rows_PC * input_norm).norm(dim=-1)
    if projection.bias is not None:
        longest_P += projection.bias[rank:].float().abs()
    return math.sqrt(2) * float(longest_P.max())


def _scale_for(bound: float) -> float:
    """Smallest power of two with `bound / scale <= 448`."""
    return 2.0 ** math.ceil(math.log2(max(bound, 1e-4) / E4M3_MAX))
