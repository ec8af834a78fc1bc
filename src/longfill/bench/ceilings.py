"""What the machine can do at most: multiply-adds from registers, and bytes to and from memory.

May import torch and the extension. Invariant: a ceiling is measured with the threads, the clock and the instruction set
of the kernels that it is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from longfill.bench.timing import Clock, measure

Math = Literal["bf16", "fp32"]
Traffic = Literal["read", "copy"]
Ceiling = Literal["bf16", "fp32", "read", "copy"]

SPIN_ITERATIONS = 2_000_000
BUFFER_BYTES = 512 * 2**20
"""Far beyond any cache."""

_FP32_OF = {"avx512_bf16": "avx512"}
"""The instruction set whose `spin` is the fp32 multiply-add, where that is not the set's own."""


def math_of(isa: str) -> Math:
    """What the kernels of an instruction set multiply bf16 inputs with."""
    return "bf16" if isa in _FP32_OF else "fp32"


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s (a multiply-add is two) and bytes/s; copying counts the bytes read and those written."""

    threads: int
    bf16: float
    """Of the instruction that bf16 products take: fp32's where the instruction set has none of its own."""
    fp32: float
    read: float
    copy: float

    def of(self, ceiling: Ceiling) -> float:
        value: float = asdict(self)[ceiling]
        return value


class Machine:
    """Takes the ceilings for one instruction set and thread count, as often as asked."""

    def __init__(self, isa: str, threads: int, clock: Clock, *, repeats: int = 3, buffer: int | None = None) -> None:
        self.isa = isa
        self.threads = threads
        self.clock = clock
        self.repeats = repeats
        size = buffer or BUFFER_BYTES
        self._source = torch.ones(size, dtype=torch.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8)

    def all(self) -> Ceilings:
        """Every ceiling once."""
        return Ceilings(self.threads, *(self.measure(which) for which in ("bf16", "fp32", "read", "copy")))

    def measure(self, ceiling: Ceiling) -> float:
        """One ceiling, the best of a few."""
        # Imported here because an installation without a compiler has no extension.
        from longfill.kernels.cpu import _native

        if ceiling == "read":
            return self._rate(self._source.nbytes, lambda: _native.read_memory(self._source, self.threads))
        if ceiling == "copy":
            size = 2 * self._source.nbytes
            return self._rate(size, lambda: _native.copy_memory(self._target, self._source, self.threads))
        return self._flops(self.isa if ceiling == "bf16" else _FP32_OF.get(self.isa, self.isa))

    def _rate(self, amount: float, call: Callable[[], object]) -> float:
        return amount / measure(call, self.repeats, self.clock).best

    def _flops(self, isa: str) -> float:
        from longfill.kernels.cpu import _native

        with ThreadPoolExecutor(self.threads) as pool:

            def spin() -> float:
                return sum(pool.map(lambda _: _native.spin(isa, SPIN_ITERATIONS), range(self.threads)))

            return self._rate(spin(), spin)
