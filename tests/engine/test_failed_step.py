"""A step that raises leaves nothing behind: the same tokens afterwards, and no page that was never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import LLM, SamplingParams
from longfill.request import RequestOutput

PROMPT = tokens(60)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
STEPS = 4 + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa")
    return path


def start(folder: Path) -> LLM:
    return engine(folder, max_num_batched_tokens=16, block_size=8, digest=True)


def finish(llm: LLM) -> RequestOutput:
    last = None
    while llm.engine.has_unfinished_requests:
        for output in llm.engine.step():
            last = output
    assert last is not None
    return last


@pytest.mark.parametrize("failing", range(STEPS))
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_raises_is_taken_back(folder: Path, failing: int, error: type[BaseException]) -> None:
    [want] = start(folder).generate(PROMPT, GREEDY)
    llm = start(folder)
    forward = llm.engine.worker.decoder.forward
    calls = 0

    def fail_once(rows: Any, **given: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise error
        return forward(rows, **given)

    llm.engine.worker.decoder.forward = fail_once  # type: ignore[assignment]
    llm.engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(error):
        finish(llm)
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages
    llm.engine.cache.check()
    resumed = finish(llm)
    assert resumed.outputs[0].token_ids == want.outputs[0].token_ids
    assert resumed.digest == want.digest
    [warm] = llm.generate(PROMPT, GREEDY)
    assert warm.num_cached_tokens == 56
    assert (warm.outputs[0].token_ids, warm.digest) == (want.outputs[0].token_ids, want.digest)


def test_a_prompt_is_the_engines_own_copy(folder: Path) -> None:
    [want] = start(folder).generate(PROMPT, GREEDY)
    buffer = np.array(PROMPT)
    llm = start(folder)
    llm.engine.add_request("a", buffer, GREEDY)
    buffer[:] = 3
    assert finish(llm).digest == want.digest


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("owner", "method", "after"),
    [
        ("scheduler", "schedule", False),
        ("scheduler", "schedule", True),
        ("scheduler", "update", False),
        ("_pipeline", "submit", False),
        ("_pipeline", "wait", True),
    ],
)
def test_an_interrupt_between_planning_and_booking_is_taken_back(
    folder: Path, depth: int, owner: str, method: str, after: bool
) -> None:
    [want] = start(folder).generate(PROMPT, GREEDY)
    llm = engine(
        folder,
        max_num_batched_tokens=16,
        block_size=8,
        digest=True,
        async_scheduling=depth > 1,
        max_concurrent_batches=depth,
    )
    part = getattr(llm.engine, owner)
    real, calls = getattr(part, method), 0

    def interrupted(*args: Any, **given: Any) -> object:
        nonlocal calls
        calls += 1
        result = real(*args, **given) if after or calls != 3 else None
        if calls == 3:
            raise KeyboardInterrupt
        return result

    setattr(part, method, interrupted)
    llm.engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        finish(llm)
    llm.engine.cache.check()
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages
    resumed = finish(llm)
    assert (resumed.outputs[0].token_ids, resumed.digest) == (want.outputs[0].token_ids, want.digest)
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages


def test_completions_that_ended_in_a_step_that_raised_are_gone(folder: Path) -> None:
    llm = engine(folder, async_scheduling=True, max_concurrent_batches=2)
    execute, calls = llm.engine.worker.execute, 0

    def fail_once(*args: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:  # the step behind the one in which the first completion stops
            raise MemoryError("in the worker")
        return execute(*args)

    llm.engine.worker.execute = fail_once  # type: ignore[assignment]
    params = SamplingParams(n=2, seed=1, max_tokens=4, stop_token_ids=list(range(512)))
    with pytest.raises(MemoryError, match="in the worker"):
        llm.generate([PROMPT, PROMPT[:5]], params)
    assert not llm.engine.has_unfinished_requests
    [output] = llm.generate(PROMPT, params)
    assert len(output.outputs) == 2
