"""How long steps take, as observed, and how many prompt tokens a step may hold beside decodes.

Imports nothing of the house. Invariant: with decodes running, steps on average take no longer than a decode-only step
divided by the decodes' share, unless a prompt is late for its target; and prompts never stop for long.
"""

from __future__ import annotations

import math

SMOOTHING = 0.25
"""Weight of the newest step in the running means."""
QUANTUM = 64
"""Tokens below which a chunk costs more for reading weights than for its own work; none smaller is planned."""
PROBE_STEPS = 64
"""After so many steps without a decode-only one, one is run to see what it takes."""
MOST_PAUSES = 64
"""Decode-only steps that pay for the slow ones before them, at most: a step that took minutes is forgiven."""
UNKNOWN_TOKEN_S = 1e-4
"""Seconds a prompt token takes, until a step has told."""


class Pace:
    """Running means over the steps booked so far, in seconds of whatever clock the steps are timed with."""

    def __init__(self, decode_share: float) -> None:
        self.decode_share = decode_share
        self.decode_step_s: float | None = None
        """A step of decode rows alone."""
        self._prompt_s = self._prompt_tokens = 0.0
        self._debt_s = 0.0
        self._steps_unseen = PROBE_STEPS  # the first step that could hold both is a probe

    @property
    def token_s(self) -> float | None:
        """A prompt's token in a step, beyond what the step takes without; None until a step has told.

        A mean over tokens, not over steps: in a chunk of a few tokens hardly any of the time is theirs.
        """
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else None

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds that a prompt still needs at least, if it had the machine to itself."""
        token_s = UNKNOWN_TOKEN_S if self.token_s is None else self.token_s
        return (self.decode_step_s or 0.0) + num_tokens * token_s

    def observe(self, seconds: float, *, decodes: int, prompt_tokens: int, target_s: float | None = None) -> None:
        """Count a booked step. `target_s` is how long it was allowed to take for its decodes (None: no matter)."""
        if prompt_tokens == 0:
            self.decode_step_s = _mean(self.decode_step_s, seconds)
            self._steps_unseen = 0
        else:
            own = max(0.0, seconds - (self.decode_step_s or 0.0))
            self._prompt_s += own - SMOOTHING * self._prompt_s
            self._prompt_tokens += prompt_tokens - SMOOTHING * self._prompt_tokens
        if decodes == 0:
            self._debt_s = 0.0
        elif target_s is not None:
            self._debt_s = min(max(0.0, self._debt_s + seconds - target_s), MOST_PAUSES * self._pause_pays_s)

    def allowance(self, late_target_s: float | None = None) -> tuple[float, float | None]:
        """Prompt tokens that the next step, which has decodes, may hold, and the seconds that it may take (None: any).

        Infinite while nothing is known about its time. `late_target_s` replaces the share while a prompt is late. To be
        called once for each such step.
        """
        if self.decode_share == 0:
            return math.inf, None
        if self._steps_unseen >= PROBE_STEPS and self.token_s is not None:
            self._steps_unseen = 0
            return 0, self._target_s
        self._steps_unseen += 1
        target_s = self._target_s
        if target_s is None or self.decode_step_s is None:
            return math.inf, None
        if late_target_s is not None and late_target_s > target_s:
            target_s = late_target_s
        elif self._debt_s > 0 and self._debt_s >= self._pause_pays_s:
            return 0, target_s  # never less than a whole pause: most of it would be a gift
        if not self.token_s:
            return math.inf, target_s
        return max(QUANTUM, int((target_s - self.decode_step_s) / self.token_s)), target_s

    @property
    def _target_s(self) -> float | None:
        return None if self.decode_step_s is None else self.decode_step_s / self.decode_share

    @property
    def _pause_pays_s(self) -> float:
        """By so much a step without prompts is shorter than it might be."""
        return (self._target_s or 0.0) - (self.decode_step_s or 0.0)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
