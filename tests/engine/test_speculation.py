"""An engine with drafts gives what it gives without: tokens, logits, log-probabilities, text and endings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small_tokenizers import gpt2
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint
from tests.worker.drafts import choose_drafts, speculative

from longfill import LLM, SamplingParams
from longfill.request import RequestOutput

PROMPTS = [tokens(41), tokens(9, 1), tokens(70, 2), tokens(30, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=14, ignore_eos=True, logprobs=3)
RIGHT: dict[str, Sequence[bool]] = {"right": [True], "wrong": [False], "mixed": [True, True, False, True, False]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", mtp=1, num_hidden_layers=2)
    gpt2().save(str(path / "tokenizer.json"))
    return path


def start(folder: Path, drafts: int, **args: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 100, "digest": True}
    return engine(folder, **(defaults | speculative(drafts) | args))


def guess(llm: LLM, truth: Sequence[RequestOutput], right: Sequence[bool]) -> LLM:
    """An engine whose drafts are right or wrong by output index, for prompts in the order of `truth`, over and over."""

    def choose(name: str, first: int, made: Sequence[int]) -> list[int]:
        known = truth[int(name) % len(truth)].outputs[0].token_ids
        tokens = [known[i] if i < len(known) else 3 for i in range(first, first + len(made))]
        return [t if right[i % len(right)] else (t + 1) % 512 for i, t in enumerate(tokens, first)]

    choose_drafts(llm.engine.worker, choose)
    return llm


def said(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(dataclasses.asdict(out.outputs[0]), out.digest) for out in outputs]


def assert_clean(llm: LLM) -> None:
    core = llm.engine
    core.cache.check()
    assert core.cache.num_free_pages == core.cache.num_usable_pages


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_outputs_are_those_without_drafts(folder: Path, params: SamplingParams, drafts: int) -> None:
    plain = start(folder, 0)
    want = plain.generate(PROMPTS, params)
    own = start(folder, drafts)
    assert said(own.generate(PROMPTS, params)) == said(want)
    steps = {}
    for name, right in RIGHT.items():
        llm = guess(start(folder, drafts), want, right)
        assert said(llm.generate(PROMPTS, params)) == said(want)
        assert said(llm.generate(PROMPTS, params)) == said(want), "behind prefix hits"
        assert_clean(llm)
        steps[name] = llm.stats.steps
    assert steps["right"] < steps["mixed"] < steps["wrong"]
    assert said(plain.generate(PROMPTS, params)) == said(want)


def test_preempted_requests_go_on_with_new_drafts(folder: Path) -> None:
    want = start(folder, 0).generate(PROMPTS, GREEDY)
    for right in RIGHT.values():
        llm = guess(start(folder, 3, num_gpu_blocks_override=32), want, right)
        assert said(llm.generate(PROMPTS, GREEDY)) == said(want)
        assert llm.stats.preemptions > 0
        assert_clean(llm)


@pytest.mark.parametrize("end", range(1, 8))
def test_a_stop_token_among_drafts_that_are_right_ends_the_output_there(folder: Path, end: int) -> None:
    truth = start(folder, 0).generate(PROMPTS[:1], GREEDY)
    stop = truth[0].outputs[0].token_ids[end]
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    [want] = start(folder, 0).generate(PROMPTS[:1], params)
    assert want.outputs[0].token_ids[-1] == stop
    llm = guess(start(folder, 3), truth, [True])
    assert said(llm.generate(PROMPTS[:1], params)) == said([want])
    assert_clean(llm)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_among_drafts_that_are_right_ends_the_output_there(folder: Path, include: bool) -> None:
    given = {"skip_tokenizer_init": False}
    truth = start(folder, 0, **given).generate(PROMPTS[:1], GREEDY)
    text = truth[0].outputs[0].text
    found = set()
    for at in range(0, len(text) - 2, 3):
        params = dataclasses.replace(GREEDY, stop=[text[at : at + 2]], include_stop_str_in_output=include)
        [want] = start(folder, 0, **given).generate(PROMPTS[:1], params)
        llm = guess(start(folder, 3, **given), truth, [True])
        assert said(llm.generate(PROMPTS[:1], params)) == said([want])
        assert want.outputs[0].stop_reason == text[at : at + 2]
        assert_clean(llm)
        found.add(len(want.outputs[0].token_ids))
    assert len(found) >= 4, "the stop strings all end at the same few tokens"


@pytest.mark.parametrize("count", range(1, 7))
def test_limits_cut_what_a_step_brings(folder: Path, count: int) -> None:
    truth = start(folder, 0).generate(PROMPTS[:1], GREEDY)
    params = dataclasses.replace(GREEDY, max_tokens=count)
    got = guess(start(folder, 3), truth, [True]).generate(PROMPTS[:1], params)[0].outputs[0]
    assert (got.token_ids, got.finish_reason) == (truth[0].outputs[0].token_ids[:count], "length")
    longest = len(PROMPTS[0]) + count
    unlimited = dataclasses.replace(GREEDY, max_tokens=None)
    got = guess(start(folder, 3, max_model_len=longest), truth, [True]).generate(PROMPTS[:1], unlimited)[0].outputs[0]
    assert (got.token_ids, got.finish_reason) == (truth[0].outputs[0].token_ids[:count], "length")


def test_an_aborted_request_leaves_nothing_behind(folder: Path) -> None:
    llm = start(folder, 2)
    core = llm.engine
    core.add_request("a", PROMPTS[0], GREEDY)
    core.add_request("b", PROMPTS[1], GREEDY)
    while core.scheduler.requests["a"].num_output_tokens < 3:
        core.step()
    assert len(core.worker.tails) == 2
    core.abort_request("a")
    core.step()
    assert len(core.worker.tails) == 1
    while core.has_unfinished_requests:
        core.step()
    assert_clean(llm)


def test_a_request_whose_logits_break_leaves_the_others_and_their_drafts_alone(folder: Path) -> None:
    want = start(folder, 0).generate(PROMPTS[:2], GREEDY)
    llm = guess(start(folder, 2), want, [True])
    worker, execute = llm.engine.worker, llm.engine.worker.execute
    logits = worker.decoder.logits
    steps = 0

    def broken(hidden_SC: torch.Tensor) -> torch.Tensor:
        logits_SV = logits(hidden_SC)
        logits_SV[rows] = float("nan")
        return logits_SV

    def count(plan: Any, inputs: Any, prompts: Any) -> Any:
        nonlocal steps, rows
        steps += 1
        first = [r.request_id for r in plan.requests if r.samples].index("0") if steps == 5 else None
        rows = slice(0, 0) if first is None else slice(plan.sample_starts[first], plan.sample_starts[first + 1])
        return execute(plan, inputs, prompts)

    rows = slice(0, 0)
    worker.decoder.logits, worker.execute = broken, count  # type: ignore[method-assign]
    failed, whole = llm.generate(PROMPTS[:2], GREEDY)
    assert failed.outputs[0].finish_reason == "error"
    assert "the model's logits contain NaN" in str(failed.outputs[0].stop_reason)
    assert 0 < len(failed.outputs[0].token_ids) < GREEDY.max_tokens  # type: ignore[operator]
    assert said([whole]) == said(want[1:])
    assert_clean(llm)
