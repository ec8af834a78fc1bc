"""What a step hands out: outputs of all requests or of those that ended, and counts that later steps do not spoil."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.engine.stats import ResidentMemory
from longfill.request import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = SamplingParams(n=2, temperature=1, seed=3, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    return path


def start(folder: Path, **args: Any) -> LLMEngine:
    return engine(folder, **({"block_size": 4, "max_model_len": 100} | args)).engine


def run(core: LLMEngine, *, final_only: bool) -> list[RequestOutput]:
    core.add_request("one", tokens(9), GREEDY)
    core.add_request("short", tokens(9, 1), dataclasses.replace(GREEDY, max_tokens=2))
    core.add_request("several", tokens(9, 2), SEVERAL)
    outputs = []
    while core.has_unfinished_requests:
        outputs += core.step(final_only=final_only)
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_final_outputs_alone_are_those_that_end_all_others(folder: Path, depth: int) -> None:
    overlap = {"async_scheduling": depth > 1, "max_concurrent_batches": depth}
    every, final = (run(start(folder, **overlap), final_only=only) for only in (False, True))
    ended = {out.request_id: out.outputs for out in every if out.finished}
    assert {out.request_id: out.outputs for out in final if out.finished} == ended
    assert ended.keys() == {"one", "short", "several"}
    assert sum(out.request_id == "one" for out in every) == 6
    assert [out.request_id for out in final if out.request_id != "several"] == ["short", "one"]
    # Several completions stand in one output, which each of them changes.
    assert sum(out.request_id == "several" for out in final) == sum(out.request_id == "several" for out in every) > 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_of_a_step_behind_the_end_of_a_request_do_not_count(folder: Path, depth: int) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    core = start(folder, speculative_config=drafts, async_scheduling=depth > 1, max_concurrent_batches=depth)
    [out] = engine(folder, max_model_len=100).generate([tokens(9)], dataclasses.replace(GREEDY, max_tokens=20))
    truth = out.outputs[0].token_ids
    stop = next(token for token in truth[5:] if token not in truth[:5])
    core.add_request("one", tokens(9), dataclasses.replace(GREEDY, max_tokens=50, stop_token_ids=[stop]))
    while core.has_unfinished_requests:
        core.step()
    # A step for each token but the first, whose row was the prompt's; a random layer's drafts are wrong.
    assert core.stats.spec.num_drafts == truth.index(stop)
    assert core.stats.spec.num_accepted_tokens == 0


def test_resident_memory_is_looked_up_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([100, 200, 300])
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(looks))))
    memory = ResidentMemory()
    assert [memory.bytes(now) for now in (0.0, 0.05, 0.099, 0.1, 0.15, 0.25)] == [100, 100, 100, 200, 200, 300]
