"""Sharding the indexer's query rows over tensor-parallel ranks, which otherwise all score the same rows.

May import NumPy and `partition.lengths`. Invariant: shards are contiguous in batch order and none is empty.
"""

from __future__ import annotations

import numpy as np

from longfill.partition.lengths import Int64Array, Lengths, as_query_and_seq_lens, positive, row_positions


def row_shards(
    query_lens: Lengths, seq_lens: Lengths, *, ranks: int, compress_ratio: int = 1, min_rows: int = 1
) -> list[int] | None:
    """Rows that each rank scores, contiguous in batch order and balanced by scored keys; they sum to all rows.

    A row costs the keys it may score, `(position + 1) // compress_ratio`. Rank r ends at the first row where the
    running cost reaches r + 1 shares of the total; every rank keeps at least one row.

    None where sharding does not pay: a single rank, fewer rows than `min_rows` or than ranks, or nothing to score.
    """
    positive("ranks", ranks)
    positive("compress_ratio", compress_ratio)
    queries, seqs = as_query_and_seq_lens(query_lens, seq_lens)
    costs = (row_positions(queries, seqs) + 1) // compress_ratio
    if costs.size < min_rows:
        return None
    counts = balanced_cuts(costs, ranks)
    return None if counts is None else list(counts)


def balanced_cuts(costs: Int64Array, ranks: int) -> tuple[int, ...] | None:
    """The same for rows of any costs (int64 [T]); None with a single rank, fewer rows than ranks, or no costs."""
    rows = costs.size
    total = np.cumsum(costs)
    if ranks == 1 or rows < ranks or total[-1] == 0:
        return None
    order = np.arange(1, ranks)
    bounds = np.searchsorted(total, order * total[-1] // ranks, side="left")
    # Leave every rank a row: strictly rising bounds from the front, then from the back.
    bounds = np.maximum.accumulate(np.maximum(bounds, 1) - order) + order
    bounds = np.minimum(bounds, rows - ranks + order)
    return tuple(int(n) for n in np.diff(bounds, prepend=0, append=rows))
