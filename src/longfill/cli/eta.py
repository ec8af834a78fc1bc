"""How long the rest of the prompts takes, from what the steps so far cost.

Standard library only. Invariant: the estimate counts (query, key) pairs as well as tokens, since a token late in a
long context costs more than an early one.
"""

from __future__ import annotations

from collections.abc import Mapping

Progress = Mapping[str, tuple[int, int]]
"""Request id -> (num_computed_tokens, num_tokens)."""


def causal_pairs(first: int, end: int) -> int:
    """(query, key) pairs that the rows at positions first..end-1 score: each row and every key up to itself."""
    return (end * (end + 1) - first * (first + 1)) // 2


class TimeLeft:
    """Fits `seconds = a x tokens + b x pairs` to the steps, recent ones weighing more, and prices what is left."""

    FORGET = 0.97
    """Weight of a step against the one after it: the fit follows a machine whose speed changes."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._steps = 0
        self._tt = self._tp = self._pp = self._ts = self._ps = 0.0

    def observe(self, progress: Progress, num_tokens: int, seconds: float) -> None:
        """Takes one step in: the ledger after it, the tokens that it computed and the seconds that it took.

        A step whose tokens cannot all be placed (a new request, a preemption) moves the ledger only.
        """
        tokens, pairs = 0, 0
        for request, (computed, _) in progress.items():
            before = self._last.get(request, (computed, 0))[0]
            if computed > before:
                tokens += computed - before
                pairs += causal_pairs(before, computed)
        self._last.update(progress)
        if tokens != num_tokens or tokens == 0:
            return
        t, p = float(tokens), float(pairs)
        sums = (self._tt, self._tp, self._pp, self._ts, self._ps)
        new = (t * t, t * p, p * p, t * seconds, p * seconds)
        self._tt, self._tp, self._pp, self._ts, self._ps = (
            self.FORGET * total + term for total, term in zip(sums, new, strict=True)
        )
        self._steps += 1

    def seconds(self) -> float | None:
        """Seconds until every known prompt is computed; None until a step could be measured."""
        if self._steps == 0:
            return None
        tokens = sum(max(0, total - computed) for computed, total in self._last.values())
        pairs = sum(causal_pairs(computed, total) for computed, total in self._last.values() if total > computed)
        per_token, per_pair = self._fit()
        return per_token * tokens + per_pair * pairs

    def _fit(self) -> tuple[float, float]:
        """Non-negative least squares with two unknowns; pairs alone where the steps do not tell them apart."""
        determinant = self._tt * self._pp - self._tp * self._tp
        if self._steps >= 2 and determinant > 1e-9 * self._tt * self._pp:
            per_token = (self._ts * self._pp - self._ps * self._tp) / determinant
            per_pair = (self._ps * self._tt - self._ts * self._tp) / determinant
            if per_token >= 0 and per_pair >= 0:
                return per_token, per_pair
            if per_pair < 0:
                return self._ts / self._tt, 0.0
        return 0.0, self._ps / self._pp
