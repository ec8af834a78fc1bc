"""`bench parallel balance`: the pairs that each rank scores when a prompt's rows are split, from the plans alone.

May import partition; no model runs. Invariant: the counts are those of the plans that an engine would execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfill.config import PcpSplit
from longfill.partition import StepRequest, plan_step
from longfill.partition.mesh import MeshShape
from longfill.partition.spread import Cut
from longfill.units import PageSize

PAGE = PageSize(64)
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Balance:
    """One split over some ranks. Pairs are (query, key) pairs of one full-indexer layer."""

    split: PcpSplit
    chunks: tuple[tuple[int, ...], ...]
    """Of each step, each rank's pairs."""

    @property
    def rank_pairs(self) -> tuple[int, ...]:
        """Each rank's over the whole prompt."""
        return tuple(sum(pairs) for pairs in zip(*self.chunks, strict=True))

    @property
    def speedups(self) -> tuple[float, ...]:
        """Of each step, what scoring can gain at most: all pairs over those of the rank that has most."""
        return tuple(speedup(pairs) for pairs in self.chunks)

    @property
    def overall(self) -> float:
        """The same over the prompt, where every step waits for its slowest rank."""
        return sum(map(sum, self.chunks)) / max(1, sum(map(max, self.chunks)))

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        pairs = self.rank_pairs
        return {
            "split": self.split,
            "ranks": len(pairs),
            "rank_pairs": list(pairs),
            "most_over_least": max(pairs) / max(1, min(pairs)),
            "speedup": self.overall,
            "chunk_speedups": list(self.speedups),
        }


def speedup(pairs: Sequence[int]) -> float:
    """All ranks' pairs over the most of one; that of ranks which share evenly where there are none."""
    return sum(pairs) / max(pairs) if max(pairs) else float(len(pairs))


def balance(length: int, *, ranks: int, split: PcpSplit, chunk: int, topk: int) -> Balance:
    """Plan the prefill of one prompt of `length` tokens in steps of `chunk`, its rows split over `ranks`.

    A row that has no more than `topk` keys selects them all and scores none.
    """
    cut = Cut(MeshShape(pcp=ranks), split=split)
    pages = np.arange(1, -(-length // PAGE) + 1)
    chunks = []
    for start in range(0, length, chunk):
        rows = min(chunk, length - start)
        token_ids = np.zeros(rows, dtype=np.int64)
        request = StepRequest("prompt", start, rows, pages, token_ids, samples=False)
        plan = plan_step(
            [request],
            page_size=PAGE,
            topk=topk,
            indexer_workspace_rows=_UNLIMITED,
            max_logits_bytes=_UNLIMITED,
            workspace_rows=_UNLIMITED,
            cut=cut,
        )
        chunks.append(plan.rank_scored_pairs)
    return Balance(split, tuple(chunks))
