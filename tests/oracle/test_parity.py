"""Logits and selections equal transformers' own models, however the prompt is cut."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.harness import assert_same, engine, oracle, run, tokens
from tests.tiny import DSA_FAMILIES, FAMILIES, make_checkpoint

NUM_DSA = 40
NUM_DENSE = 8
NEAR_TIES = {38: 138}
"""Seed of a configuration -> seed of its prompt, where the usual one would rank two scores 1e-6 apart as last and next:
sums in another order may keep either."""
DENSE_FAMILIES = tuple(family for family in FAMILIES if family not in DSA_FAMILIES)


def random_config(seed: int) -> tuple[str, dict[str, Any]]:
    """A small configuration that mixes what the two families can vary."""
    rng = random.Random(seed)
    family = DSA_FAMILIES[seed % 2]
    topk = rng.choice([4, 8, 16, 33, 64])
    layers = rng.choice([2, 3, 4])
    experts, groups = rng.choice([(8, 1), (8, 2), (8, 4), (6, 3)])
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "index_topk": topk,
        # Many heads: with few, ReLU makes exact zeros, which transformers breaks as torch.topk happens to.
        "index_n_heads": rng.choice([16, 24]),
        "index_head_dim": rng.choice([16, 32]),
        "qk_rope_head_dim": rng.choice([8, 16]),
        "qk_nope_head_dim": rng.choice([8, 16, 24]),
        "v_head_dim": rng.choice([8, 16, 20]),
        "kv_lora_rank": rng.choice([16, 32, 48]),
        "num_attention_heads": (heads := rng.choice([1, 2, 4, 5])),
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": rng.randint(1, groups),
        "num_experts_per_tok": rng.choice([1, 2]),
        "norm_topk_prob": rng.random() < 0.7,
        "n_shared_experts": rng.choice([1, 2]),
        "first_k_dense_replace": rng.randint(0, layers),
        "attention_bias": rng.random() < 0.3,
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        fields["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": rng.choice([10000.0, 1e6]),
            "factor": rng.choice([2.0, 8.0]),
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": rng.choice([0.0, 1.0]),
        }
    if family == "glm_moe_dsa":
        fields["indexer_types"] = ["full", *(rng.choice(["full", "shared"]) for _ in range(layers - 1))]
    return family, fields


@pytest.mark.parametrize("seed", range(NUM_DSA))
def test_logits_and_selections_equal_transformers_however_the_prompt_is_cut(tmp_path: Path, seed: int) -> None:
    family, fields = random_config(seed)
    model = make_checkpoint(tmp_path, family, seed, fp8=seed % 5 == 3, **fields)
    topk = fields["index_topk"]
    length = [topk - 1, topk, topk + 1, 3 * topk + 5][seed // 2 % 4]
    prompt = tokens(length, NEAR_TIES.get(seed, seed))
    want = oracle(model, prompt)
    for page, chunk in itertools.product((4, 64), (4096, 1, 3, 7, 64)):
        llm = engine(tmp_path, block_size=page, max_num_batched_tokens=chunk, max_num_seqs=1)
        assert_same(run(llm, prompt), want)
        again = run(llm, prompt)
        hit = (length - 1) // page * page
        assert again.logits.shape[0] == length - hit
        assert_same(again, want)


@pytest.mark.parametrize("seed", range(NUM_DENSE))
def test_models_without_an_indexer_equal_transformers(tmp_path: Path, seed: int) -> None:
    family = DENSE_FAMILIES[seed % 4]
    model = make_checkpoint(tmp_path, family, seed, **({"q_lora_rank": None} if seed == 4 else {}))
    prompt = tokens(150, seed)
    want = oracle(model, prompt)
    for page, chunk in ((64, 4096), (4, 7), (64, 1)):
        llm = engine(tmp_path, block_size=page, max_num_batched_tokens=chunk, max_num_seqs=1)
        assert_same(run(llm, prompt), want)
        assert_same(run(llm, prompt), want)


@pytest.mark.parametrize("family", DSA_FAMILIES)
def test_every_attention_path_gives_the_oracles_logits(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path, family)
    prompt = tokens(100)
    want = oracle(model, prompt)
    for path in ("paged", "workspace"):
        for force_mqa in (False, True):
            llm = engine(tmp_path, attention_path=path, sparse_mla_force_mqa=force_mqa, max_num_batched_tokens=33)
            assert_same(run(llm, prompt), want)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mscale_all_dim": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "both mscales": {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
}


def assert_parity(folder: Path, family: str, **fields: Any) -> None:
    """The engine equals transformers on 150 tokens, in one chunk and in chunks of 7; `fields` change the logits."""
    # Many heads: with few, ReLU makes exact zeros, which transformers breaks as torch.topk happens to.
    heads = {"index_n_heads": 16} if family in DSA_FAMILIES else {}
    prompt = tokens(150)
    usual = oracle(make_checkpoint(folder / "usual", family, **heads), prompt).logits
    model = make_checkpoint(folder / "model", family, **heads, **fields)
    want = oracle(model, prompt)
    assert (want.logits - usual).abs().max() > 0.01 * usual.abs().max(), "the fields change nothing"
    for page, chunk in ((64, 4096), (4, 7)):
        llm = engine(folder / "model", block_size=page, max_num_batched_tokens=chunk, enable_prefix_caching=False)
        assert_same(run(llm, prompt), want)


@pytest.mark.parametrize("scales", YARNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_yarn_equals_transformers(tmp_path: Path, family: str, scales: str) -> None:
    assert_parity(tmp_path, family, rope_parameters=YARN | YARNS[scales])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_attention_bias_equals_transformers(tmp_path: Path, family: str) -> None:
    assert_parity(tmp_path, family, attention_bias=True)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2", "glm4_moe_lite"])
def test_rotary_pairs_half_a_head_apart_equal_transformers(tmp_path: Path, family: str) -> None:
    assert_parity(tmp_path, family, rope_interleave=False)


@pytest.mark.parametrize(("groups", "kept", "per_token"), [(4, 2, 2), (2, 1, 4), (4, 3, 3), (8, 2, 2)])
def test_v2_with_group_limited_experts_equals_transformers(
    tmp_path: Path, groups: int, kept: int, per_token: int
) -> None:
    assert_parity(
        tmp_path, "deepseek_v2", topk_method="group_limited_greedy", n_group=groups, topk_group=kept,
        num_experts_per_tok=per_token, routed_scaling_factor=1.7,
    )  # fmt: skip


@pytest.mark.parametrize("part", ["q_a_layernorm", "kv_a_layernorm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_08_the_latents_norms_take_the_configs_epsilon(tmp_path: Path, family: str, part: str) -> None:
    """transformers 5.23 has rms_norm_eps in all norms but q_a_layernorm and kv_a_layernorm, which keep its default.

    So the oracle is told; without being told, it differs.
    """
    model = make_checkpoint(tmp_path, family, rms_norm_eps=0.3)
    norms = {
        name: [getattr(layer.self_attn, name) for layer in model.model.layers]
        for name in ("q_a_layernorm", "kv_a_layernorm")
    }
    prompt = tokens(80)
    for norm in itertools.chain(*norms.values()):
        norm.variance_epsilon = model.config.rms_norm_eps
    want = oracle(model, prompt)
    assert_same(run(engine(tmp_path), prompt), want)
    for norm in norms[part]:
        norm.variance_epsilon = 1e-6
    change = (oracle(model, prompt).logits - want.logits).abs().max() / want.logits.abs().max()
    assert change > 0.01, f"{part}'s epsilon does not show"
