"""How long a step takes on the virtual clock.

Imports config and errors. Invariant: a step's time depends on its rows and the pairs that they attend to, and on
nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from longfill.config import flag_name
from longfill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A straight line through three costs, in seconds.

    The defaults describe no machine. They were chosen so that 2,048 prompt tokens at a context of 500,000 make a step
    take less than twice as long as one that only decodes.
    """

    step_seconds: float = 25e-3
    """Each step: weights are read once, whatever it holds."""
    token_seconds: float = 8e-6
    """Each row."""
    pair_seconds: float = 5e-12
    """Each pair of a query and a key at its own or an earlier position."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag_name(field.name)}: must be a finite number of at least 0 s, got {value}")

    def of(self, rows: int, pairs: int) -> float:
        """Seconds of a step."""
        return self.step_seconds + self.token_seconds * rows + self.pair_seconds * pairs


def attended_pairs(start: int, rows: int) -> int:
    """(query, key) pairs of `rows` rows from position `start` on: the row at position p sees p + 1 keys."""
    return rows * start + rows * (rows + 1) // 2
