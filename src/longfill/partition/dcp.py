"""Decode context parallelism: which rank's cache holds a token, and at which local position.

May import NumPy and `partition.lengths`. Invariant: (owner, local position) names each token once, without holes.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from longfill.partition.lengths import Int64Array, Lengths, as_lengths, positive

Positions = TypeVar("Positions", int, Int64Array)


def dcp_owner(position: Positions, *, ranks: int, interleave: int = 1) -> Positions:
    """Rank that holds a token: runs of `interleave` tokens go to the ranks in turn. An int, or int64 of any shape."""
    return position // positive("interleave", interleave) % positive("ranks", ranks)


def dcp_local_position(position: Positions, *, ranks: int, interleave: int = 1) -> Positions:
    """Position of a token among those that its owner holds. An int, or int64 of any shape."""
    stride = positive("ranks", ranks) * positive("interleave", interleave)
    return position // stride * interleave + position % interleave


def dcp_local_lens(seq_lens: Lengths, *, ranks: int, rank: int, interleave: int = 1) -> Int64Array:
    """int64 [R]: KV rows of each request that `rank` holds; over all ranks they sum to `seq_lens`.

    Raises ValueError for a rank outside `range(ranks)`.
    """
    if not 0 <= rank < positive("ranks", ranks):
        raise ValueError(f"rank is {rank}; with {ranks} ranks it must be in [0, {ranks})")
    lens = as_lengths("seq_lens", seq_lens)
    full_rounds = lens // positive("interleave", interleave) // ranks * interleave
    rest = lens - full_rounds * ranks
    last_round: Int64Array = np.clip(rest - rank * interleave, 0, interleave)
    return full_rounds + last_round
