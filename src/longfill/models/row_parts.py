"""A rank's rows of a step, by how they reach their keys: in its own cache, in shards of several ranks, or gathered.

May import models' attention and rows. Invariant: the parts cover the rows once; those that all ranks of a group attend
for are cut into the same blocks on every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longfill.kernels.interface import StepRows
from longfill.models.attention import Attend
from longfill.models.contexts import Context
from longfill.models.rows import RankRows
from longfill.models.shard_attention import ShardAttend
from longfill.parallel.mesh import Mesh


@dataclass(frozen=True)
class RowPart:
    """Rows that attend in one way. Spans count the rows that the rank attends for."""

    span: slice
    rows: StepRows
    attend: Attend | ShardAttend
    context: Context | None
    """The gathered caches that they attend to; None for the rank's own."""
    block_rows: int
    scored: slice
    """The rows that this rank scores, of models with an indexer."""

    @cached_property
    def blocks(self) -> list[tuple[slice, StepRows]]:
        """All its rows, a block at a time."""
        return _blocks(self.rows, self.span.start, self.block_rows)

    @cached_property
    def scored_blocks(self) -> list[tuple[slice, StepRows]]:
        """Those that it scores, a block at a time."""
        own, rows = self.scored, self.rows
        if own != self.span:
            rows = rows.part(slice(own.start - self.span.start, own.stop - self.span.start))
        return _blocks(rows, own.start, self.block_rows)


def _blocks(rows: StepRows, first: int, block_rows: int) -> list[tuple[slice, StepRows]]:
    return [(slice(first + at.start, first + at.stop), block) for at, block in rows.blocks(block_rows)]


def row_parts(
    rows: RankRows, attend: Attend, shard_attend: ShardAttend | None, mesh: Mesh, *, block_rows: int, interleave: int,
    page_size: int,
) -> list[RowPart]:  # fmt: skip
    """The parts of a step's rows. A chunk of contexts is one even where this rank has no row of it: the others need its
    keys."""
    everything = slice(0, rows.attend.num_rows)
    if shard_attend is None:
        return [RowPart(everything, rows.attend, attend, None, block_rows, _scored(rows, everything, mesh.tp.rank))]
    whole = slice(0, rows.whole_rows)
    parts = []
    if rows.whole_rows:
        parts.append(RowPart(whole, _part(rows.attend, whole), shard_attend, None, block_rows, whole))
    for chunk in rows.contexts:
        context = Context(chunk, _part(rows.attend, chunk.rows), mesh.dcp, interleave=interleave, page_size=page_size)
        parts.append(RowPart(chunk.rows, context.rows, attend, context, block_rows, chunk.rows))
    return parts


def _part(rows: StepRows, span: slice) -> StepRows:
    return rows if span == slice(0, rows.num_rows) else rows.part(span)


def _scored(rows: RankRows, everything: slice, tp_rank: int) -> slice:
    if rows.score_counts is None:
        return everything
    first = sum(rows.score_counts[:tp_rank])
    return slice(first, first + rows.score_counts[tp_rank])
