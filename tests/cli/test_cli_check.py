"""`longfill check`: what it runs, what it calls equal, and its exit code."""

from __future__ import annotations

import json
import math

import pytest

from longfill.cli import check
from longfill.config import EngineArgs
from longfill.request import CompletionOutput, Logprob


def test_dsa_11_check_compares_dense_with_every_sparse_path_at_raised_topk(longfill, engines):
    ran = longfill("check", "--json")
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values["ok"] is True
    assert values["kernel_paths"] == {"index_topk": "reference"}
    assert {row["case"] for row in values["comparisons"]} == {"as configured", "top-k raised"}
    raised = [llm.args for llm in engines.made if llm.args.hf_overrides]
    assert all(args.hf_overrides["index_topk"] >= check.LONG_PROMPT + check.DECODED for args in raised)
    assert {(args.sparse_mla_force_mqa, args.attention_path) for args in raised} >= {
        (False, "auto"),
        (True, "paged"),
        (True, "workspace"),
    }
    assert min(args.max_num_batched_tokens for args in raised) < check.LONG_PROMPT


def test_the_short_prompt_is_64_tokens_at_the_models_own_topk(longfill, engines):
    longfill("check")
    short = [llm for llm in engines.made if llm.asked and not llm.args.hf_overrides]
    assert {len(llm.asked[0]) for llm in short} == {64}
    assert len(short) == 3


def test_other_overrides_stay_beside_the_raised_topk(longfill, engines):
    longfill("check", "--hf-overrides", '{"num_hidden_layers": 2}')
    assert engines.last.args.hf_overrides["num_hidden_layers"] == 2
    assert "index_topk" in engines.last.args.hf_overrides


@pytest.mark.parametrize("path", ["paged", "workspace"])
def test_a_path_that_differs_is_exit_code_1_and_named(longfill, engines, path):
    engines.shift = lambda args: 0.01 if args.attention_path == path else 0.0
    ran = longfill("check")
    assert ran.code == 1
    assert "MISMATCH" in ran.out
    values = json.loads(longfill("check", "--json").out)
    assert {row["variant"].split(",")[1].strip() for row in values["comparisons"] if not row["ok"]} == {path}


def test_a_model_without_an_indexer_is_checked_in_chunks():
    [case] = check.cases(EngineArgs(), None, native=False)
    [(_, changes)] = case.variants
    assert changes["max_num_batched_tokens"] < case.prompt_tokens


def completion(*steps: tuple[int, dict[int, float]]) -> CompletionOutput:
    logprobs = [{token: Logprob(value, 1) for token, value in step.items()} for _, step in steps]
    return CompletionOutput(0, "", [token for token, _ in steps], "length", logprobs=logprobs)


def test_difference_is_the_largest_gap_of_a_shared_token():
    one = completion((1, {1: -0.5, 2: -1.0}), (3, {3: -0.25}))
    two = completion((1, {1: -0.5, 2: -1.5}), (3, {3: -0.25, 9: -7.0}))
    assert check.difference(one, two, 1e-3) == pytest.approx(0.5)


def test_a_near_tie_may_be_chosen_otherwise_and_what_follows_is_not_compared():
    one = completion((1, {1: -0.5, 2: -0.5001}), (3, {3: -0.1}))
    two = completion((2, {1: -0.5001, 2: -0.5}), (4, {3: -9.0, 4: -0.1}))
    assert check.difference(one, two, 1e-3) == pytest.approx(1e-4)


def test_another_choice_that_is_no_near_tie_is_a_mismatch():
    one = completion((1, {1: -0.5, 2: -0.6}))
    assert check.difference(one, completion((2, {1: -0.5, 2: -0.6})), 1e-3) == math.inf
    assert check.difference(one, completion((5, {5: -0.5})), 1e-3) == math.inf


def test_not_a_number_and_nothing_to_compare_are_never_equal():
    nan = completion((1, {1: math.nan}))
    gap = check.difference(nan, nan, 1e-3)
    row = check.Comparison("c", "v", 1, 1, gap, 1e-3, {})
    assert math.isnan(gap)
    assert not row.ok
    assert check.difference(completion((1, {1: -0.5})), completion((1, {2: -0.5})), 1e-3) == math.inf


def test_a_native_indexer_is_held_to_the_reference_where_one_runs():
    assert "top-k lowered" not in {case.name for case in check.cases(EngineArgs(), 64, native=False)}
    case = check.cases(EngineArgs(), 64, native=True)[-1]
    assert case.engine.kernel_backend == "reference"
    assert case.engine.hf_overrides is not None
    assert case.engine.hf_overrides["index_topk"] < case.prompt_tokens // 4
    assert [changes["kernel_backend"] for _, changes in case.variants] == ["cpu"]
