"""A step as integers: rows in order, positions, slots, and the chunks that attention runs in.

May import NumPy, units and `partition/`. Invariant: the engine runs and the planner prices this one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longfill.partition.dcp import dcp_local_position, dcp_owner
from longfill.partition.indexer import IndexerChunk, indexer_chunks
from longfill.partition.lengths import Int64Array, row_positions, row_starts
from longfill.partition.row_shards import balanced_cuts
from longfill.partition.slots import NO_SLOT, check_table, slot_mapping
from longfill.partition.spread import ONE_RANK, Cut, Share, spread
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


@dataclass(frozen=True)
class Run:
    """Rows of one request that a rank attends for: rows [first_row, first_row + num_rows) of its own, at positions
    `start`, `start + stride`..."""

    request: int
    """Index into `StepPlan.requests`."""
    first_row: int
    num_rows: int
    start: int
    stride: int = 1

    @property
    def seq_len(self) -> int:
        """Tokens that its last row sees."""
        return self.start + (self.num_rows - 1) * self.stride + 1

    def rows_before(self, position: int) -> int:
        """Its leading rows at lower positions."""
        return min(max(-(-(position - self.start) // self.stride), 0), self.num_rows)


@dataclass(frozen=True)
class ContextChunk:
    """Requests whose contexts are gathered from all DCP ranks together, and the rank's rows that attend to them."""

    requests: range
    """Into `StepPlan.requests`."""
    rows: range
    """Of the rows that the rank attends for; may be empty."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one rank computes in a step. R requests, T rows (tokens) of the batch, request after request, by position;
    A of them the rank attends for, in `runs`. Where there is one rank, every request is a run."""

    requests: tuple[StepRequest, ...]
    """Those with one row beside their drafts first, and others that every rank attends for; else in the order they were
    scheduled."""
    query_starts: Int64Array
    """int64 [R+1]: first row of each request, then T."""
    token_ids: Int64Array
    """int64 [T]."""
    positions: Int64Array
    """int64 [T]: position of each row in its sequence."""
    slots: Int64Array
    """int64 [T]: where each row's KV is stored: page * page_size + offset, or NO_SLOT where another rank keeps it."""
    share: Share
    runs: tuple[Run, ...]
    dense_rows: Int64Array
    """int64 [runs]: leading rows of each that select every key they may see (position < topk): not scored."""
    scored: tuple[int, ...]
    """Runs with rows behind their dense ones."""
    score_counts: tuple[int, ...] | None
    """Consecutive rows of A that each TP rank scores; None where every one scores all."""
    indexer_chunks: tuple[IndexerChunk, ...]
    """Over the scored rows of `scored`, into which `requests` indexes."""
    workspace_chunks: tuple[range, ...]
    """Ranges into `scored`: runs whose contexts are gathered together."""
    context_chunks: tuple[ContextChunk, ...]
    """Where split prompts attend to keys that lie on several ranks."""
    sample_rows: Int64Array
    """int64 [S]: the last `1 + num_drafts` rows of each request that samples, in order of `requests`."""
    sample_starts: Int64Array
    """int64 [requests that sample + 1]: where each one's part of `sample_rows` begins, then S."""
    scored_pairs: int
    """(query, key) pairs that one full-indexer layer scores for the A rows, `score_counts` apart."""
    rank_scored_pairs: tuple[int, ...]
    """Of those pairs, what each rank of the `rows` group scores (before keys are split by DCP)."""
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
    cut: Cut = ONE_RANK,
) -> StepPlan:
    """Turn the tokens that the scheduler chose into a plan for the rank of `cut`.

    `topk` is the keys that a row selects (None: the model has no indexer, and every row is dense). The limits, in rows
    and bytes, are those of `indexer_chunks` and `workspace_chunks`. `page_size` is a rank's: under DCP a page table's
    entry stands for as many tokens times the DCP ranks.

    Raises ValueError, naming the request, for a request without tokens, one whose token ids do not match its length,
    drafts without a row before them to sample from, or a position without a page; CapacityError for a context longer
    than the workspace.
    """
    ordered = tuple(sorted(requests, key=lambda r: (not r.has_one_row, not cut.is_whole(r.query_len, r.has_one_row))))
    for request in ordered:
        _check(request, page_size * cut.shape.dcp)
    query_lens = np.array([r.query_len for r in ordered], dtype=np.int64)
    starts = np.array([r.start for r in ordered], dtype=np.int64)
    query_starts = row_starts(query_lens)
    positions = row_positions(query_lens, starts + query_lens)
    sampled_lens = np.array([1 + r.num_drafts for r in ordered if r.samples], dtype=np.int64)
    sampled_ends = query_starts[1:][np.array([r.samples for r in ordered], dtype=np.bool_)]

    share = spread(query_lens, [r.has_one_row for r in ordered], cut)
    runs = _runs(ordered, query_starts, positions, share, cut)
    dense_rows = np.array([r.num_rows if topk is None else r.rows_before(topk) for r in runs], dtype=np.int64)
    scored = np.array([i for i, r in enumerate(runs) if dense_rows[i] < r.num_rows], dtype=np.int64)
    scored_lens = np.array([runs[i].num_rows - dense_rows[i] for i in scored], dtype=np.int64)
    contexts = np.array([runs[i].seq_len for i in scored], dtype=np.int64)
    costs = [scoring_costs(positions[rows], topk) for rows in share.rank_rows]
    own_costs = costs[cut.shape.place(cut.rank)["pcp"]]
    counts = [_score_counts(each, cut) for each in costs]
    return StepPlan(
        requests=ordered,
        query_starts=query_starts,
        token_ids=_concatenate([r.token_ids for r in ordered]),
        positions=positions,
        slots=_slots(ordered, query_lens, starts, positions, page_size, cut),
        share=share,
        runs=runs,
        dense_rows=dense_rows,
        scored=tuple(scored.tolist()),
        score_counts=counts[cut.shape.place(cut.rank)["pcp"]],
        indexer_chunks=tuple(
            indexer_chunks(
                scored_lens,
                contexts,
                workspace_rows=indexer_workspace_rows,
                max_logits_bytes=max_logits_bytes,
            )
        ),
        workspace_chunks=tuple(workspace_chunks(contexts, workspace_rows)),
        context_chunks=_context_chunks(ordered, runs, workspace_rows, cut),
        sample_rows=row_positions(sampled_lens, sampled_ends),
        sample_starts=row_starts(sampled_lens),
        scored_pairs=int(own_costs.sum()),
        rank_scored_pairs=tuple(
            pairs for each, cuts in zip(costs, counts, strict=True) for pairs in _pairs(each, cuts, cut.shape.tp)
        ),
        gathered_rows=int(contexts.sum()),
    )


