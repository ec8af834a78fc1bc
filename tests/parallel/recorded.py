"""What an engine of several ranks planned and sent, step by step. For tests only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from longfill.engine.engine import LLMEngine
from longfill.partition import StepPlan
from longfill.partition.comm import step_comm
from longfill.worker.comm_sizes import comm_sizes


@dataclass
class Steps:
    """What an engine planned and counted, step by step."""

    plans: list[StepPlan] = field(default_factory=list)
    comm: list[dict[str, int]] = field(default_factory=list)
    """Of rank 0."""
    sampled: list[dict[str, int]] = field(default_factory=list)
    """Tokens that each request got."""
    draft_plans: list[list[StepPlan]] = field(default_factory=list)
    """Of each step, those of guesses behind the first."""
    sent: list[dict[str, int]] = field(default_factory=list)
    """By rank, in all steps together, as the executor says."""
    predicted: list[dict[str, int]] = field(default_factory=list)
    """The same by `partition.comm`."""


def record(engine: LLMEngine) -> Steps:
    """Watch every step that the engine's executor takes."""
    steps = Steps()
    executor, worker = engine.executor, engine.worker
    execute = executor.execute

    def watched(plan: StepPlan, *given: Any) -> Any:
        steps.draft_plans.append([])
        result = execute(plan, *given)
        steps.plans.append(plan)
        steps.comm.append(result.comm)
        steps.sampled.append({name: len(tokens) for name, tokens in result.sampled.items()})
        return result

    executor.execute = watched  # type: ignore[method-assign]
    drafter = worker._drafter
    if drafter is not None:
        make = drafter._plan

        def planned(parts: Any) -> Any:
            plan, rows = make(parts)
            steps.draft_plans[-1].append(plan)
            return plan, rows

        drafter._plan = planned
    return steps


def count_all_ranks(steps: Steps, engine: LLMEngine) -> None:
    """Fill `sent` and `predicted` of the steps that an engine has taken."""
    worker = engine.worker
    sizes, own = comm_sizes(worker.args, worker.config, worker.layout), worker.cut
    steps.sent = engine.executor.rank_comm()
    for rank in range(own.shape.world):
        worker.cut = dataclasses.replace(own, rank=rank)
        plans = [worker.plan(plan.requests) for plan in steps.plans]
        steps.predicted.append(dict(sum((step_comm(plan, worker.cut, sizes) for plan in plans), Counter())))
    worker.cut = own
