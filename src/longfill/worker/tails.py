"""What a worker knows of a request before the scheduler does: where it stands, its newest token and its drafts.

May import NumPy and `partition`. Invariant: a tail is that of the last step that sampled for the request, and is used
under the same admission only. So a step that was scheduled while the one before it ran finds its tokens here, and
drafts never leave the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from longfill.partition import StepRequest
from longfill.partition.lengths import Int64Array


class Scheduled(Protocol):
    """What is read of a `scheduler.ScheduledRequest`, where each field is described."""

    @property
    def request_id(self) -> str: ...
    @property
    def admission(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_unknown(self) -> int: ...
    @property
    def page_table(self) -> Int64Array: ...
    @property
    def token_ids(self) -> Int64Array: ...
    @property
    def next_token_id(self) -> int: ...
    @property
    def samples(self) -> bool: ...


@dataclass(frozen=True)
class Tail:
    """A request behind a step that sampled for it."""

    admission: int
    num_computed_tokens: int
    """Tokens whose KV is in the cache and right: the position of `token_ids[0]`."""
    token_ids: tuple[int, ...]
    """The last token sampled, which no step has computed yet, then the drafts of those behind it."""


class Tails:
    """The tails of this worker's requests, by request id."""

    def __init__(self) -> None:
        self._tails: dict[str, Tail] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def resolve(self, scheduled: Scheduled) -> StepRequest | None:
        """A scheduled request with its true first position and all its token ids.

        None where the step that it continues failed, or belongs to an admission that is gone: nothing waits for its
        result. Raises ValueError for a schedule that no tail can follow, which is a mistake in the scheduler.
        """
        start, token_ids = scheduled.start, scheduled.token_ids
        if scheduled.num_unknown:
            tail = self._tails.get(scheduled.request_id)
            if tail is None or tail.admission != scheduled.admission:
                return None
            start = tail.num_computed_tokens
            token_ids = np.array(tail.token_ids[: scheduled.num_tokens], dtype=np.int64)
            if start > scheduled.start or token_ids.size < scheduled.num_tokens:
                raise ValueError(
                    f"request {scheduled.request_id}: {scheduled.num_tokens} rows are scheduled at position "
                    f"{scheduled.start} at most, but its tail has {len(tail.token_ids)} tokens from position {start} on"
                )
        return StepRequest(
            request_id=scheduled.request_id,
            start=start,
            query_len=scheduled.num_tokens,
            pages=scheduled.page_table,
            token_ids=token_ids,
            samples=scheduled.samples,
            num_drafts=scheduled.num_drafts,
            next_token_id=scheduled.next_token_id,
            admission=scheduled.admission,
        )

    def book(self, request: StepRequest, sampled: Sequence[int], drafts: Sequence[int]) -> None:
        """Keep what a step sampled: one token, one more for each draft of it that was right, and the next drafts."""
        computed = request.seq_len - request.num_drafts + len(sampled) - 1
        self._tails[request.request_id] = Tail(request.admission, computed, (sampled[-1], *drafts))

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended, or whose step failed. Fine for one without a tail."""
        self._tails.pop(request_id, None)

    def keep(self, is_current: Callable[[str, int], bool]) -> None:
        """Forget the requests whose (id, admission) is over."""
        self._tails = {name: tail for name, tail in self._tails.items() if is_current(name, tail.admission)}
