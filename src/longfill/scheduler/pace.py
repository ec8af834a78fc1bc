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
LEAST_S = 1e-9
"""What a prompt needs at least, also where the clock says that steps take no time at all."""
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
        return max(LEAST_S, (self.decode_step_s or 0.0) + num_tokens * token_s)

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

    def allowance(self) -> float:
        """Prompt tokens that the next step, which has decodes, may hold: infinite while nothing is known of its time.

        To be called once for each such step.
        """
        if self.decode_share == 0:
            return math.inf
        if self._steps_unseen >= PROBE_STEPS and self.token_s is not None:
            self._steps_unseen = 0
            return 0
        self._steps_unseen += 1
        # Never less than a whole pause: most of it would be a gift.
        if self._debt_s > 0 and self._debt_s >= self._pause_pays_s:
            return 0
        return self.tokens_within(self.target_s)

    def tokens_within(self, seconds: float | None) -> float:
        """Prompt tokens in a step, which has decodes, of so many seconds (None: any); a QUANTUM at least."""
        if seconds is None or self.decode_step_s is None or not self.token_s:
            return math.inf
        return max(QUANTUM, (seconds - self.decode_step_s) / self.token_s)

    @property
    def target_s(self) -> float | None:
        """Seconds that a step with decodes may take for their share (None: any, or not known yet)."""
        if self.decode_step_s is None or self.decode_share == 0:
            return None
        return self.decode_step_s / self.decode_share

    @property
    def _pause_pays_s(self) -> float:
        """By so much a step without prompts is shorter than it might be."""
        return (self.target_s or 0.0) - (self.decode_step_s or 0.0)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
