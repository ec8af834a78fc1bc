"""Rounding to e4m3 and the rows of the two caches, byte for byte.

May import torch. Invariant: decoding what was encoded loses only the rounding of the format, never a scale.

Suffixes: T rows · R latent rank · P rope dim · D indexer dim · X bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.units import SCALE_GROUP

E4M3_MAX = 448.0


def pow2_scale(amax: Tensor, floor: float) -> Tensor:
    """Smallest power of two `s` with `max(amax, floor) / s <= 448`, fp32, same shape as `amax`.

    Powers of two make every scaling exact, so that quantised values stay exact in bf16.
    """
    mantissa, exponent = torch.frexp(amax.float().clamp(min=floor) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to float8_e4m3fn, saturating at 448 (torch's cast gives NaN above it); NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantise_index_keys(k_TD: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values as uint8 [T, D] and one power-of-two fp32 scale per key [T]."""
    scale_T = pow2_scale(k_TD.abs().amax(-1), 1e-4)
    return to_e4m3(k_TD.float() / scale_T[:, None]).view(torch.uint8), scale_T


def quantise_index_queries(q_TID: Tensor, w_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Queries rounded to e4m3 per head (as fp32 values without their scale), the scales folded into the weights.

    `w_TI * scale` is exact up to fp32 rounding, and `relu(s x) = s relu(x)` for the positive scale.
    """
    scale_TI = pow2_scale(q_TID.abs().amax(-1), 1e-10)
    return to_e4m3(q_TID.float() / scale_TI[..., None]).float(), w_TI * scale_TI


def encode_latent(latent_TR: Tensor, rope_TP: Tensor, cache_format: str, scale: float, rope_scale: float) -> Tensor:
    """Rows of the latent cache as uint8 [T, X]; the scales are the static ones of both parts (format fp8 only)."""
    if cache_format in ("float32", "bfloat16"):
        dtype = torch.float32 if cache_format == "float32" else torch.bfloat16
        return torch.cat([latent_TR, rope_TP], -1).to(dtype).view(torch.uint8)
    if cache_format == "fp8":
        parts = [to_e4m3(latent_TR.float() / scale), to_e4m3(rope_TP.float() / rope_scale)]
        return torch.cat(parts, -1).view(torch.uint8)
    if cache_format != "fp8_ds_mla":
        raise ValueError(f"unknown latent cache format {cache_format!r}")
    groups = torch.split(latent_TR.float(), SCALE_GROUP, -1)
    scales = [pow2_scale(g.abs().amax(-1, keepdim=True), 1e-4) for g in groups]
    values = [to_e4m3(g / s).view(torch.uint8) for g, s in zip(groups, scales, strict=True)]
    scale_bytes = torch.cat(scales, -1).view(torch.uint8)
    rope_bytes = rope_TP.to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([*values, scale_bytes, rope_bytes], -1)


def decode_latent(
    rows_TX: Tensor, cache_format: str, rank: int, rope_dim: int, scale: float, rope_scale: float
) -> Tensor:
    """fp32 [T, R + P] from contiguous cache rows; the inverse of `encode_latent` up to the format's rounding."""
    if cache_format == "float32":
        return rows_TX.view(torch.float32)
    if cache_format == "bfloat16":
        return rows_TX.view(torch.bfloat16).float()
    values_TR = rows_TX[:, :rank].view(torch.float8_e4m3fn).float()
    if cache_format == "fp8":
        rope_TP = rows_TX[:, rank : rank + rope_dim].view(torch.float8_e4m3fn).float()
        return torch.cat([values_TR * scale, rope_TP * rope_scale], -1)
    if cache_format != "fp8_ds_mla":
        raise ValueError(f"unknown latent cache format {cache_format!r}")
    groups = -(-rank // SCALE_GROUP)
    scales_TG = rows_TX[:, rank : rank + 4 * groups].contiguous().view(torch.float32)
    rope_TP = rows_TX[:, rank + 4 * groups :].contiguous().view(torch.bfloat16).float()
    return torch.cat([values_TR * scales_TG.repeat_interleave(SCALE_GROUP, -1)[:, :rank], rope_TP], -1)
