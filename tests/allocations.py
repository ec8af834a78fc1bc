"""Counts what torch allocates on the CPU while something runs: every allocation, inside operators too.

For tests only. Uses the profiler's memory events, which come from the allocator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """Bytes: the most that were alive at once beyond the start, and the largest single allocation."""

    peak: int
    largest: int


def count_allocations(run: Callable[[], Any]) -> Allocations:
    """Run something and count. Memory that it frees but did not allocate counts as negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = run()
        # Something alive at the end keeps its last free out of the record.
        del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler recorded no memory events"
    now = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak, largest = max(peak, now), max(largest, event.nbytes())
    return Allocations(peak, largest)


def selfcheck() -> Allocations:
    """A known pattern: 3 MiB alive at once, 2 MiB in one piece."""

    def run() -> None:
        a = torch.empty(2**20, dtype=torch.uint8)
        b = torch.empty(2**21, dtype=torch.uint8)
        del a, b
        torch.empty(2**21, dtype=torch.uint8)

    return count_allocations(run)
