"""What an engine of several ranks planned and sent, step by step. For tests only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longfill.engine.engine import LLMEngine
from longfill.partition import StepPlan


@dataclass
class Steps:
    """What an engine planned and counted, step by step."""

    plans: list[StepPlan] = field(default_factory=list)
    comm: list[dict[str, int]] = field(default_factory=list)
    sampled: list[dict[str, int]] = field(default_factory=list)
    """Tokens that each request got."""
    draft_plans: list[list[StepPlan]] = field(default_factory=list)
    """Of each step, those of guesses behind the first."""


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
