"""What more threads bring on this machine whatever they compute: the most that ranks on it can be expected to gain.

May import torch and the extension. Invariant: one thread and several are measured right after each other, so that the
ratio is the machine's and not the moment's.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from longfill.bench.ceilings import Machine, Math, math_of
from longfill.bench.timing import clock
from longfill.kernels.cpu import available, selected_isa

BUFFER_BYTES = 256 * 2**20


@dataclass
class Scaling:
    """How much `threads` threads do for what one does, each time it was looked at."""

    threads: int
    math: list[float] = field(default_factory=list)
    """Multiply-adds from registers, as matrix products take them."""
    read: list[float] = field(default_factory=list)
    """Bytes from memory."""
    one: list[float] = field(default_factory=list)
    """FLOP/s of the one thread: how steady the machine is."""

    @property
    def can_be_measured(self) -> bool:
        return self.threads > 1 and available()

    def look(self, dtype: str) -> None:
        """Measure once, by the multiply-add of a model that runs in `dtype`; a second's work."""
        if not self.can_be_measured:
            return
        isa = selected_isa()
        which: Math = math_of(isa) if dtype == "bfloat16" else "fp32"
        one, more = (
            Machine(isa, threads, clock(threads, processor_time=False), buffer=BUFFER_BYTES)
            for threads in (1, self.threads)
        )
        flops = one.measure(which)
        self.one.append(flops)
        self.math.append(more.measure(which) / flops)
        read = one.measure("read")
        self.read.append(more.measure("read") / read)

    def to_json(self) -> dict[str, Any] | None:
        """As `--json` prints it; None where nothing was measured."""
        if not self.math:
            return None
        return {
            "threads": self.threads,
            "math": statistics.median(self.math),
            "read": statistics.median(self.read),
            "all_math": self.math,
            "all_read": self.read,
            "one_thread_flops_per_s": self.one,
        }
