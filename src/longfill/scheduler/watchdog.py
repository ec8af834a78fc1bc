"""Who has made no progress for too long, and why that is an error.

Imports Request. Invariant: a request that computes new tokens, or waits for others that do, is never stalled.
"""

from __future__ import annotations

from dataclasses import dataclass

from longfill.request import Request


@dataclass
class _Progress:
    most_computed: int = 0
    at: float = 0.0
    preemptions: int = 0


class Watchdog:
    """A request has progressed when it got a token or computed more of its tokens than ever before.

    It is stalled when it was preempted twice since it last did, and that is `timeout` seconds ago: it is computed again
    and again and loses it each time. So is one that waits `timeout` seconds while nothing runs.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._progress: dict[str, _Progress] = {}
        self._idle: tuple[Request, float] | None = None

    def booked(self, request: Request, now: float, *, got_token: bool) -> None:
        """Note what a step that is booked has done for a request."""
        known = self._progress.setdefault(request.request_id, _Progress(at=now))
        if got_token or request.num_booked_tokens > known.most_computed:
            known.at, known.preemptions = now, request.num_preemptions
        known.most_computed = max(known.most_computed, request.num_booked_tokens)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._progress.pop(request_id, None)

    def preempted(self, request: Request, now: float) -> str | None:
        """Why the request should end instead of being computed once more, if it should."""
        # One that was never booked has progressed last when it was admitted, before this preemption.
        known = self._progress.setdefault(
            request.request_id, _Progress(at=now, preemptions=request.num_preemptions - 1)
        )
        if request.num_preemptions - known.preemptions < 2 or now - known.at < self.timeout:
            return None
        return (
            f"request {request.request_id}: no token and no newly computed token for {now - known.at:,.0f} s, while it "
            f"was preempted {request.num_preemptions - known.preemptions} times with {known.most_computed:,} of "
            f"{request.num_tokens:,} tokens computed at best; the KV pool is too small for the requests that run "
            "together: lower --max-num-seqs, raise --memory-budget, or raise --progress-timeout"
        )

    def idle(self, first: Request | None, now: float) -> str | None:
        """Why the first request in the queue should end, after a step that nothing came of (None: one that ran)."""
        if first is None:
            self._idle = None
            return None
        if self._idle is None or self._idle[0] is not first:
            self._idle = first, now
        waited = now - self._idle[1]
        if waited < self.timeout:
            return None
        return (
            f"request {first.request_id}: it waited {waited:,.0f} s while nothing ran and it still finds no "
            "room in the KV pool, whose pages are held from outside the scheduler"
        )
