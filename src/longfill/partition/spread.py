"""A step's rows spread over ranks: who attends for which, whose residual stream holds which, and the ways back.

May import NumPy and `partition/`. Invariant: among the ranks of a `rows` group every row of the batch is held, and is
stored, once (a replicated one by PCP rank 0; its copies have the same bits).

A rank *attends* for the rows that PCP gives it, with its own share of the heads. It *holds* a contiguous part of those,
its TP rank's: there the residual stream lives, norms and replicated projections are computed, and sums over TP ranks
end. So nothing is computed twice but what is gathered: query latents before attention, normed rows before an MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longfill.partition.lengths import Int64Array, even_cuts, row_starts
from longfill.partition.mesh import MeshShape
from longfill.partition.pcp import Split, pcp_layout


@dataclass(frozen=True)
class Cut:
    """How steps are spread, and over which rank's shoulder one looks."""

    shape: MeshShape = field(default_factory=MeshShape)
    rank: int = 0
    split: Split = "zigzag"
    interleave: int = 1
    """Tokens in a row of one DCP rank's share."""
    min_saved_pairs: int = 1
    """(query, key) pairs that each TP rank must be spared by sharing the indexer's scoring, or every one scores all."""

    @property
    def dcp_rank(self) -> int:
        """Place in the DCP group."""
        return self.shape.group("dcp", self.rank).index(self.rank)

    @property
    def gathers_contexts(self) -> bool:
        """Whether prompts that are split over PCP ranks need the keys of other ranks' shards."""
        return self.shape.pcp > 1 and self.shape.dcp > 1

    def is_whole(self, query_len: int, is_decode: bool) -> bool:
        """Whether every rank of a DCP group attends for all rows of such a request."""
        ranks = self.shape.pcp
        if ranks == 1 or is_decode:
            return True
        return self.split == "zigzag" and (2 * ranks - 1) * -(-query_len // (2 * ranks)) >= query_len


ONE_RANK = Cut()


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank has of a step's T rows."""

    rows: Int64Array
    """int64 [A]: batch rows that it attends for, rising."""
    rank_rows: tuple[Int64Array, ...]
    """The same of every PCP rank."""
    own: slice
    """Of those, the ones that it holds."""
    tp_counts: tuple[int, ...]
    """How many of them each rank of its TP group holds, one after the other."""
    held: tuple[int, ...]
    """Rows that each rank of its `rows` group holds."""
    order: Int64Array
    """int64 [T]: `gathered[order]` is the batch, where `gathered` are all held rows, rank after rank."""
    whole_rows: int
    """Leading rows of `rows` that all ranks of the DCP group attend for, each over its own share of the keys."""

    def pick(self, wanted: Int64Array) -> Pick:
        """How the batch rows `wanted` (int64 [S], any order) come together from those that hold them."""
        starts = row_starts(np.array(self.held, dtype=np.int64))
        at = self.order[wanted]
        holder = np.searchsorted(starts, at, side="right") - 1
        counts = np.bincount(holder, minlength=len(self.held)) if wanted.size else np.zeros(len(self.held), np.int64)
        by_holder = np.argsort(holder, kind="stable")
        order = np.empty_like(by_holder)
        order[by_holder] = np.arange(wanted.size)
        local = tuple((at - starts[holder])[by_holder[holder[by_holder] == rank]] for rank in range(len(self.held)))
        return Pick(local, tuple(int(n) for n in counts), order.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Pick:
    """Some rows of the batch, by the ranks of a `rows` group that hold them."""

    local: tuple[Int64Array, ...]
    """Of each rank: which of the rows that it holds."""
    counts: tuple[int, ...]
    order: Int64Array
    """int64 [S]: `gathered[order]` are the rows as they were asked for."""


def spread(query_lens: Int64Array, is_decode: Sequence[bool], cut: Cut) -> Share:
    """Spread the rows of a batch, whose requests have `query_lens` rows each, for the rank of `cut`."""
    shape, num_rows = cut.shape, int(query_lens.sum())
    if shape.pcp == shape.tp == 1:
        rows = np.arange(num_rows, dtype=np.int64)
        return Share(rows, (rows,), slice(0, num_rows), (num_rows,), (num_rows,), rows, 0)
    if shape.pcp == 1:
        rank_rows: tuple[Int64Array, ...] = (np.arange(num_rows, dtype=np.int64),)
        replicated = range(query_lens.size)
    else:
        layout = pcp_layout(
            query_lens, ranks=shape.pcp, is_decode=is_decode, shard_decodes=shape.dcp == 1, split=cut.split
        )
        rank_rows, replicated = layout.rank_rows, range(len(layout.replicated))
        assert layout.replicated == tuple(replicated), "requests that are not split come first"
    place = shape.place(cut.rank)
    cuts = [even_cuts(rows.size, shape.tp) for rows in rank_rows]
    held = tuple(int(n) for bounds in cuts for n in np.diff(bounds))
    gathered = np.concatenate(rank_rows)
    order = np.empty(num_rows, dtype=np.int64)
    order[gathered[::-1]] = np.arange(gathered.size - 1, -1, -1)  # of copies, the first one stays
    mine = cuts[place["pcp"]]
    return Share(
        rows=rank_rows[place["pcp"]],
        rank_rows=rank_rows,
        own=slice(mine[place["tp"]], mine[place["tp"] + 1]),
        tp_counts=tuple(int(n) for n in np.diff(mine)),
        held=held,
        order=order,
        whole_rows=int(query_lens[list(replicated)].sum()) if shape.dcp > 1 else 0,
    )
