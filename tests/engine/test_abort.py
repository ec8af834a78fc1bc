"""Ending a request at any moment frees its pages, lets no token through, and changes nothing for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.request import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = {"first": tokens(30, seed=1), "victim": tokens(70, seed=2), "last": tokens(25, seed=3)}
Done = dict[str, RequestOutput]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2)
    return path


def start(folder: Path, **args: Any) -> LLMEngine:
    defaults = {"block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 100, "digest": True}
    return engine(folder, **(defaults | args)).engine


def drive(core: LLMEngine, when: Callable[[LLMEngine], bool] | None = None) -> tuple[Done, RequestOutput | None]:
    """Run all three requests; abort the victim the first time that `when` holds before a step."""
    for name, prompt in PROMPTS.items():
        core.add_request(name, prompt, GREEDY)
    done: Done = {}
    aborted = None
    while core.has_unfinished_requests:
        if when is not None and aborted is None and when(core):
            aborted = core.abort_request("victim")
            core.cache.check()
        for out in core.step():
            assert aborted is None or out.request_id != "victim", "a token after the abort"
            if out.finished:
                done[out.request_id] = out
    return done, aborted


def computed(core: LLMEngine) -> int:
    return core.scheduler.requests["victim"].num_computed_tokens


PHASES: dict[str, Callable[[LLMEngine], bool]] = {
    "queued": lambda core: core.stats.steps == 0,
    "between chunks": lambda core: 0 < computed(core) < 50,
    "before the last chunk": lambda core: 50 <= computed(core) < 70,
    "first token out": lambda core: core.scheduler.requests["victim"].num_output_tokens == 1,
    "decoding": lambda core: core.scheduler.requests["victim"].num_output_tokens == 4,
}


@pytest.mark.parametrize("phase", PHASES)
def test_sch_06_an_abort_in_any_phase_leaves_the_others_unchanged(folder: Path, phase: str) -> None:
    want, _ = drive(start(folder))
    core = start(folder)
    free = core.cache.num_free_pages
    got, aborted = drive(core, PHASES[phase])
    assert aborted is not None, "the phase never came"
    assert aborted.finished
    assert aborted.outputs[0].finish_reason == "abort"
    expected = {"first token out": 1, "decoding": 4}.get(phase, 0)
    assert aborted.outputs[0].token_ids == want["victim"].outputs[0].token_ids[:expected]
    assert core.cache.num_free_pages == free
    assert "victim" not in got
    for name in ("first", "last"):
        assert got[name].outputs[0].token_ids == want[name].outputs[0].token_ids
        assert got[name].digest == want[name].digest


@pytest.mark.parametrize("at_step", range(8))
def test_sch_06_an_abort_while_the_step_runs_delivers_nothing(folder: Path, at_step: int) -> None:
    want, _ = drive(start(folder))
    core = start(folder)
    execute = core.worker.execute

    def interrupted(*args: Any) -> Any:
        result = execute(*args)
        if core.stats.steps == at_step:
            core.abort_request("victim")
        return result

    core.worker.execute = interrupted  # type: ignore[method-assign]
    got, _ = drive(core)
    assert "victim" not in got
    assert core.cache.num_free_pages == core.cache.num_usable_pages
    core.cache.check()
    for name in ("first", "last"):
        assert got[name].digest == want[name].digest


def test_an_abort_while_preempted(folder: Path) -> None:
    want, _ = drive(start(folder))
    core = start(folder, num_gpu_blocks_override=27, enable_prefix_caching=False)
    got, aborted = drive(core, lambda core: core.scheduler.requests["victim"].num_preemptions > 0)
    if aborted is None:
        pytest.fail("the pool was not tight enough")
    assert got["first"].digest == want["first"].digest
    assert got["last"].digest == want["last"].digest
    assert core.cache.num_free_pages == core.cache.num_usable_pages


def test_aborting_twice_or_an_unknown_id_does_nothing(folder: Path) -> None:
    core = start(folder)
    core.add_request("victim", PROMPTS["victim"], GREEDY)
    assert core.abort_request("victim") is not None
    assert core.abort_request("victim") is None
    assert core.abort_request("nobody") is None
    assert core.step() == []
