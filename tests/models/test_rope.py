"""Rotary tables equal transformers', bit for bit, and a position's row depends on that position alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import tiny_config
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from longfill.models.config import ModelConfig, RopeConfig
from longfill.models.rope import rope_tables, softmax_scale

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta_8e6": {"rope_type": "default", "rope_theta": 8e6},
    "yarn_deepseek": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn_v2_lite": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn_unequal_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_plain": dict(YARN),
    "yarn_attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn_betas_untruncated": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_narrow_ramp": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}
EDGES = [0, 1, 2, 63, 64, 65, 4095, 4096, 131_071, 131_072, 1_000_003, 1_048_575]


def both(rope: dict[str, Any], dim: int = 64) -> tuple[ModelConfig, DeepseekV3Config]:
    fields = tiny_config(
        "deepseek_v3", rope_parameters=dict(rope), qk_rope_head_dim=dim, max_position_embeddings=163_840
    )
    theirs = DeepseekV3Config(**fields, dtype="float32")
    return ModelConfig.from_dict({**theirs.to_dict(), "dtype": "float32"}), theirs


@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("name", ROPES)
def test_tables_equal_those_of_transformers(name: str, dim: int) -> None:
    ours, theirs = both(ROPES[name], dim)
    positions = torch.tensor(EDGES + list(range(300)))
    cos, sin = rope_tables(ours.rope, positions)
    want_cos, want_sin = DeepseekV3RotaryEmbedding(theirs)(torch.empty(0), positions[None])
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, want_cos[0, :, : dim // 2])
    assert torch.equal(sin, want_sin[0, :, : dim // 2])


@pytest.mark.parametrize("name", ROPES)
def test_softmax_scale_equals_that_of_transformers(name: str) -> None:
    ours, theirs = both(ROPES[name])
    assert softmax_scale(ours) == pytest.approx(DeepseekV3Attention(theirs, 0).scaling, rel=1e-15)


def test_yarn_scales_the_softmax_of_deepseek() -> None:
    plain, yarn = (softmax_scale(both(ROPES[name])[0]) for name in ("default", "yarn_deepseek"))
    assert yarn / plain == pytest.approx(1.8738, rel=1e-4)  # (0.1 ln 40 + 1) ** 2


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    rope = RopeConfig(dim=8, theta=10000.0)
    positions = torch.randint(0, 1 << 20, (40_000,), generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(rope, positions)
    for start, stop in [(0, 1), (1, 2), (3, 10), (9_999, 10_030), (7, 39_999), (39_997, 40_000)]:
        part_cos, part_sin = rope_tables(rope, positions[start:stop])
        assert torch.equal(part_cos, cos[start:stop])
        assert torch.equal(part_sin, sin[start:stop])


def test_positions_of_a_million_tokens_are_distinct_and_precise() -> None:
    positions = torch.tensor(EDGES)
    cos, sin = rope_tables(RopeConfig(dim=64, theta=10000.0), positions)
    exact = positions.double()  # the first pair turns by one radian a token
    assert torch.allclose(cos[:, 0].double(), exact.cos(), atol=1e-6)
    assert torch.allclose(sin[:, 0].double(), exact.sin(), atol=1e-6)
    assert torch.allclose(cos.square() + sin.square(), torch.ones(len(EDGES), 32), atol=1e-6)
