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
from longfill.request import RequestOutput, RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = SamplingParams(n=2, temperature=1, seed=3, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    return path


def start(folder: Path, **args: Any) -> LLMEngine:
    return engine(folder, **({"block_size": 4, "max_model_len": 100} | args)).engine


def run(core: LLMEngine, kind: RequestOutputKind) -> list[RequestOutput]:
    core.add_request("one", tokens(9), dataclasses.replace(GREEDY, output_kind=kind))
    core.add_request("short", tokens(9, 1), dataclasses.replace(GREEDY, max_tokens=2, output_kind=kind))
    core.add_request("several", tokens(9, 2), dataclasses.replace(SEVERAL, output_kind=kind))
    outputs = []
    while core.has_unfinished_requests:
        outputs += core.step()
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_final_outputs_alone_are_those_that_end_all_others(folder: Path, depth: int) -> None:
    overlap = {"async_scheduling": depth > 1, "max_concurrent_batches": depth}
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
    every, final = (run(start(folder, **overlap), kind) for kind in kinds)
    ended = {out.request_id: out.outputs for out in every if out.finished}
    assert {out.request_id: out.outputs for out in final} == ended
    assert len(final) == 3
    assert sum(out.request_id == "one" for out in every) == 6
    assert sum(out.request_id == "several" for out in every) > 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 2])
def test_deltas_in_order_make_up_the_final_output(folder: Path, depth: int, drafts: int) -> None:
    options: dict[str, Any] = {"async_scheduling": depth > 1, "max_concurrent_batches": depth}
    if drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    kinds = (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
    final, deltas = (run(start(folder, **options), kind) for kind in kinds)
    joined: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], list[str | None]] = {}
    for output in deltas:
        assert len({part.index for part in output.outputs}) == len(output.outputs)
        for part in output.outputs:
            joined.setdefault((output.request_id, part.index), []).extend(part.token_ids)
            reasons.setdefault((output.request_id, part.index), []).append(part.finish_reason)
    assert joined == {(out.request_id, part.index): part.token_ids for out in final for part in out.outputs}
    assert all(last is not None and not any(before) for *before, last in reasons.values())
    assert sum(out.finished for out in deltas) == 3


def test_an_abort_between_deltas_ends_every_completion_and_repeats_nothing(folder: Path) -> None:
    core = start(folder)
    core.add_request("several", tokens(9), dataclasses.replace(SEVERAL, output_kind=RequestOutputKind.DELTA))
    while not (first := core.step()):
        pass
    last = core.abort_request("several")
    assert last is not None
    assert last.finished
    assert [(part.index, part.token_ids, part.finish_reason) for part in last.outputs] == [
        (0, [], "abort"),
        (1, [], "abort"),
    ]
    assert [part.index for part in first[0].outputs] == [0]
    assert not core.has_unfinished_requests


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
