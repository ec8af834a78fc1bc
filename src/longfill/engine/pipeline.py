"""Steps on their way through the worker: the host prepares the next ones while the oldest computes.

Imports the scheduler's message and the standard library. Invariant: steps are computed one after the other, in the
order they were submitted, and none that was submitted before a step failed is begun after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from longfill.scheduler import Schedule

Result = TypeVar("Result")


@dataclass(frozen=True)
class Computed(Generic[Result]):
    """A step's result and its moments, in seconds of `time.perf_counter`."""

    schedule: Schedule
    result: Result
    prepared: float
    """When the host began to prepare it."""
    submitted: float
    began: float
    ended: float


class _CancelledError(Exception):
    """The step stood behind one that failed."""


class StepPipeline(Generic[Result]):
    """Up to `depth` submitted steps.

    With a depth of 1 a step is computed in the caller's thread, when it is waited for; else in one thread of its own,
    as soon as those before it are done.
    """

    def __init__(self, compute: Callable[[Schedule], Result], depth: int) -> None:
        self.depth = depth
        self._compute = compute
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longfill-worker") if depth > 1 else None
        self._pending: deque[Future[Computed[Result]] | Callable[[], Computed[Result]]] = deque()
        self._line = [False]
        """Whether a step that was submitted since the last `cancel` has failed; a new list for every such line."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= self.depth

    def submit(self, schedule: Schedule, *, prepared: float) -> None:
        """Add a step behind those that are pending."""
        run = partial(self._run, schedule, prepared, time.perf_counter(), self._line)
        self._pending.append(run if self._thread is None else self._thread.submit(run))

    def wait(self) -> Computed[Result]:
        """The oldest step's result, once it is there. Raises what the step raised; it stays pending then."""
        step = self._pending[0]
        computed = step.result() if isinstance(step, Future) else step()
        self._pending.popleft()
        return computed

    def cancel(self) -> None:
        """Give up every pending step.

        One that has begun runs on, to no effect: its pages are written before any later step can touch them.
        """
        self._line[0] = True
        self._line = [False]
        for step in self._pending:
            if isinstance(step, Future):
                step.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the thread once it has computed what is pending."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, schedule: Schedule, prepared: float, submitted: float, line: list[bool]) -> Computed[Result]:
        if line[0]:
            raise _CancelledError
        began = time.perf_counter()
        try:
            result = self._compute(schedule)
        except BaseException:
            line[0] = True
            raise
        return Computed(schedule, result, prepared, submitted, began, time.perf_counter())
