"""Steps in flight and drafts change nothing: the same tokens and bits under preemption, aborts, stops and failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.partition import StepRequest
from longfill.request import RequestOutput

DEPTHS = (1, 2, 3)
DRAFTS = (0, 1, 3)
STEPS = 31
LENGTHS = (3, 17, 40, 8, 9, 25, 1, 33, 16, 64)
Done = dict[str, tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    return path


def start(folder: Path, depth: int = 1, drafts: int = 0, **args: Any) -> LLMEngine:
    defaults = {"block_size": 4, "max_num_batched_tokens": 32, "max_model_len": 100, "max_num_seqs": 6, "digest": True}
    overlap = {"async_scheduling": depth > 1, "max_concurrent_batches": depth}
    speculative = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    return engine(folder, **(defaults | overlap | {"speculative_config": speculative} | args)).engine


def add_crowd(core: LLMEngine, count: int = 20, **params: Any) -> None:
    shared = tokens(20, seed=99)
    for i in range(count):
        own = tokens(LENGTHS[i % len(LENGTHS)], seed=i)
        given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1 + (5 * i) % 13} | params
        core.add_request(f"r{i}", [*shared, *own] if i % 3 == 0 else own, SamplingParams(**given))


def guess_well(core: LLMEngine, want: Done) -> LLMEngine:
    """Let two of three drafts be right: a random layer's never are, and then rejection alone would be tested."""
    tails, rng = core.worker.tails, random.Random(0)
    book = tails.book

    def rigged(request: StepRequest, sampled: Sequence[int], drafts: Sequence[int]) -> None:
        owner = core.scheduler.requests.get(request.request_id)  # None: it ended while the step ran
        guesses = list(drafts)
        if owner is not None:
            first = request.seq_len - request.num_drafts + len(sampled) - owner.num_prompt_tokens
            right = want[request.request_id][0][first : first + len(drafts)]
            guesses[: len(right)] = [r if rng.random() < 0.67 else d for r, d in zip(right, drafts, strict=False)]
        book(request, sampled, guesses)

    tails.book = rigged  # type: ignore[method-assign]
    return core


def drive(core: LLMEngine, before_step: Callable[[int], None] = lambda _: None) -> Done:
    done: dict[str, RequestOutput] = {}
    step = 0
    while core.has_unfinished_requests:
        before_step(step)
        for out in core.step():
            assert out.request_id not in done, "an output behind the last one"
            if out.finished:
                done[out.request_id] = out
        step += 1
        core.cache.check()
    return {name: (out.outputs[0].token_ids, out.digest) for name, out in done.items()}


def assert_all_pages_back(core: LLMEngine) -> None:
    core.step()  # books what is still in flight for nobody
    core.cache.check()
    assert not core._pipeline
    assert core.cache.num_free_pages == core.cache.num_usable_pages


@pytest.fixture(scope="module")
def want(folder: Path) -> Done:
    core = start(folder)
    add_crowd(core)
    return drive(core)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_bits_at_every_depth_and_with_every_number_of_drafts(
    folder: Path, want: Done, depth: int, drafts: int
) -> None:
    core = guess_well(start(folder, depth, drafts), want)
    add_crowd(core)
    assert drive(core) == want
    assert_all_pages_back(core)
    counts = core.stats.spec.num_accepted_tokens_per_pos
    assert len(counts) == drafts
    assert all(count > 3 for count in counts), "drafts were hardly ever right"
    assert core.stats.spec.num_accepted_tokens < core.stats.spec.num_draft_tokens or not drafts


