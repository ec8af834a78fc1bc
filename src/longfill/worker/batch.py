"""A step's integers as the tensors and spans that the model and its kernels take.

May import torch, `partition`, models' rows and the kernels' interface. Invariant: rows keep the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from longfill.kernels.interface import RequestRows, ScoredRows, StepRows
from longfill.models.rows import ContextRows, RankRows
from longfill.partition.dcp import dcp_local_lens
from longfill.partition.indexer import IndexerChunk
from longfill.partition.slots import NO_SLOT
from longfill.partition.spread import ONE_RANK, Cut
from longfill.partition.step import Run, StepPlan


def rank_rows(plan: StepPlan, cut: Cut = ONE_RANK) -> RankRows:
    """The plan's arrays as tensors that share their memory, and its chunks as spans of rows."""
    share = plan.share
    attend = _step_rows(plan, cut)
    kept = np.flatnonzero(plan.slots != NO_SLOT)
    return RankRows(
        attend=attend,
        token_ids_O=attend.token_ids_T[share.own],
        own=share.own,
        tp_counts=share.tp_counts,
        held=share.held,
        order_K=None if len(share.held) == 1 else torch.from_numpy(share.order[kept]),
        slots_K=torch.from_numpy(plan.slots[kept]),
        whole_rows=share.whole_rows,
        score_counts=plan.score_counts,
        contexts=tuple(_contexts(plan)),
    )


def _step_rows(plan: StepPlan, cut: Cut) -> StepRows:
    rows = plan.share.rows
    everything = rows.size == plan.positions.size
    positions_A = plan.positions if everything else plan.positions[rows]
    requests = tuple(_request(run, plan, cut) for run in plan.runs)
    dense_rows = tuple(int(n) for n in plan.dense_rows)
    scored = [_ScoredRun(requests[i], dense_rows[i]) for i in plan.scored]
    return StepRows(
        token_ids_T=torch.from_numpy(plan.token_ids if everything else plan.token_ids[rows]),
        positions_T=torch.from_numpy(positions_A),
        requests=requests,
        dense_rows=dense_rows,
        index_chunks=[list(_spans(chunk, scored)) for chunk in plan.indexer_chunks],
        workspace_chunks=tuple(tuple(plan.scored[i] for i in chunk) for chunk in plan.workspace_chunks),
    )


def _request(run: Run, plan: StepPlan, cut: Cut) -> RequestRows:
    pages = torch.from_numpy(plan.requests[run.request].pages)
    visible: Tensor | None = None
    if run.first_row < plan.share.whole_rows:
        seen = run.start + 1 + run.stride * np.arange(run.num_rows, dtype=np.int64)
        local = dcp_local_lens(seen, ranks=cut.shape.dcp, rank=cut.dcp_rank, interleave=cut.interleave)
        visible = torch.from_numpy(local)
    elif run.stride != 1:
        visible = run.start + 1 + run.stride * torch.arange(run.num_rows)
    return RequestRows(run.first_row, run.num_rows, run.start, pages, visible)


def _contexts(plan: StepPlan) -> Iterator[ContextRows]:
    for chunk in plan.context_chunks:
        requests = [plan.requests[i] for i in chunk.requests]
        yield ContextRows(
            pages=tuple(torch.from_numpy(r.pages) for r in requests),
            seq_lens=tuple(r.seq_len for r in requests),
            requests=tuple(
                run.request - chunk.requests.start
                for run in plan.runs
                if chunk.rows.start <= run.first_row < chunk.rows.stop
            ),
            rows=slice(chunk.rows.start, chunk.rows.stop),
        )


class _ScoredRun:
    """A run's rows behind its dense ones."""

    def __init__(self, request: RequestRows, dense: int) -> None:
        self.request = request
        self.dense = dense
        self.num_rows = request.query_len - dense

    def span(self, first: int, last: int) -> ScoredRows:
        """Its scored rows [first, last)."""
        request, at = self.request, self.dense + first
        visible_T = None if request.visible_T is None else request.visible_T[at : self.dense + last]
        return ScoredRows(
            request=request,
            first_row=request.first_row + at,
            num_rows=last - first,
            first_position=request.start + at,
            visible_T=visible_T,
        )


def _spans(chunk: IndexerChunk, scored: list[_ScoredRun]) -> Iterator[ScoredRows]:
    """The chunk's queries, which count through its runs' scored rows, run by run."""
    before = 0
    for index in chunk.requests:
        run = scored[index]
        first = max(chunk.queries.start - before, 0)
        last = min(chunk.queries.stop - before, run.num_rows)
        if first < last:
            yield run.span(first, last)
        before += run.num_rows
