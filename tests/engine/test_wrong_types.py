"""What `LLM` and `SamplingParams` are given by mistake is refused in one sentence, and the engine goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle.harness import engine
from tests.tiny import make_checkpoint

from longfill import LLM, SamplingParams
from longfill.errors import LongfillError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa")
    return engine(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 0), ("max_tokens", "2"),
        ("logprobs", 1.5), ("logprobs", True), ("logprobs", -1),
        ("temperature", "a"), ("temperature", None), ("temperature", True), ("temperature", float("nan")),
        ("top_p", "x"), ("top_p", 0), ("top_k", 1.5), ("top_k", -2), ("min_p", None), ("seed", 1.5), ("seed", 2**64),
        ("n", 0), ("n", 16_385), ("n", 1.0), ("n", True), ("n", None), ("min_tokens", -1), ("min_tokens", 1.5),
        ("min_tokens", 17), ("min_tokens", None), ("prompt_logprobs", -1), ("prompt_logprobs", 65),
        ("prompt_logprobs", True), ("presence_penalty", 2.01), ("presence_penalty", float("nan")),
        ("presence_penalty", None), ("frequency_penalty", -2.01), ("frequency_penalty", "1"),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")), ("repetition_penalty", True), ("logit_bias", [1]), ("logit_bias", 3),
        ("logit_bias", {-1: 0}), ("logit_bias", {"1": 0}), ("logit_bias", {1: 100.1}), ("logit_bias", {1: None}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {True: 1}),
        ("stop", 3), ("stop", ["a", 3]), ("stop", [""]), ("stop_token_ids", "abc"), ("stop_token_ids", [-1]),
    ],
)  # fmt: skip
def test_a_sampling_parameter_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_both_ends_of_a_range_are_taken() -> None:
    for field, values in {
        "n": (1, 16_384), "presence_penalty": (-2, 2), "frequency_penalty": (-2.0, 2.0), "min_tokens": (0, 16),
        "repetition_penalty": (5e-324, 1e308), "prompt_logprobs": (0, 64),
        "logit_bias": ({}, {0: -100, 10**9: 100.0}, {np.int64(3): np.float32(1)}),
    }.items():  # fmt: skip
        for value in values:
            assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_without_max_tokens_and_greedy_completions() -> None:
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens 4, got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="n must be 1 with temperature 0, got 2"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    "prompts",
    [
        None, 5, b"abc", {1, 2}, ["a", None], [[2**70]], [["a", "b"]], [[1.5, 2]], [1.5, 2.0], [True, False], [[[1]]],
        np.array([1.0, 2.0]), np.array([[1, 2], [3, 4]]), {"prompt": 3}, {"prompt_token_ids": 3}, {},
        {"prompt_token_ids": [1], "cache_salt": 3}, {"prompt_token_ids": [1], "priority": "1"},
        {"prompt_token_ids": [1], "priority": True}, {"prompt_token_ids": [1], "priority": 1.0},
        {"prompt_token_ids": [1], "tenant": 3}, {"prompt_token_ids": [1], "n": 2}, [], [[]],
    ],
    ids=repr,
)  # fmt: skip
def test_a_prompt_of_the_wrong_kind_is_refused_and_leaves_nothing_behind(llm: LLM, prompts: Any) -> None:
    if isinstance(prompts, list) and not prompts:
        assert llm.generate(prompts, GREEDY) == []
        return
    with pytest.raises(LongfillError):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages


@pytest.mark.parametrize("params", ["x", 3, {"max_tokens": 2}, [GREEDY, None]])
def test_sampling_params_of_the_wrong_kind_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises((LongfillError, TypeError)):
        llm.generate([[5, 6], [7]], params)
    assert not llm.engine.has_unfinished_requests


def test_a_prompt_may_bring_a_salt_a_priority_and_a_tenant(llm: LLM) -> None:
    seen = []
    add = llm.engine.scheduler.add_request
    llm.engine.scheduler.add_request = lambda request: (seen.append(request), add(request))  # type: ignore[assignment,func-returns-value]
    prompt = {"prompt_token_ids": [5, 6, 7], "cache_salt": "s", "priority": -3, "tenant": "t"}
    try:
        llm.generate([prompt, [5, 6, 7], {"prompt_token_ids": [5], "tenant": None}], GREEDY)
    finally:
        llm.engine.scheduler.add_request = add  # type: ignore[method-assign]
    assert [(r.cache_salt, r.priority, r.tenant) for r in seen] == [("s", -3, "t"), ("", 0, ""), ("", 0, "")]


def test_integer_arrays_and_tensors_are_prompts(llm: LLM) -> None:
    [want] = llm.generate([5, 6, 7], GREEDY)
    for prompt in (np.array([5, 6, 7], dtype=np.int32), np.array([5, 6, 7], dtype=np.uint8), torch.tensor([5, 6, 7])):
        [got] = llm.generate(prompt, GREEDY)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