@pytest.mark.parametrize("drafts", DRAFTS[:2])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "steps", [range(0, STEPS, 5), pytest.param(range(STEPS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_sch_05_forced_preemption_at_every_step(
    folder: Path, want: Done, steps: range, depth: int, drafts: int
) -> None:
    core = guess_well(start(folder, depth, drafts), want)
    for at in steps:

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                for request in core.scheduler.running[:: 1 + at % 2]:
                    core.scheduler.preempt(request.request_id)

        add_crowd(core)
        assert drive(core, preempt) == want, f"preempted at step {at}"
        assert_all_pages_back(core)
        assert core.cache.reset_prefix_cache()
    assert core.stats.steps > 0


@pytest.mark.parametrize("drafts", DRAFTS[:2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_sch_06_aborts_at_every_step_let_no_token_out_and_return_every_page(
    folder: Path, want: Done, depth: int, drafts: int
) -> None:
    core = guess_well(start(folder, depth, drafts), want)
    for at in range(0, 20, 2):
        aborted: dict[str, list[int]] = {}

        def abort(step: int, at: int = at, aborted: dict[str, list[int]] = aborted) -> None:
            if step == at:
                for name in list(core.scheduler.requests)[::2]:
                    out = core.abort_request(name)
                    assert out is not None
                    aborted[name] = out.outputs[0].token_ids

        add_crowd(core)
        got = drive(core, abort)
        assert aborted
        assert not aborted.keys() & got.keys()
        assert got == {name: result for name, result in want.items() if name not in aborted}
        for name, token_ids in aborted.items():
            assert token_ids == want[name][0][: len(token_ids)]
        assert_all_pages_back(core)
        assert core.cache.reset_prefix_cache()


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_tokens_end_a_request_in_the_middle_of_what_a_step_brings(folder: Path, depth: int, drafts: int) -> None:
    results = []
    for args in [{}, {"depth": depth, "drafts": drafts}]:
        core = start(folder, **args)
        add_crowd(core, max_tokens=12, stop_token_ids=list(range(0, 512, 6)))
        results.append(drive(core))
        assert_all_pages_back(core)
    assert results[0] == results[1]
    assert len({len(token_ids) for token_ids, _ in results[0].values()}) > 3, "they all ended at the same place"


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_same_draws_at_a_temperature(folder: Path, depth: int, drafts: int) -> None:
    results = []
    for args in [{}, {"depth": depth, "drafts": drafts}]:
        core = start(folder, **args)
        add_crowd(
            core,
            temperature=0.7,
            top_p=0.9,
            seed=5,
            max_tokens=12,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=2,
        )
        results.append(drive(core))
    assert results[0] == results[1]


@pytest.mark.parametrize("drafts", DRAFTS[:2])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("failing", [0, 1, 2, 5, 9])
def test_a_step_that_raises_is_taken_back_with_those_behind_it(
    folder: Path, want: Done, failing: int, depth: int, drafts: int
) -> None:
    core = guess_well(start(folder, depth, drafts), want)
    execute, calls = core.worker.execute, 0

    def fail_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise MemoryError
        return execute(*args)

    core.worker.execute = fail_once  # type: ignore[method-assign]
    add_crowd(core)
    done: Done = {}

    def run_on() -> None:
        while core.has_unfinished_requests:
            done.update({o.request_id: (o.outputs[0].token_ids, o.digest) for o in core.step() if o.finished})

    with pytest.raises(MemoryError):
        run_on()
    assert core.cache.num_free_pages == core.cache.num_usable_pages
    core.cache.check()
    assert done | drive(core) == want
    assert_all_pages_back(core)


@pytest.mark.parametrize("drafts", DRAFTS[:2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_without_numbers_ends_alone(folder: Path, want: Done, depth: int, drafts: int) -> None:
    core = guess_well(start(folder, depth, drafts), want)
    logits = core.worker.decoder.logits
    calls = 0

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        rows = logits(hidden)
        if calls == 4:
            rows[0] = torch.nan
        return rows

    core.worker.decoder.logits = spoil  # type: ignore[method-assign]
    add_crowd(core)
    ended: dict[str, RequestOutput] = {}
    while core.has_unfinished_requests:
        ended |= {out.request_id: out for out in core.step() if out.finished}
    failed = [name for name, out in ended.items() if out.outputs[0].finish_reason == "error"]
    assert len(failed) == 1
    assert {n: (o.outputs[0].token_ids, o.digest) for n, o in ended.items() if n not in failed} == {
        name: result for name, result in want.items() if name not in failed
    }
    assert_all_pages_back(core)
