"""Traces and runs in short words."""

from __future__ import annotations

import json
from typing import Any

from longfill.config import EngineArgs
from longfill.simulate import StepCost, TraceRequest, read_trace, simulate, synthetic_trace
from longfill.simulate.results import Simulation

ONE_SECOND_A_STEP = StepCost(step_seconds=1.0, token_seconds=0.0, pair_seconds=0.0)


def trace_of(*requests: dict[str, Any]) -> list[TraceRequest]:
    return read_trace([json.dumps(request) for request in requests], "test")


def run(
    *requests: dict[str, Any],
    synthetic: str | None = None,
    cost: StepCost = ONE_SECOND_A_STEP,
    num_pages: int | None = None,
    draft_acceptance: float = 0.7,
    eos_token_ids: tuple[int, ...] = (),
    **knobs: Any,
) -> Simulation:
    """A simulation of the requests; one step a second unless told otherwise."""
    return simulate(
        synthetic_trace(synthetic, knobs.get("seed", 0)) if synthetic is not None else trace_of(*requests),
        EngineArgs(**knobs),
        cost=cost,
        num_pages=num_pages,
        draft_acceptance=draft_acceptance,
        eos_token_ids=eos_token_ids,
    )


def scheduled(simulation: Simulation) -> list[dict[str, int]]:
    return [step.scheduled for step in simulation.steps]


def steps_with(simulation: Simulation, request_id: str) -> list[int]:
    return [step.step for step in simulation.steps if request_id in step.prefills]
