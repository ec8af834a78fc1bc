"""Prefill context parallelism: which rank computes which query rows, and the way back to batch order.

May import NumPy and `partition.lengths`. Invariant: after the gather every row of the batch is found once and its KV
is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from longfill.partition.lengths import Int64Array, Lengths, as_lengths, positive, row_starts

Split = Literal["zigzag", "interleave", "contiguous"]

EVERY_RANK = -1
"""Owner of a replicated row."""


@dataclass(frozen=True, eq=False)
class PcpLayout:
    """Rows of a batch (T in all) on P ranks.

    The gathered batch is what an all-gather over ranks gives once each rank has padded its rows to `padded_rows`.
    """

    rank_rows: tuple[Int64Array, ...]
    """For each rank, the batch rows that it computes, rising."""

    replicated: tuple[int, ...]
    """Requests that every rank computes whole."""

    padded_rows: int
    """Rows of a rank in the gathered batch: the largest rank's."""

    hidden_restore_idx: Int64Array
    """int64 [T]: `gathered[hidden_restore_idx]` is the batch (of a replicated row, rank 0's copy)."""

    padded_gather_idx: Int64Array
    """int64 [P * padded_rows]: `batch[padded_gather_idx]` is the gathered batch; padding points at row 0."""

    kv_write_mask: npt.NDArray[np.bool_]
    """bool [P * padded_rows]: gathered rows whose KV is written; true once for each row of the batch."""


def pcp_layout(
    query_lens: Lengths,
    *,
    ranks: int,
    is_decode: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
    shard_decodes: bool = False,
    split: Split = "zigzag",
) -> PcpLayout:
    """Spread the query rows of a batch over `ranks`.

    Prefilling requests are cut by `split`:
    - "zigzag": each request into 2P pieces of equal size (the last ones shorter or empty); rank r takes pieces r and
      2P-1-r, so that causal work is even;
    - "interleave": row t of the flattened prefilling rows to rank t mod P;
    - "contiguous": the flattened prefilling rows into P runs of equal size.

    `is_decode` marks the requests that are not prefilling (default: none). They are never cut: each goes to every
    rank, or with `shard_decodes` to one rank, in turn. Decodes are sharded where every rank's cache holds every key;
    where the cache itself is sharded (decode context parallelism) all ranks must see the same queries, and then a
    zigzag request too short to fill its 2P pieces is replicated too.

    Raises ValueError for an unknown split or an `is_decode` of another length.
    """
    positive("ranks", ranks)
    lens = as_lengths("query_lens", query_lens)
    decode = np.zeros(lens.size, dtype=np.bool_) if is_decode is None else np.asarray(is_decode, dtype=np.bool_)
    if decode.shape != lens.shape:
        raise ValueError(f"is_decode has shape {decode.shape}, query_lens {lens.shape}; give one of each a request")
    if split not in get_args(Split):
        raise ValueError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    whole = decode.copy()
    if split == "zigzag" and not shard_decodes:
        whole |= (2 * ranks - 1) * _piece_rows(lens, ranks) >= lens
    whole &= lens > 0

    row_is_whole = np.repeat(whole, lens)
    owner = np.empty(row_is_whole.size, dtype=np.int64)
    owner[row_is_whole] = np.repeat(np.arange(whole.sum()) % ranks, lens[whole]) if shard_decodes else EVERY_RANK
    owner[~row_is_whole] = _split_owners(lens[~whole], ranks, split)
    replicated = () if shard_decodes else tuple(int(r) for r in np.flatnonzero(whole))
    return _layout(owner, ranks, replicated)


def _piece_rows(lens: Int64Array, ranks: int) -> Int64Array:
    """Rows of one zigzag piece of each request."""
    return -(-lens // (2 * ranks))


def _split_owners(lens: Int64Array, ranks: int, split: Split) -> Int64Array:
    """Rank of each row of the requests that are cut."""
    starts = row_starts(lens)
    rows = np.arange(starts[-1])
    if split == "interleave":
        return rows % ranks
    if split == "contiguous":
        return rows // max(1, -(-rows.size // ranks))
    piece = (rows - np.repeat(starts[:-1], lens)) // np.repeat(_piece_rows(lens, ranks), lens)
    owners: Int64Array = np.minimum(piece, 2 * ranks - 1 - piece)
    return owners


def _layout(owner: Int64Array, ranks: int, replicated: tuple[int, ...]) -> PcpLayout:
    everywhere = owner == EVERY_RANK
    rank_rows = tuple(np.flatnonzero((owner == rank) | everywhere) for rank in range(ranks))
    padded_rows = max(rows.size for rows in rank_rows)
    restore = np.empty(owner.size, dtype=np.int64)
    gather = np.zeros(ranks * padded_rows, dtype=np.int64)
    writes = np.zeros(ranks * padded_rows, dtype=np.bool_)
    for rank, rows in enumerate(rank_rows):
        base = rank * padded_rows
        gather[base : base + rows.size] = rows
        mine = np.flatnonzero(~everywhere[rows]) if rank else np.arange(rows.size)
        restore[rows[mine]] = base + mine
        writes[base + mine] = True
    return PcpLayout(rank_rows, replicated, padded_rows, restore, gather, writes)
