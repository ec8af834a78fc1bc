"""What a kernel case is: inputs made once, the call, what it must do at least, and the best torch does the same with.

Imports the ceilings' names. Invariant: `flops` and `bytes` count what any implementation must do, not what this one
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longfill.bench.ceilings import Math, Traffic, math_of


@dataclass(frozen=True)
class Setting:
    """What the cases are made for. `shrink` divides long contexts and many rows, for a quick look and for tests."""

    isa: str
    threads: int
    shrink: int = 1

    def size(self, full: int, *, least: int = 1) -> int:
        """A length or a row count of this setting."""
        return max(least, full // self.shrink)

    @property
    def math(self) -> Math:
        """What bf16 inputs are multiplied with."""
        return math_of(self.isa)


@dataclass(frozen=True)
class TorchPeer:
    """The fastest formulation of the same operation in torch that we know; `note` says what it is."""

    call: Callable[[], object]
    note: str


@dataclass(frozen=True)
class Work:
    """One prepared measurement."""

    call: Callable[[], object]
    flops: float
    """Multiply-adds, two each; 0 where the operation has no products to speak of."""
    bytes: float
    """Inputs read once and outputs written once."""
    math: Math
    traffic: Traffic
    """Which bandwidth binds: of reading, or of copying where about as much is written."""
    items: int
    item: str
    """What the time is also given for one of: a score, a row, a key."""
    torch: TorchPeer


@dataclass(frozen=True)
class Case:
    """`make` prepares the inputs for a setting."""

    kernel: str
    name: str
    make: Callable[[Setting], Work]
