"""Arrivals and aborts in the order in which they come.

Imports the trace. Invariant: nothing is due before its time or step; a request arrives before it is aborted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longfill.simulate.trace import TraceRequest


@dataclass(frozen=True)
class Event:
    """An arrival, or an abort, of the trace's request number `ordinal`."""

    at: float
    """Virtual seconds, or a step."""
    is_abort: bool
    ordinal: int


class Agenda:
    """What is still to come, by time and by step."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        by_time: list[Event] = []
        by_step: list[Event] = []
        for ordinal, request in enumerate(trace):
            if request.at_step is None:
                by_time.append(Event(request.arrival_s, False, ordinal))
            else:
                by_step.append(Event(request.at_step, False, ordinal))
            if request.abort_at_s is not None:
                by_time.append(Event(request.abort_at_s, True, ordinal))
            if request.abort_at_step is not None:
                by_step.append(Event(request.abort_at_step, True, ordinal))
        self._by_time = _in_order(by_time)
        self._by_step = _in_order(by_step)

    @property
    def next_time(self) -> float:
        """When the next event comes that is due by time; infinite if none does."""
        return self._by_time[0].at if self._by_time else math.inf

    def due(self, now: float, step: int) -> Iterator[Event]:
        """Take what has come by `now`, or comes with `step`."""
        while self._by_time and self._by_time[0].at <= now:
            yield self._by_time.popleft()
        while self._by_step and self._by_step[0].at <= step:
            yield self._by_step.popleft()

    def skip_idle(self, now: float, step: int) -> tuple[float, int] | None:
        """(time, step) of the next arrival when no request is left, or None. Idle steps count, and take no time."""
        for events in (self._by_step, self._by_time):
            while events and events[0].is_abort:  # of a request that has ended
                events.popleft()
        if self._by_step:
            return now, max(step, int(self._by_step[0].at))
        if self._by_time:
            return max(now, self._by_time[0].at), step
        return None


def _in_order(events: list[Event]) -> deque[Event]:
    return deque(sorted(events, key=lambda event: (event.at, event.is_abort, event.ordinal)))
