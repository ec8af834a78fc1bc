"""A step's integers as the tensors and spans that kernels take.

May import torch, `partition` and the kernels' interface. Invariant: rows keep the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longfill.kernels.interface import RequestRows, ScoredRows, StepRows
from longfill.partition.indexer import IndexerChunk
from longfill.partition.step import StepPlan


def step_rows(plan: StepPlan) -> StepRows:
    """The plan's arrays as tensors that share their memory, and its chunks as spans of rows."""
    requests = tuple(
        RequestRows(first_row=int(row), query_len=r.query_len, start=r.start, pages=torch.from_numpy(r.pages))
        for row, r in zip(plan.query_starts[:-1], plan.requests, strict=True)
    )
    dense_rows = tuple(int(n) for n in plan.dense_rows)
    scored = [_ScoredRequest(requests[i], dense_rows[i]) for i in plan.scored]
    return StepRows(
        token_ids_T=torch.from_numpy(plan.token_ids),
        positions_T=torch.from_numpy(plan.positions),
        slots_T=torch.from_numpy(plan.slots),
        requests=requests,
        dense_rows=dense_rows,
        index_chunks=[list(_spans(chunk, scored)) for chunk in plan.indexer_chunks],
        workspace_chunks=tuple(tuple(plan.scored[i] for i in chunk) for chunk in plan.workspace_chunks),
        sample_rows_S=torch.from_numpy(plan.sample_rows),
    )


class _ScoredRequest:
    """A request's rows behind its dense ones."""

    def __init__(self, request: RequestRows, dense: int) -> None:
        self.request = request
        self.dense = dense
        self.num_rows = request.query_len - dense

    def span(self, first: int, last: int) -> ScoredRows:
        """Its scored rows [first, last)."""
        return ScoredRows(
            request=self.request,
            first_row=self.request.first_row + self.dense + first,
            num_rows=last - first,
            first_position=self.request.start + self.dense + first,
        )


def _spans(chunk: IndexerChunk, scored: list[_ScoredRequest]) -> Iterator[ScoredRows]:
    """The chunk's queries, which count through its requests' scored rows, request by request."""
    before = 0
    for index in chunk.requests:
        request = scored[index]
        first = max(chunk.queries.start - before, 0)
        last = min(chunk.queries.stop - before, request.num_rows)
        if first < last:
            yield request.span(first, last)
        before += request.num_rows
