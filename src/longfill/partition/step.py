"""A step as integers: rows in order, positions, slots, and the chunks that attention runs in.

May import NumPy, units and `partition/`. Invariant: the engine runs and the planner prices this one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longfill.partition.indexer import IndexerChunk, indexer_chunks
from longfill.partition.lengths import Int64Array, row_positions, row_starts
from longfill.partition.slots import check_table, slot_mapping
from longfill.partition.workspace import workspace_chunks
from longfill.units import PageSize


@dataclass(frozen=True, eq=False)
class StepRequest:
    """One request's part of a step: the tokens at positions `[start, start + query_len)`."""

    request_id: str
    start: int
    query_len: int
    pages: Int64Array
    """int64 [W]: its page table, covering at least the tokens of this step."""
    token_ids: Int64Array
    """int64 [query_len]: the tokens of this step."""
    samples: bool
    """Whether tokens are sampled from its last `1 + num_drafts` rows."""
    num_drafts: int = 0
    """Of these rows, the last ones, whose tokens are drafts to verify; 0 unless it samples."""
    next_token_id: int = -1
    """The token at position `seq_len` where nothing is sampled, which a draft layer needs; else -1."""
    admission: int = 0
    """The scheduler's serial number of the request's admission, under which the worker keeps what it alone knows."""

    @property
    def has_one_row(self) -> bool:
        """Whether it has one row beside its drafts: a decode, or the last token of a piece of prompt."""
        return self.query_len - self.num_drafts == 1

    @property
    def seq_len(self) -> int:
        """Tokens in the cache after this step."""
        return self.start + self.query_len


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one step computes. R requests, T rows (tokens); rows stand request after request, by position."""

    requests: tuple[StepRequest, ...]
    """Those with one row beside their drafts first, else in the order they were scheduled."""
    query_starts: Int64Array
    """int64 [R+1]: first row of each request, then T."""
    token_ids: Int64Array
    """int64 [T]."""
    positions: Int64Array
    """int64 [T]: position of each row in its sequence."""
    slots: Int64Array
    """int64 [T]: where each row's KV is stored: page * page_size + offset."""
    dense_rows: Int64Array
    """int64 [R]: leading rows of each request that select every key they may see (position < topk): not scored."""
    scored: tuple[int, ...]
    """Requests with rows behind their dense ones."""
    indexer_chunks: tuple[IndexerChunk, ...]
    """Over the scored rows of `scored`, into which `requests` indexes."""
    workspace_chunks: tuple[range, ...]
    """Ranges into `scored`: requests whose contexts are gathered together."""
    sample_rows: Int64Array
    """int64 [S]: the last `1 + num_drafts` rows of each request that samples, in order of `requests`."""
    sample_starts: Int64Array
    """int64 [requests that sample + 1]: where each one's part of `sample_rows` begins, then S."""
    scored_pairs: int
    """(query, key) pairs that one full-indexer layer scores."""
    gathered_rows: int
    """Latent rows that one layer copies where it gathers contexts into the workspace."""


def plan_step(
    requests: Sequence[StepRequest],
    *,
    page_size: PageSize,
    topk: int | None,
    indexer_workspace_rows: int,
    max_logits_bytes: int,
    workspace_rows: int,
) -> StepPlan:
    """Turn the tokens that the scheduler chose into a plan.

    `topk` is the keys that a row selects (None: the model has no indexer, and every row is dense). The limits, in rows
    and bytes, are those of `indexer_chunks` and `workspace_chunks`.

    Raises ValueError, naming the request, for a request without tokens, one whose token ids do not match its length,
    drafts without a row before them to sample from, or a position without a page; CapacityError for a context longer
    than the workspace.
    """
    ordered = tuple(sorted(requests, key=lambda r: not r.has_one_row))
    for request in ordered:
        _check(request, page_size)
    query_lens = np.array([r.query_len for r in ordered], dtype=np.int64)
    starts = np.array([r.start for r in ordered], dtype=np.int64)
    seq_lens = starts + query_lens
    query_starts = row_starts(query_lens)
    positions = row_positions(query_lens, seq_lens)
    sampled_lens = np.array([1 + r.num_drafts for r in ordered if r.samples], dtype=np.int64)
    sampled_ends = query_starts[1:][np.array([r.samples for r in ordered], dtype=np.bool_)]

    dense_rows = query_lens if topk is None else np.clip(topk - starts, 0, query_lens)
    scored_lens = query_lens - dense_rows
    scored = np.flatnonzero(scored_lens)
    contexts = seq_lens[scored]
    unscored = contexts - scored_lens[scored]
    return StepPlan(
        requests=ordered,
        query_starts=query_starts,
        token_ids=_concatenate([r.token_ids for r in ordered]),
        positions=positions,
        slots=_slots(ordered, query_lens, starts, positions, page_size),
        dense_rows=dense_rows,
        scored=tuple(scored.tolist()),
        indexer_chunks=tuple(
            indexer_chunks(
                scored_lens[scored],
                contexts,
                workspace_rows=indexer_workspace_rows,
                max_logits_bytes=max_logits_bytes,
            )
        ),
        workspace_chunks=tuple(workspace_chunks(contexts, workspace_rows)),
        sample_rows=row_positions(sampled_lens, sampled_ends),
        sample_starts=row_starts(sampled_lens),
        scored_pairs=int((contexts * (contexts + 1) - unscored * (unscored + 1)).sum()) // 2,
        gathered_rows=int(contexts.sum()),
    )


def _check(request: StepRequest, page_size: int) -> None:
    where = f"request {request.request_id}: "
    if request.query_len < 1:
        raise ValueError(f"{where}query_len is {request.query_len}; a scheduled request has at least one token")
    if request.token_ids.shape != (request.query_len,):
        raise ValueError(f"{where}token_ids has shape {request.token_ids.shape}; expected ({request.query_len},)")
    if not 0 <= request.num_drafts < request.query_len or (request.num_drafts and not request.samples):
        raise ValueError(
            f"{where}{request.num_drafts} drafts in {request.query_len} rows; drafts follow a row that is sampled from"
        )
    check_table(request.pages, request.start, request.seq_len - 1, page_size, where)


def _slots(
    requests: tuple[StepRequest, ...],
    query_lens: Int64Array,
    starts: Int64Array,
    positions: Int64Array,
    page_size: PageSize,
) -> Int64Array:
    """Slots of all rows, through one table of just the pages that this step writes.

    A row's position in that table differs from its own by a multiple of the page size, so that the offset inside the
    page stays; the whole tables of long contexts are never copied.
    """
    first_pages = starts // page_size
    end_pages = (starts + query_lens - 1) // page_size + 1
    table_starts = row_starts(end_pages - first_pages)[:-1]
    table = _concatenate([r.pages[a:b] for r, a, b in zip(requests, first_pages, end_pages, strict=True)])
    return slot_mapping(table, positions + np.repeat((table_starts - first_pages) * page_size, query_lens), page_size)


def _concatenate(arrays: list[Int64Array]) -> Int64Array:
    """`np.concatenate` as int64, of no arrays too."""
    return np.concatenate(arrays, dtype=np.int64) if arrays else np.empty(0, dtype=np.int64)
