"""One step while it is being planned: what is left of its budgets, and who was granted what.

Imports the schedule's types and Request. Invariant: granting moves the ledger (`num_computed_tokens`, placeholders,
tokens in flight) as if the step were computed; taking a grant back restores both budgets.
"""

from __future__ import annotations

import numpy as np

from longfill.cache import KVCacheManager
from longfill.request import Request
from longfill.scheduler.schedule import UNKNOWN, ScheduledRequest


class Step:
    """Budgets in rows: `tokens` for what is scheduled, `rows` also pays `draft_slots` for each request."""

    def __init__(self, *, tokens: int, rows: int, draft_slots: int) -> None:
        self.tokens = tokens
        self.rows = rows
        self.draft_slots = draft_slots
        self.prompt_tokens = 0
        """Granted beyond decode rows."""
        self.decodes = 0
        self.prompt_allowance: float | None = None
        """Prompt tokens that it may hold for the sake of its decodes, once that was asked for."""
        self.target_s: float | None = None
        """Seconds that it may take for their sake (None: any)."""
        self.blocked = False
        """A running request found no page: nobody new is let in."""
        self.closed = False
        """A waiting request found no room: nobody behind it is let in."""
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self._grants: dict[str, ScheduledRequest] = {}

    @property
    def room(self) -> int:
        """Most tokens that one more request can get."""
        return max(0, min(self.tokens, self.rows - self.draft_slots))

    @property
    def is_shut(self) -> bool:
        """Whether nobody may be let in any more."""
        return self.closed or self.blocked or self.room == 0

    @property
    def grants(self) -> tuple[ScheduledRequest, ...]:
        return tuple(self._grants.values())

    def grant(self, request: Request, num_tokens: int, num_drafts: int, admission: int, cache: KVCacheManager) -> None:
        """Give a request `num_tokens` rows, the last `num_drafts` of them drafts."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        samples = end - num_drafts == request.num_tokens + request.num_output_placeholders
        known = request.token_ids[start:end]
        token_ids = known
        if known.size < num_tokens:
            token_ids = np.full(num_tokens, UNKNOWN, dtype=np.int64)
            token_ids[: known.size] = known
        self._grants[request.request_id] = grant = ScheduledRequest(
            request_id=request.request_id,
            admission=admission,
            start=start,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            num_unknown=num_tokens - int(known.size),
            page_table=cache.page_table(request.request_id),
            token_ids=token_ids,
            next_token_id=UNKNOWN if samples else int(request.token_ids[end]),
            samples=samples,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        request.num_computed_tokens = end
        request.num_in_flight_tokens += num_tokens
        if samples:
            request.num_output_placeholders += 1 + num_drafts
        self._count(grant, 1)

    def take_back(self, request_id: str) -> None:
        """Undo a grant of a request that is preempted in this very step, whose ledger starts over."""
        grant = self._grants.pop(request_id, None)
        if grant is not None:
            self._count(grant, -1)

    def room_for_drafts(self, decodes_to_come: int) -> int:
        """Drafts that a request's row may have beside it without taking the rows of those that come after it."""
        tokens = self.tokens - 1 - decodes_to_come
        rows = self.rows - (1 + self.draft_slots) * (1 + decodes_to_come)
        return max(0, min(tokens, rows))

    def _count(self, grant: ScheduledRequest, sign: int) -> None:
        self.tokens -= sign * grant.num_tokens
        self.rows -= sign * (grant.num_tokens + self.draft_slots)
        if grant.is_one_row:
            self.decodes += sign
        else:
            self.prompt_tokens += sign * grant.num_tokens
