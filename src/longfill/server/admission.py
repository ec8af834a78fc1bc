"""How many requests, and prompt tokens, may wait: a ticket for each, from before its body is read to its first token.

May import errors and streams. Invariant: what waits is bounded, whatever clients do; a ticket is given back once.
"""

from __future__ import annotations

import time
from collections import deque

from longfill.errors import OverloadedError
from longfill.server.streams import RequestStream

_RATE_WINDOW = 30.0
"""Seconds of which the prefill's speed is taken."""
_MOST_RETRY_AFTER = 600


class Admission:
    """Counts what waits. A limit on tokens never refuses a request that would wait alone."""

    def __init__(self, *, max_num_queued_reqs: int, max_num_queued_tokens: int) -> None:
        self._max_reqs = max_num_queued_reqs
        self._max_tokens = max_num_queued_tokens
        self._prefilled: deque[tuple[float, int]] = deque()
        self.tickets: dict[int, Ticket] = {}
        """Of all requests that are not answered yet, oldest first."""
        self.num_queued_reqs = 0
        self.num_queued_tokens = 0
        self.num_rejected = {"reqs": 0, "tokens": 0}

    def enter(self, request_id: str, endpoint: str, tenant: str = "") -> Ticket:
        """A request has come. Raises OverloadedError where there is no room."""
        if self.num_queued_reqs >= self._max_reqs:
            raise self._overloaded("reqs", f"{self.num_queued_reqs:,} requests wait already (--max-num-queued-reqs)")
        if self.num_queued_tokens >= self._max_tokens:
            raise self._overloaded(
                "tokens", f"{self.num_queued_tokens:,} prompt tokens wait already (--max-num-queued-tokens)"
            )
        self.num_queued_reqs += 1
        ticket = Ticket(self, request_id, endpoint, tenant)
        self.tickets[id(ticket)] = ticket
        return ticket

    def prefilled(self, num_tokens: int) -> None:
        """A step has computed so many prompt tokens."""
        now = time.monotonic()
        self._prefilled.append((now, num_tokens))
        while self._prefilled[0][0] < now - _RATE_WINDOW:
            self._prefilled.popleft()

    def check_tokens(self, num_tokens: int) -> None:
        """Raise OverloadedError where so many more tokens have no room."""
        if self.num_queued_tokens and self.num_queued_tokens + num_tokens > self._max_tokens:
            raise self._overloaded(
                "tokens",
                f"{self.num_queued_tokens:,} prompt tokens wait already, and {num_tokens:,} more exceed "
                f"--max-num-queued-tokens {self._max_tokens:,}",
            )

    def _overloaded(self, limit: str, why: str) -> OverloadedError:
        self.num_rejected[limit] += 1
        return OverloadedError(f"the server is busy: {why}; try again later", self.retry_after)

    @property
    def retry_after(self) -> int:
        """Seconds in which half of what waits may be done, at the speed of the last half minute."""
        if len(self._prefilled) < 2:
            return 5
        seconds = max(time.monotonic() - self._prefilled[0][0], 0.1)
        rate = sum(count for _, count in self._prefilled) / seconds
        return int(min(max(self.num_queued_tokens / 2 / max(rate, 1e-3), 1), _MOST_RETRY_AFTER))


class Ticket:
    """One request's place: queued (its tokens too, once they are counted), then running, then gone."""

    def __init__(self, admission: Admission, request_id: str, endpoint: str, tenant: str = "") -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.tenant = tenant
        self.arrival = time.monotonic()
        self.stream = False
        """Whether the client reads a stream."""
        self.streams: list[RequestStream] = []
        """What the engine does for it: one for each of its prompts, none before they are tokenised."""
        self.aborted = False
        """Whether somebody other than its client has ended it."""
        self._admission = admission
        self._num_tokens = 0
        self._waits = True

    def queued(self, num_prompt_tokens: int) -> None:
        """Its prompt has so many tokens. Raises OverloadedError where they have no room."""
        self._admission.check_tokens(num_prompt_tokens)
        self._num_tokens += num_prompt_tokens
        self._admission.num_queued_tokens += num_prompt_tokens

    def started(self) -> None:
        """It has a first token, and waits no longer. More than once is once."""
        if self._waits:
            self._waits = False
            self._admission.num_queued_reqs -= 1
            self._admission.num_queued_tokens -= self._num_tokens

    def abort(self) -> None:
        """End it; its client gets what it has so far."""
        self.aborted = True
        for stream in self.streams:
            stream.abort()

    def leave(self) -> None:
        """It is answered, or nobody waits for it."""
        self.started()
        self._admission.tickets.pop(id(self), None)
