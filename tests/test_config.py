"""Engine arguments are refused for what they are."""

from __future__ import annotations

from typing import Any

import pytest

from longfill.config import EngineArgs, choices_of
from longfill.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"memory_budget": 2**31}, r"--memory-budget: expected text, got 2147483648; .* as \"2GiB\""),
        ({"max_num_batched_tokens": None}, "--max-num-batched-tokens: expected an integer, got None"),
        ({"max_num_batched_tokens": 4096.0}, "--max-num-batched-tokens: expected an integer, got 4096.0"),
        ({"max_model_len": "4096"}, "--max-model-len: expected an integer, got '4096'"),
        ({"block_size": True}, "--block-size: expected an integer, got True"),
        ({"enable_prefix_caching": "no"}, "--enable-prefix-caching: expected True or False, got 'no'"),
        ({"digest": 1}, "--digest: expected True or False, got 1"),
        ({"enable_prefix_caching": None}, "--enable-prefix-caching: expected True or False, got None"),
        ({"model": None}, "--model: expected text, got None"),
        ({"tokenizer": 3}, "--tokenizer: expected text, got 3"),
        ({"hf_overrides": '{"index_topk": 8}'}, "--hf-overrides: expected a mapping"),
        ({"dtype": "int8"}, "--dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": None}, "--dtype: None is not one of auto"),
        ({"kv_cache_dtype": ["fp8"]}, "--kv-cache-dtype: .* is not one of auto"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens: 0 is out of range"),
    ],
)
def test_a_knob_of_another_type_is_refused_by_its_flag(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**args)


def test_optional_knobs_take_none_and_mappings_are_read_only() -> None:
    EngineArgs(tokenizer=None, max_model_len=None, memory_budget=None, hf_overrides={"index_topk": 8}, num_threads=None)


def test_choices_are_those_of_the_annotation() -> None:
    assert choices_of("attention_path") == ("auto", "paged", "workspace")
    assert choices_of("model") == choices_of("block_size") == choices_of("digest") == ()
    for knob in ("dtype", "kv_cache_dtype", "indexer_cache_dtype", "kernel_backend"):
        assert choices_of(knob)[0] == "auto"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, ["--decode-context-parallel-size 2", "3"]),
        (
            {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 3},
            ["--decode-context-parallel-size 3", "must be 1, 2 or 4"],
        ),
        ({"deterministic": True, "tensor_parallel_size": 3}, ["--deterministic", "--tensor-parallel-size 3"]),
        ({"pcp_split": "interleave"}, ["--pcp-split", "--prefill-context-parallel-size"]),
        ({"all2all_backend": "low_latency"}, ["--all2all-backend", "--enable-expert-parallel"]),
        ({"dcp_comm_backend": "ag_rs"}, ["--dcp-comm-backend", "--decode-context-parallel-size"]),
        ({"cp_kv_cache_interleave_size": 2}, ["--cp-kv-cache-interleave-size", "--decode-context-parallel-size"]),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 3},
            ["--cp-kv-cache-interleave-size 3", "--block-size 64"],
        ),
    ],
)
def test_sizes_of_ranks_that_are_no_mesh_are_refused_with_both_names(given: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs(**given)
    assert all(text in str(error.value) for text in texts)


def test_ranks_of_this_machine_are_all_unless_torchrun_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(tensor_parallel_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert args.local_ranks == 4
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
        assert args.local_ranks == 4  # not launched, or by itself, as a container may be that starts its own ranks
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert args.local_ranks == 2
    assert EngineArgs(tensor_parallel_size=4, distributed_executor_backend="mp").local_ranks == 4
