"""Bytes that ranks send are what `partition.comm` says beforehand, exactly, for every operation of every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import needs_native
from tests.parallel.layouts import EXACT, PCP, ROUNDED, TP, answer, prompts
from tests.parallel.recorded import Steps, count_all_ranks, record
from torch import Tensor

from longfill import LLM
from longfill.models.expert_parallel import ExpertParallel
from longfill.partition.comm import (
    LayerKind,
    collect_comm,
    expert_comm,
    expert_rounds,
    layers_comm,
    step_comm,
    tokens_comm,
)
from longfill.partition.spread import Cut
from longfill.worker.comm_sizes import comm_sizes

LENGTHS = (1, 63, 129, 300)
COMMON: dict[str, Any] = {
    "max_model_len": 1024, "memory_budget": "3GiB", "max_num_batched_tokens": 150, "num_threads": 1,
    "distributed_timeout_seconds": 120.0,
}  # fmt: skip
HIGH_THROUGHPUT = {"all2all_backend": "high_throughput"}

pytestmark = [needs_native, pytest.mark.usefixtures("forked_ranks")]


def run(**args: Any) -> tuple[Steps, Any, Cut]:
    """Steps of an engine over the bundled model, its sizes and its cut."""
    asked = prompts(LENGTHS, 600)
    with LLM("needle", **(COMMON | args)) as llm:
        steps = record(llm.engine)
        answer(llm, [asked, asked[-1:]], max_tokens=4)
        worker = llm.engine.worker
        count_all_ranks(steps, llm.engine)
        assert llm.stats.comm == dict(sum((Counter(comm) for comm in steps.comm), Counter()))
        return steps, comm_sizes(worker.args, worker.config, worker.layout), worker.cut


CASES = [(layout, False) for layout in [*EXACT, *ROUNDED]]
CASES += [(layout, True) for layout in ("tp2", "dcp2", "tp2-pcp2-dcp4", "pcp2")]


@pytest.mark.parametrize(("layout", "deterministic"), CASES)
def test_every_step_sends_what_was_predicted(layout: str, deterministic: bool) -> None:
    given = (EXACT | ROUNDED)[layout]
    if given.get("enable_expert_parallel") and given.get("all2all_backend") != "low_latency":
        given = given | {"all2all_backend": "low_latency"}  # where rows go is the router's choice: see below
    steps, sizes, cut = run(**given, deterministic=deterministic)
    assert len(steps.plans) > 5
    for plan, comm in zip(steps.plans, steps.comm, strict=True):
        assert comm == dict(step_comm(plan, cut, sizes))
    assert len(steps.sent) == cut.shape.world
    assert steps.sent == steps.predicted


@pytest.mark.parametrize("layout", [{PCP: 2}, {PCP: 3, "pcp_split": "interleave"}, {PCP: 4}])
def test_rows_go_once_to_every_rank_that_has_an_expert_of_theirs(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's choices are those of one rank, which sees all rows, since rows over ranks change no bit."""
    chosen: list[Tensor] = []
    call = ExpertParallel.__call__

    def watched(self: ExpertParallel, x_OC: Tensor, weights: Any, most_rows: int) -> Tensor:
        chosen.append(self._backend.route(x_OC, weights.router, weights.bias, self._choice)[0])
        return call(self, x_OC, weights, most_rows)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertParallel, "__call__", watched)
        one, _, _ = run(enable_expert_parallel=True)
    steps, sizes, cut = run(**layout, enable_expert_parallel=True, **HIGH_THROUGHPUT)
    moe_layers = sum(layer.moe for layer in sizes.layers)
    assert len(chosen) == moe_layers * len(one.plans)
    for number, (plan, comm) in enumerate(zip(steps.plans, steps.comm, strict=True)):
        want = step_comm(plan, cut, sizes)
        outputs = sizes.experts_per_token * layout[PCP]
        rounds = expert_rounds(max(plan.share.held), hidden=sizes.hidden, outputs=outputs)
        for ids in chosen[number * moe_layers : (number + 1) * moe_layers]:
            of_rank = [ids.numpy()[rows] for rows in plan.share.rank_rows]
            want += expert_comm(of_rank, cut, sizes, len(rounds))
        assert comm == dict(want)


@pytest.mark.parametrize("layout", [{PCP: 2}, {TP: 2}, ROUNDED["dcp2"], ROUNDED["tp2-pcp2-dcp4"]])
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_draft_layer_sends_what_was_predicted(layout: dict[str, Any], drafts: int) -> None:
    steps, sizes, cut = run(**layout, speculative_config={"method": "mtp", "num_speculative_tokens": drafts})
    layer = [LayerKind(full_indexer=True, moe=True)]
    guesses = 0
    for plan, comm, sampled, further in zip(steps.plans, steps.comm, steps.sampled, steps.draft_plans, strict=True):
        want = step_comm(plan, cut, sizes) + layers_comm(plan, cut, sizes, layer) + tokens_comm(plan, cut)
        ends = zip(plan.requests, plan.query_starts[1:].tolist(), strict=True)
        rows = [end - r.num_drafts + sampled[r.request_id] - 2 for r, end in ends if r.request_id in sampled]
        want += collect_comm(plan.share.pick(np.array(rows, dtype=np.int64)), cut, sizes)
        tokens = len(rows)
        for draft_plan in further:
            some = np.arange(len(draft_plan.requests))
            want += layers_comm(draft_plan, cut, sizes, layer)
            want += collect_comm(draft_plan.share.pick(some), cut, sizes)
            tokens += len(some)
        want += +Counter(drafts=8 * tokens * (cut.shape.world - 1))
        guesses += tokens
        assert comm == dict(want)
    assert guesses > 0


def test_one_rank_sends_nothing() -> None:
    steps, _, _ = run()
    assert not any(steps.comm)
    torch.set_num_threads(1)
