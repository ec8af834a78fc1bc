"""What one step computes: the message from the scheduler to the worker and back.

Imports numpy and Request's types. Invariant: a schedule is never changed once made; its arrays are views that stay
right while requests and page tables grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longfill.request import TokenIds


@dataclass(frozen=True, eq=False)
class ScheduledRequest:
    """One request's tokens in one step: positions `start` to `start + num_tokens - 1`."""

    request_id: str
    admission: int
    """Serial number of the admission that this belongs to: after a preemption or abort its result is stale."""
    start: int
    """Tokens whose KV is in the cache before this step: also the first token's position."""
    num_tokens: int
    page_table: npt.NDArray[np.int64]
    """int64 [pages], covering at least `start + num_tokens` tokens."""
    token_ids: TokenIds
    """int64 [num_tokens]: the tokens to compute."""
    samples: bool
    """Whether this step reaches the request's last token, so that the next one is sampled from it."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One step: who computes what, in order (running requests first), and who was preempted to make room."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes; 0 when there is nothing to do or no page to do it in."""
        return sum(scheduled.num_tokens for scheduled in self.requests)
