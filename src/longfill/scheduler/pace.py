"""How long steps take, as observed, and how many prompt tokens a step may hold beside decodes.

Imports nothing of the house. Invariant: with decodes running, steps on average take no longer than a decode-only step
divided by the decodes' share, unless a prompt is late for its target.
"""

from __future__ import annotations

import math

SMOOTHING = 0.25
"""Weight of the newest step in the running means."""
QUANTUM = 64
"""Tokens below which a chunk costs more for reading weights than for its own work; none smaller is planned."""
PROBE_STEPS = 64
"""After so many steps without a decode-only one, one is run to see what it takes."""


class Pace:
    """Running means over the steps booked so far, in seconds of whatever clock the steps are timed with."""

    def __init__(self, decode_share: float) -> None:
        self.decode_share = decode_share
        self.decode_step_s: float | None = None
        """A step of decode rows alone."""
        self.token_s: float | None = None
        """A prompt's token in a step, beyond what the step takes without."""
        self._debt_s = 0.0
        self._steps_unseen = 0

    def observe(self, seconds: float, *, decodes: int, prompt_tokens: int, target_s: float | None = None) -> None:
        """Count a booked step. `target_s` is how long it was allowed to take for its decodes (None: no matter)."""
        if prompt_tokens == 0:
            self.decode_step_s = _mean(self.decode_step_s, seconds)
            self._steps_unseen = 0
        else:
            self.token_s = _mean(self.token_s, max(0.0, seconds - (self.decode_step_s or 0.0)) / prompt_tokens)
            self._steps_unseen += decodes > 0
        if decodes == 0:
            self._debt_s = 0.0
        elif target_s is not None:
            self._debt_s = max(0.0, self._debt_s + seconds - target_s)

    def step_target_s(self, late_target_s: float | None = None) -> float | None:
        """Seconds that a step with decodes may take; `late_target_s` replaces the share while a prompt is late."""
        if self.decode_step_s is None or self.decode_share == 0:
            return None
        target = self.decode_step_s / self.decode_share
        return target if late_target_s is None else max(target, late_target_s)

    def prompt_tokens(self, target_s: float | None) -> float:
        """Prompt tokens that a step with decodes may hold; infinite while nothing is known about its time."""
        if self.decode_share == 0:
            return math.inf
        if self._steps_unseen >= PROBE_STEPS or self._debt_s > 0:
            return 0
        if target_s is None or not self.token_s or self.decode_step_s is None:
            return math.inf
        return max(QUANTUM, int((target_s - self.decode_step_s) / self.token_s))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
