"""A step's rows as one rank has them: those it attends for, those it holds, and what it stores.

May import torch and the kernels' interface. Invariant: all ranks' rows come from one plan, so that what one sends is
what another expects.

Suffixes: T rows of the batch · A rows that the rank attends for · O rows of these that it holds · K rows that it
stores.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longfill.kernels.interface import StepRows


@dataclass(frozen=True)
class ContextRows:
    """Split prompts whose contexts come together from all DCP ranks, and the rows that attend to them."""

    pages: tuple[Tensor, ...]
    """int64: each request's page table, of this rank's share."""
    seq_lens: tuple[int, ...]
    """Tokens of each context, on all ranks together."""
    requests: tuple[int, ...]
    """By run among the rows: which of these requests it belongs to."""
    rows: slice
    """Of the rows that the rank attends for."""


@dataclass(frozen=True)
class RankRows:
    """What the model needs to know of a step. With one rank A = O = T."""

    attend: StepRows
    """Its A rows."""
    token_ids_O: Tensor
    own: slice
    """Of the A rows, the O that it holds."""
    tp_counts: tuple[int, ...]
    """O of each TP rank; they sum to A."""
    held: tuple[int, ...]
    """O of each rank of the `rows` group."""
    order_K: Tensor | None
    """int64 [K]: where the rows that it stores stand among all held rows; None where it stores the rows it holds."""
    slots_K: Tensor
    """int64 [K]: and where it stores them."""
    whole_rows: int
    """Leading A rows that all ranks of its DCP group attend for, each over its own keys; 0 without DCP."""
    score_counts: tuple[int, ...] | None
    """Consecutive A rows that each TP rank scores; None where every one scores all."""
    contexts: tuple[ContextRows, ...]
    """Of the A rows behind `whole_rows`, where there is DCP."""
