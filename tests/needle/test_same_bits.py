"""One digest of the bundled model's answer: every step budget, thread count, prefix hit, preemption and company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longfill import LLM, SamplingParams
from longfill.cli.needle_task import ANSWER_PARAMS, prompt_for, text_with_facts
from longfill.request import RequestOutput

CONTEXT = 700
"""Tokens: eleven pages, eleven times index_topk."""
BUDGETS = (1, 7, 64, 1000, 4096, 16384)

MTP = {"method": "mtp", "num_speculative_tokens": 3}
MODES: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "drafts": {"speculative_config": MTP},
    "both": {"async_scheduling": True, "max_concurrent_batches": 3, "speculative_config": MTP},
    "both, split": {"async_scheduling": True, "speculative_config": MTP, "split_mixed_batch": True},
    "fair": {"prefill_policy": "fair", "speculative_config": MTP},
}

Result = tuple[list[int], str]


def start(**args: Any) -> LLM:
    defaults: dict[str, Any] = {"max_model_len": 1024, "memory_budget": "4GiB", "num_threads": 1, "digest": True}
    return LLM("needle", **(defaults | {"sparse_indexer_max_logits_mb": 16} | args))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    llm = start()
    text = text_with_facts(llm, CONTEXT, seed=3)
    assert llm.engine.tokenizer is not None
    return [int(i) for i in llm.engine.tokenizer.encode(prompt_for(text, text.facts[0]))]


@pytest.fixture(scope="module")
def want(prompt: list[int]) -> Result:
    [result] = results(start(max_num_batched_tokens=16384, enable_prefix_caching=False), [prompt])
    return result


@pytest.fixture(autouse=True)
def _one_thread_after() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def results(llm: LLM, prompts: list[list[int]]) -> list[Result]:
    outputs = llm.generate(prompts, ANSWER_PARAMS)
    assert all(output.digest for output in outputs)
    return [(output.outputs[0].token_ids, str(output.digest)) for output in outputs]


@pytest.mark.parametrize("budget", BUDGETS)
def test_det_01_every_step_budget(prompt: list[int], want: Result, budget: int) -> None:
    llm = start(max_num_batched_tokens=budget)
    assert results(llm, [prompt]) == [want]
    assert llm.stats.steps >= len(prompt) // budget


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_det_01_with_steps_in_flight_and_drafts(prompt: list[int], want: Result, budget: int, mode: str) -> None:
    llm = start(max_num_batched_tokens=budget, **MODES[mode])
    assert results(llm, [prompt] * 3) == [want] * 3
    if "speculative_config" in MODES[mode]:
        assert llm.stats.spec.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", ["overlap", "both"])
def test_a_preemption_at_every_step_with_steps_in_flight(prompt: list[int], want: Result, mode: str) -> None:
    llm = start(max_num_batched_tokens=100, **MODES[mode])
    assert results(llm, [prompt]) == [want]
    steps, preempted = llm.stats.steps, 0
    for at in range(1, steps):
        llm.engine.cache.reset_prefix_cache()
        llm.engine.add_request("a", prompt, ANSWER_PARAMS)
        finished: list[RequestOutput] = []
        for step in range(1, 100):
            finished += [output for output in llm.engine.step() if output.finished]
            if step == at and llm.engine.scheduler.running:
                llm.engine.scheduler.preempt("a")
            if not llm.engine.has_unfinished_requests:
                break
        assert [(out.outputs[0].token_ids, out.digest) for out in finished] == [want]
        preempted += finished[0].metrics.num_preemptions
    assert preempted > steps // 2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(prompt: list[int], want: Result, threads: int) -> None:
    for budget in (100, 4096):
        assert results(start(num_threads=threads, max_num_batched_tokens=budget), [prompt]) == [want]


def test_a_prefix_hit_of_every_page_count(prompt: list[int], want: Result) -> None:
    llm = start()
    page = llm.engine_args.block_size
    for pages in range(len(prompt) // page + 1):
        llm.engine.cache.reset_prefix_cache()
        if pages:
            llm.generate([prompt[: pages * page]], SamplingParams(temperature=0, max_tokens=1))
        [output] = llm.generate([prompt], ANSWER_PARAMS)
        assert output.num_cached_tokens == min(pages * page, (len(prompt) - 1) // page * page)
        assert (output.outputs[0].token_ids, output.digest) == want


@pytest.mark.parametrize("caching", [True, False])
def test_a_preemption_at_every_step(prompt: list[int], want: Result, caching: bool) -> None:
    """One run for each step of the undisturbed one, in which the request loses its pages right after that step."""
    llm = start(max_num_batched_tokens=100, enable_prefix_caching=caching)
    assert results(llm, [prompt]) == [want]
    steps = llm.stats.steps
    assert steps > len(prompt) // 100 + 2
    for preempted in range(1, steps):
        llm.engine.cache.reset_prefix_cache()
        llm.engine.add_request("a", prompt, ANSWER_PARAMS)
        finished = []
        for step in range(1, 100):
            finished += [output for output in llm.engine.step() if output.finished]
            if step == preempted:
                llm.engine.scheduler.preempt("a")
            if not llm.engine.has_unfinished_requests:
                break
        assert [(out.outputs[0].token_ids, out.digest) for out in finished] == [want]
        assert finished[0].metrics.num_preemptions == 1


def test_beside_sixteen_other_requests(prompt: list[int], want: Result) -> None:
    others = [prompt[i : 5 + 40 * i] for i in range(1, 17)]
    llm = start(max_num_seqs=17, max_num_batched_tokens=300)
    got = results(llm, [*others[:8], prompt, *others[8:]])
    assert got[8] == want
    alone = start(enable_prefix_caching=False)
    assert got[:8] + got[9:] == [results(alone, [other])[0] for other in others]
