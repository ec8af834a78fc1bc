"""Counts what is allocated on the CPU while something runs: by torch, inside operators too, or by native code.

For tests only. Torch's come from the profiler's memory events, which the allocator itself makes; native code's are what
the process took from the system.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    gc.collect()  # what others left, collected meanwhile, would be such memory
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


def count_native(run: Callable[[], Any]) -> int:
    """Bytes by which the process's resident memory rose at most while `run` ran (Linux, glibc).

    Memory that was reserved before and is written for the first time counts too. Pages of files do not: those of
    libraries come back whenever the system has taken them, and are nothing that `run` allocates.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what malloc kept of memory freed before would serve `run` without being counted
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what is resident now
    before, files = _status("VmRSS"), _status("RssFile")
    run()
    return max(0, _status("VmHWM") - before - max(0, _status("RssFile") - files))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
