"""How long a call takes: warm-up, then the best and the median of several.

Standard library only. Invariant: the first call is never counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Clock = Callable[[], float]

LONGEST_SECONDS = 10.0
"""A call is not repeated beyond this sum: long ones vary little."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over `runs` calls."""

    best: float
    median: float
    runs: int


def clock(threads: int, *, processor_time: bool) -> Clock:
    """Wall time, or the process's processor time a thread: what a machine shared with others hardly disturbs."""
    return partial(_processor_seconds, threads) if processor_time else time.perf_counter


def _processor_seconds(threads: int) -> float:
    return time.process_time() / threads


def measure(call: Callable[[], object], repeats: int, clock: Clock, *, warm_up: bool = True) -> Timing:
    """Time `call` at most `repeats` times, and at least once."""
    if warm_up:
        call()
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or sum(seconds) + seconds[-1] < LONGEST_SECONDS):
        begin = clock()
        call()
        seconds.append(clock() - begin)
    return Timing(min(seconds), statistics.median(seconds), len(seconds))