def scoring_costs(positions: Int64Array, topk: int | None) -> Int64Array:
    """int64, like `positions`: keys that each row scores; none where it selects all, or there is no indexer."""
    keys = positions + 1
    return np.where(keys > topk, keys, 0) if topk is not None else np.zeros_like(keys)


def _score_counts(costs: Int64Array, cut: Cut) -> tuple[int, ...] | None:
    counts = None if cut.shape.dcp > 1 else balanced_cuts(costs, cut.shape.tp)
    if counts is None or costs.sum() - max(_pairs(costs, counts, cut.shape.tp)) < cut.min_saved_pairs:
        return None
    return counts


def _pairs(costs: Int64Array, counts: tuple[int, ...] | None, tp: int) -> list[int]:
    """What each TP rank scores of rows with these costs."""
    if counts is None:
        return [int(costs.sum())] * tp
    return [int(part.sum()) for part in np.split(costs, np.cumsum(counts)[:-1])]


def _runs(
    requests: tuple[StepRequest, ...], query_starts: Int64Array, positions: Int64Array, share: Share, cut: Cut
) -> tuple[Run, ...]:
    """The rank's rows as runs: cut where a request begins, or where the distance is not its split's."""
    if share.rows.size == positions.size:
        rows = zip(query_starts[:-1].tolist(), requests, strict=True)
        return tuple(Run(i, row, r.query_len, r.start) for i, (row, r) in enumerate(rows))
    owner = np.searchsorted(query_starts, share.rows, side="right") - 1
    distance = 1
    if cut.split == "interleave":
        distance = cut.shape.pcp
    whole = np.array([cut.is_whole(r.query_len, r.has_one_row) for r in requests], dtype=np.bool_)
    stride = np.where(whole[owner], 1, distance)
    at = positions[share.rows]
    begins = np.ones(at.size, dtype=np.bool_)
    begins[1:] = (np.diff(owner) != 0) | (np.diff(at) != stride[1:])
    firsts = np.flatnonzero(begins)
    ends = np.append(firsts[1:], at.size)[: firsts.size]  # a rank may have no row
    return tuple(
        Run(int(owner[a]), int(a), int(b - a), int(at[a]), int(stride[a])) for a, b in zip(firsts, ends, strict=True)
    )


def _context_chunks(
    requests: tuple[StepRequest, ...], runs: tuple[Run, ...], workspace_rows: int, cut: Cut
) -> tuple[ContextChunk, ...]:
    """Split prompts, packed while their contexts fit the workspace, with the rows of this rank that belong to them."""
    if not cut.gathers_contexts:
        return ()
    whole = sum(cut.is_whole(r.query_len, r.has_one_row) for r in requests)
    split = requests[whole:]
    ends = [0] * (len(requests) + 1)
    for run in runs:
        ends[run.request + 1] = run.first_row + run.num_rows
    for i in range(len(requests)):
        ends[i + 1] = max(ends[i + 1], ends[i])
    return tuple(
        ContextChunk(range(whole + c.start, whole + c.stop), range(ends[whole + c.start], ends[whole + c.stop]))
        for c in workspace_chunks([r.seq_len for r in split], workspace_rows)
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
    cut: Cut,
) -> Int64Array:
    """Slots of all rows on this rank, through one table of just the pages that this step writes.

    A row's position in that table differs from its own by a multiple of the page size, so that the offset inside the
    page stays; the whole tables of long contexts are never copied.
    """
    span = page_size * cut.shape.dcp
    first_pages = starts // span
    end_pages = (starts + query_lens - 1) // span + 1
    table_starts = row_starts(end_pages - first_pages)[:-1]
    table = _concatenate([r.pages[a:b] for r, a, b in zip(requests, first_pages, end_pages, strict=True)])
    shifted = positions + np.repeat((table_starts - first_pages) * span, query_lens)
    if cut.shape.dcp == 1:
        return slot_mapping(table, shifted, page_size)
    local = dcp_local_position(shifted, ranks=cut.shape.dcp, interleave=cut.interleave)
    owner = dcp_owner(positions, ranks=cut.shape.dcp, interleave=cut.interleave)
    return np.where(owner == cut.dcp_rank, slot_mapping(table, local, page_size), NO_SLOT)


def _concatenate(arrays: list[Int64Array]) -> Int64Array:
    """`np.concatenate` as int64, of no arrays too."""
    return np.concatenate(arrays, dtype=np.int64) if arrays else np.empty(0, dtype=np.int64)
