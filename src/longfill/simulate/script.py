"""What a model would give: the trace's outputs, and drafts that are right by chance.

Imports the cost, the trace and the schedule. Invariant: whether a draft is right depends on the seed, the request and
the output's number alone, so the outputs of two policies differ in time only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longfill.scheduler import Schedule, ScheduledRequest
from longfill.simulate.cost import StepCost, attended_pairs
from longfill.simulate.trace import TraceRequest

_DRAWS = 256


@dataclass(frozen=True)
class Computed:
    """One step as it was computed."""

    sampled: dict[str, tuple[int, ...]]
    seconds: float
    drafts: int
    accepted: int


class Script:
    """Stands in for the worker. Like one it knows the true place of rows whose drafts are not booked yet."""

    def __init__(self, trace: Mapping[str, TraceRequest], cost: StepCost, *, acceptance: float, seed: int) -> None:
        self._trace = trace
        self._cost = cost
        self._acceptance = acceptance
        self._seed = seed
        self._ordinals = {request_id: ordinal for ordinal, request_id in enumerate(trace)}
        self._draws: dict[str, npt.NDArray[np.float64]] = {}
        self._ends: dict[str, tuple[int, int]] = {}  # of the newest step: admission, position behind its last right row

    def run(self, schedule: Schedule) -> Computed:
        """Compute a step; steps come in the order they were scheduled."""
        sampled: dict[str, tuple[int, ...]] = {}
        pairs = drafts = accepted = 0
        for scheduled in schedule.requests:
            start = self._start(scheduled)
            pairs += attended_pairs(start, scheduled.num_tokens)
            if scheduled.samples:
                tokens = self._sample(scheduled, start)
                sampled[scheduled.request_id] = tokens
                drafts += scheduled.num_drafts
                accepted += len(tokens) - 1
        return Computed(sampled, self._cost.of(schedule.num_tokens, pairs), drafts, accepted)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._ends.pop(request_id, None)
        self._draws.pop(request_id, None)

    def _start(self, scheduled: ScheduledRequest) -> int:
        """Position of the first row: the schedule's is a bound where drafts in flight may be rejected."""
        if not scheduled.num_unknown or scheduled.request_id not in self._ends:
            return scheduled.start
        admission, end = self._ends[scheduled.request_id]
        return end if admission == scheduled.admission else scheduled.start

    def _sample(self, scheduled: ScheduledRequest, start: int) -> tuple[int, ...]:
        request = self._trace[scheduled.request_id]
        end = start + scheduled.num_tokens - scheduled.num_drafts
        first = end - scheduled.num_prompt_tokens
        count = 1
        while count <= scheduled.num_drafts and self._is_right(request.id, first + count - 1):
            count += 1
        self._ends[request.id] = (scheduled.admission, end + count - 1)
        return tuple(request.output(first + i) for i in range(count))

    def _is_right(self, request_id: str, output: int) -> bool:
        """Whether the draft of an output is right."""
        draws = self._draws.get(request_id)
        if draws is None or output >= draws.size:
            rng = np.random.default_rng([self._seed, self._ordinals[request_id]])
            draws = self._draws[request_id] = rng.random(2 * max(_DRAWS, output))
        return bool(draws[output] < self._acceptance)
