"""What one step computes: the message from the scheduler to the worker and back.

Imports numpy and Request's types. Invariant: a schedule is never changed once made; its arrays are views that stay
right while requests and page tables grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longfill.request import Request, TokenIds

UNKNOWN = -1
"""Stands for a token id that a step in flight brings, or that only the worker knows (a draft)."""


@dataclass(frozen=True, eq=False)
class ScheduledRequest:
    """One request's tokens in one step: positions `start` to `start + num_tokens - 1`."""

    request_id: str
    admission: int
    """Serial number of the admission that this belongs to: after a preemption or abort its result is stale."""
    start: int
    """Position of the first row: tokens whose KV is in the cache before it. Where `num_unknown` is not 0, the most that
    it can be: drafts in flight count as right."""
    num_tokens: int
    num_drafts: int
    """Of these, the last ones, which are drafts to verify; 0 unless it samples."""
    num_unknown: int
    """Of these, the last ones with ids unknown to the scheduler: drafts, and a token that a step in flight brings."""
    page_table: npt.NDArray[np.int64]
    """int64 [pages], covering at least `start + num_tokens` tokens, and those that the draft layer looks ahead."""
    token_ids: TokenIds
    """int64 [num_tokens]: the tokens to compute; UNKNOWN for the last `num_unknown`."""
    next_token_id: int
    """The token at position `start + num_tokens`, which the draft layer needs beside a prompt's chunk; else UNKNOWN."""
    samples: bool
    """Whether this step reaches the request's last token, so that the next one is sampled from it."""
    num_prompt_tokens: int
    """The token that the row at position p samples is output number `p + 1 - num_prompt_tokens`, from 0."""

    @property
    def num_prompt_rows(self) -> int:
        """Of its tokens, those of the prompt."""
        return max(0, min(self.start + self.num_tokens, self.num_prompt_tokens) - self.start)

    @property
    def is_one_row(self) -> bool:
        """Whether it computes one token, and its drafts, to sample from: a decode, or the last token of a prompt."""
        return self.samples and self.num_tokens - self.num_drafts == 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """One step: who computes what, and what else the planning of it decided."""

    step: int
    requests: tuple[ScheduledRequest, ...]
    """Decode rows first, then prompts, running ones before admitted ones."""
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    """Who was sent back to the queue to make room."""
    stalled: tuple[Request, ...]
    """Who was ended because it made no progress for too long; `error` says more."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes; 0 when there is nothing to do or no page to do it in."""
        return sum(scheduled.num_tokens for scheduled in self.requests)
