"""The FLOP that a prefill cannot do without, against a count row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.bench.checkpoints import PRESETS, preset_config
from longfill.bench.flops import prefill_flops, scored_pairs
from longfill.models.config import ModelConfig

LENGTHS = st.integers(1, 300)


@given(tokens=LENGTHS, topk=st.integers(1, 300))
def test_scored_pairs_are_those_of_rows_that_see_more_than_they_select(tokens, topk):
    assert scored_pairs(tokens, topk) == sum(seen for seen in range(1, tokens + 1) if seen > topk)


@given(tokens=LENGTHS)
def test_attention_counts_the_keys_that_each_row_selects(tokens):
    config = ModelConfig.from_dict(preset_config("toy", {"index_topk": 64}))
    pairs = sum(min(seen, 64) for seen in range(1, tokens + 1))
    # 4 heads over 64 + 16 numbers of a key and 64 of a value, in 4 layers.
    assert prefill_flops(config, tokens)["attend"] == 2 * 4 * 4 * pairs * (64 + 16 + 64)


def test_every_weight_of_a_dense_layer_is_multiplied_once_a_token():
    raw = preset_config("toy", {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "indexer_types": ["full"]})
    flops = prefill_flops(ModelConfig.from_dict(raw), 10)
    # q_a, q_b, kv_a and o; kv_b, absorbed; the indexer's wq_b, wk and weights_proj.
    assert flops["project"] == 20 * (256 * 128 + 128 * 4 * 48 + 256 * 80 + 4 * 32 * 256)
    assert flops["absorb"] == 20 * 4 * (32 + 32) * 64
    assert flops["index project"] == 20 * (128 * 4 * 32 + 256 * 32 + 256 * 4)
    assert flops["mlp"] == 20 * 3 * 256 * 512
    assert flops["head"] == 2 * 256 * 1024
    assert flops["index"] == 0


def test_an_expert_layer_counts_the_experts_that_a_token_takes():
    raw = preset_config("toy", {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]})
    # Two of eight, the shared one, and the router.
    assert prefill_flops(ModelConfig.from_dict(raw), 1)["mlp"] == 2 * (3 * 3 * 256 * 128 + 256 * 8)


def test_shared_layers_do_not_score():
    types = ["full", "shared", "shared", "full"]
    four = prefill_flops(ModelConfig.from_dict(preset_config("toy")), 100)
    two = prefill_flops(ModelConfig.from_dict(preset_config("toy", {"indexer_types": types})), 100)
    assert 2 * two["index"] == four["index"] > 0
    assert two["attend"] == four["attend"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_configs_that_the_engine_reads(preset):
    assert ModelConfig.from_dict(preset_config(preset)).indexer is not None
