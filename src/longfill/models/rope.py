"""Rotary embedding tables and the softmax scale that goes with them.

May import torch and the model config. Invariant: a position's row depends on that position alone, and equals what
transformers computes (inverse frequencies and angles in float32), so models see the angles they were trained with.

Shape suffixes: T positions · P rope dim.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from longfill.models.config import ModelConfig, RopeConfig


def rope_tables(rope: RopeConfig, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [T, P/2] each, of integer positions [T] (exact up to 2**24).

    Column j is pair j's angle `position * inv_freq[j]`, times YaRN's attention factor; the tables are made on the
    device of `positions_T`.
    """
    inv_freq, scale = inverse_frequencies(rope)
    angles = positions_T[:, None].float() * inv_freq.to(positions_T.device)
    return angles.cos() * scale, angles.sin() * scale


@cache
def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [P/2], and the factor by which cosines and sines are multiplied. Not to be changed:
    they are made once, since every step asks for them.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    pos_freqs = rope.theta**exponents
    if rope.type == "default":
        return 1.0 / pos_freqs, 1.0
    low, high = _correction_range(rope)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    inv_freq = 1.0 / (rope.factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept
    return inv_freq, _attention_factor(rope)


def softmax_scale(config: ModelConfig) -> float:
    """Factor of the attention scores: qk_head_dim ** -0.5, times YaRN's mscale squared where `mscale_all_dim` asks."""
    scale: float = config.qk_head_dim**-0.5
    rope = config.rope
    if rope.type == "yarn" and rope.mscale_all_dim:
        scale *= _mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor)


def _correction_range(rope: RopeConfig) -> tuple[float, float]:
    """Pairs between which YaRN goes from the original frequencies to the interpolated ones."""

    def pair_with(rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # A ramp of no width would divide by zero.
    return low, high + 0.001 if low == high else high
