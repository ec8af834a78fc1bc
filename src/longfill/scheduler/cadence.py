"""`--prefill-schedule-interval`: prompts only in every n-th step while something decodes, unless a backlog builds up.

Imports nothing of the house. Invariant: it only ever withholds a step's prompts while a decode runs.
"""

from __future__ import annotations


class Cadence:
    """When prompts were computed last, in steps that computed anything."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._executed = 0
        self._last_prefill = -interval
        self._backlog = False

    def holds(self, *, decodes: bool) -> bool:
        """Whether the next step leaves prompts out."""
        too_soon = self._executed + 1 - self._last_prefill < self.interval
        return decodes and too_soon and not self._backlog

    def ran(self, *, prefilled: bool) -> None:
        """Count a step with tokens in it."""
        self._executed += 1
        if prefilled:
            self._last_prefill = self._executed

    def left_waiting(self, count: int) -> None:
        """Say how many that could run were left in the queue by a step that admitted: then the interval is lifted."""
        self._backlog = count > 0
