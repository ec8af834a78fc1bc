"""Rounding to e4m3, its power-of-two scales, and what each cache format loses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.kernels.caches import random
from tests.oracle.harness import engine, run, tokens
from tests.tiny import make_checkpoint

from longfill.errors import ModelError
from longfill.kernels.interface import LatentCache, StoredLinear
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.kernels.reference.quant import (
    E4M3_MAX,
    decode_latent,
    encode_latent,
    pow2_scale,
    quantise_index_keys,
    quantise_index_queries,
    to_e4m3,
)
from longfill.kernels.reference.store import rotate
from longfill.models.config import ModelConfig
from longfill.models.loading import load_model
from longfill.worker.pool import latent_scales

HALF_STEP = 2.0**-4
"""Largest relative rounding error of a normal e4m3 value (three bits behind the point)."""
TINIEST = 2.0**-10
"""Largest absolute rounding error of a subnormal one."""


def test_pow2_scale_is_exact_at_powers_of_two_and_beside_them() -> None:
    exponents = torch.arange(-30, 60)
    edges = E4M3_MAX * torch.exp2(exponents.double()).float()
    assert torch.equal(pow2_scale(edges, 1e-10), torch.exp2(exponents.double()).float())
    above = torch.nextafter(edges, torch.tensor(float("inf")))
    assert torch.equal(pow2_scale(above, 1e-10), torch.exp2(exponents.double() + 1).float())
    below = torch.nextafter(edges, torch.tensor(0.0))
    assert torch.equal(pow2_scale(below, 1e-10), torch.exp2(exponents.double()).float())


def test_pow2_scale_is_the_smallest_that_does_not_saturate() -> None:
    amax = random(5000).abs() * torch.exp2(random(5000, seed=1) * 8)
    scale = pow2_scale(amax, 1e-4)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert (amax.clamp(min=1e-4) / scale <= E4M3_MAX).all()
    assert (amax.clamp(min=1e-4) / (scale / 2) > E4M3_MAX).all()


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), float("nan"), 448.0, 0.0])
    got = to_e4m3(x).float()
    assert got[:3].tolist() == [448.0, -448.0, 448.0]
    assert math.isnan(got[3])
    assert got[4:].tolist() == [448.0, 0.0]


def test_index_keys_and_queries_round_within_half_a_step() -> None:
    k = random(200, 128) * torch.exp2(random(200, 1, seed=2) * 6)
    values, scale = quantise_index_keys(k)
    back = values.view(torch.float8_e4m3fn).float() * scale[:, None]
    assert ((back - k).abs() <= (k.abs() * HALF_STEP).maximum(TINIEST * scale[:, None])).all()
    q, w = random(50, 8, 128), random(50, 8, seed=3)
    rounded, folded = quantise_index_queries(q, w)
    back = rounded * (folded / w)[..., None]
    assert ((back - q).abs() <= q.abs() * HALF_STEP * 1.001 + 1e-3).all()


@pytest.mark.parametrize("cache_format", ["bfloat16", "fp8", "fp8_ds_mla", "float32"])
@pytest.mark.parametrize("rank", [32, 128, 512])
@pytest.mark.parametrize("loud", [1, 1000])
def test_load_07_small_latents_beside_large_rotary_parts_survive(cache_format: str, rank: int, loud: float) -> None:
    """A scale from the latent part alone would saturate the rotary part; one for both would lose the latent."""
    latent = 0.1 * (2 * torch.rand(300, rank, generator=torch.Generator().manual_seed(0)) - 1)
    rope = loud * random(300, 64, seed=1).clamp(-4, 4)
    rope_scale = 2.0 ** math.ceil(math.log2(100 * loud / E4M3_MAX))
    # What `latent_scales` gives for norm weights of this size: the bound sqrt(R) x max |w|.
    scale = 2.0 ** math.ceil(math.log2(math.sqrt(rank) * 0.1 / E4M3_MAX))
    rows = encode_latent(latent, rope, cache_format, scale, rope_scale)
    back = decode_latent(rows, cache_format, rank, 64, scale, rope_scale)
    exact = {"float32": 0.0, "bfloat16": 2.0**-8}
    latent_step = exact.get(cache_format, HALF_STEP)
    rope_step = exact.get(cache_format, HALF_STEP if cache_format == "fp8" else 2.0**-8)
    latent_floor = TINIEST * (scale if cache_format == "fp8" else 0.1 / 256) if latent_step == HALF_STEP else 0.0
    rope_floor = TINIEST * rope_scale if rope_step == HALF_STEP else 0.0
    assert ((back[:, :rank] - latent).abs() <= (latent.abs() * latent_step).clamp(min=latent_floor)).all()
    assert ((back[:, rank:] - rope).abs() <= (rope.abs() * rope_step).clamp(min=rope_floor)).all()


def test_load_07_the_static_scale_never_saturates_and_wastes_no_binade(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    config = ModelConfig.from_folder(tmp_path, None)
    weights = load_model(tmp_path, config, torch.float32, ReferenceBackend())
    scales = latent_scales(weights, 1.0)
    assert len(scales) == config.num_layers
    for layer, (scale, _) in zip(weights.layers, scales, strict=True):
        # The normalised vector with the largest single value: all of the norm in one place.
        worst = math.sqrt(config.kv_lora_rank) * float(layer.attention.kv_a_norm.abs().max())
        assert worst / scale <= E4M3_MAX < 2 * worst / scale


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("loud", [1, 1000])
def test_load_07_the_rotary_part_never_saturates(tmp_path: Path, fp8: bool, loud: float) -> None:
    """Behind the hidden state that a row of the projection answers to most, turned by every angle."""
    make_checkpoint(tmp_path, "glm_moe_dsa", num_hidden_layers=2, fp8=fp8)
    config = ModelConfig.from_folder(tmp_path, None)
    weights = load_model(tmp_path, config, torch.float32, ReferenceBackend())
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    for layer in weights.layers:
        kv_a = layer.attention.kv_a
        assert isinstance(kv_a, StoredLinear)
        # The scale of an fp8 block, or the weights themselves; the latent part is normalised afterwards.
        (kv_a.weight if kv_a.scale is None else kv_a.scale).mul_(loud)
    scales = latent_scales(weights, 1.0)
    for layer, (_, rope_scale) in zip(weights.layers, scales, strict=True):
        projection = layer.attention.kv_a
        end = rank + rope_dim
        rows = projection.rows(rank, end)
        worst = torch.nn.functional.normalize(rows * layer.input_norm, dim=-1) * math.sqrt(config.hidden_size)
        keys = (worst * layer.input_norm) @ rows.T
        angles = torch.linspace(0, 2 * math.pi, 33)[:, None, None].expand(-1, 1, rope_dim // 2)
        turned = torch.cat(
            [rotate(keys, a.cos().expand(rope_dim, -1), a.sin().expand(rope_dim, -1), True) for a in angles[:, 0]]
        )
        assert turned.abs().max() / rope_scale <= E4M3_MAX < 4 * turned.abs().max() / rope_scale
        stored = encode_latent(torch.zeros(len(turned), rank), turned, "fp8", 1.0, rope_scale)
        back = decode_latent(stored, "fp8", rank, rope_dim, 1.0, rope_scale)[:, rank:]
        assert ((back - turned).abs() <= (turned.abs() * HALF_STEP).clamp(min=TINIEST * rope_scale)).all()


def test_load_07_yarns_factor_is_in_the_rotary_scale(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    weights = load_model(tmp_path, ModelConfig.from_folder(tmp_path, None), torch.float32, ReferenceBackend())
    for plain, turned in zip(latent_scales(weights, 1.0), latent_scales(weights, 2.0), strict=True):
        assert turned == (plain.latent, 2 * plain.rope)


def test_load_07_a_missing_or_broken_scale_is_an_error(tmp_path: Path) -> None:
    rows = torch.empty(1, 8, 40, dtype=torch.uint8)
    for given in ({}, {"scale": 1.0}, {"rope_scale": 1.0}):
        with pytest.raises(TypeError, match="scale"):
            LatentCache(rows, "fp8", 32, 8, **given)  # type: ignore[call-arg, arg-type]
    make_checkpoint(tmp_path, "glm_moe_dsa", num_hidden_layers=2)
    config = ModelConfig.from_folder(tmp_path, None)
    weights = load_model(tmp_path, config, torch.float32, ReferenceBackend())
    weights.layers[1].attention.kv_a_norm[3] = float("nan")
    with pytest.raises(ModelError, match="layer 1: kv_a_layernorm"):
        latent_scales(weights, 1.0)
    weights.layers[0].input_norm[3] = float("inf")
    with pytest.raises(ModelError, match="layer 0: kv_a_proj_with_mqa or input_layernorm"):
        latent_scales(weights, 1.0)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="fp4"):
        encode_latent(torch.zeros(1, 8), torch.zeros(1, 4), "fp4", 1.0, 1.0)
    with pytest.raises(ValueError, match="fp4"):
        decode_latent(torch.zeros(1, 8, dtype=torch.uint8), "fp4", 4, 4, 1.0, 1.0)


LENGTHS = [pytest.param(8192, id="8K"), pytest.param(65_536, id="64K", marks=pytest.mark.slow)]


@pytest.mark.parametrize("length", LENGTHS)
def test_load_07_logits_of_fp8_caches_stay_close_to_bf16(tmp_path: Path, length: int) -> None:
    # Neither an indexer nor experts: the caches' rounding is all that differs, not what a near-tie chooses.
    make_checkpoint(
        tmp_path, "deepseek_v3", dtype=torch.bfloat16, num_hidden_layers=2, first_k_dense_replace=2,
        max_position_embeddings=2 * length,
    )  # fmt: skip
    prompt = tokens(length)
    logits = {}
    for cache_format in ("bfloat16", "fp8", "fp8_ds_mla"):
        llm = engine(
            tmp_path, dtype="auto", kv_cache_dtype=cache_format, max_model_len=length + 8, max_num_seqs=1,
            memory_budget="3GiB",
        )  # fmt: skip
        logits[cache_format] = run(llm, prompt).logits[-512:]
    for cache_format in ("fp8", "fp8_ds_mla"):
        cosine = torch.cosine_similarity(logits[cache_format], logits["bfloat16"], -1)
        assert cosine.mean() > 0.999, f"{cache_format}: {cosine.mean():.5f}"
