"""Attention over parts of the selected keys, and how the parts become one.

May import torch and the reference's merge. Invariant: which slice a position belongs to depends on the position and the
interleave alone, and slices are merged in an order in which every rank's own come together first.

Slice s of n holds the positions p with `p // interleave % n == s`: what DCP rank s of n keeps. Ranks r of W (W divides
n) hold the slices r, r + W...; merging i with i + n/2, then i with i + n/4... merges those of a rank before any two
ranks'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longfill.kernels.reference.attention import merge

PartialAttention = tuple[Tensor, Tensor]
"""fp32 outputs [..., R] and natural-log log-sum-exp [...]; -inf where there was no key."""


class KeySlices:
    """The slices of the keys that one rank's cache holds. `ranks` 1: a cache with every position."""

    def __init__(self, count: int, interleave: int, ranks: int = 1, rank: int = 0) -> None:
        if count % ranks:
            raise ValueError(f"{count} slices cannot be shared by {ranks} ranks; the ranks must divide them")
        self.count = count
        self.interleave = interleave
        self.ranks = ranks
        self.rank = rank

    def split(self, selection_TK: Tensor) -> Iterator[Tensor]:
        """int32 [T, K] for each own slice: its selected positions as the cache counts them, ascending, -1 behind."""
        turn = selection_TK // self.interleave % self.count
        local = selection_TK
        if self.ranks > 1:
            stride = self.ranks * self.interleave
            local = selection_TK // stride * self.interleave + selection_TK % self.interleave
        for own in range(self.rank, self.count, self.ranks):
            yield _compact(local, (turn == own) & (selection_TK >= 0))

    def everywhere(self, local_TK: Tensor) -> Tensor:
        """int32 [T, K]: positions of this rank's cache, counted in the whole context; negative ones stay."""
        turn, at = local_TK // self.interleave, local_TK % self.interleave
        whole = (turn * self.ranks + self.rank) * self.interleave + at
        return torch.where(local_TK < 0, local_TK, whole)


def _compact(values_TK: Tensor, keep_TK: Tensor) -> Tensor:
    """The kept values of each row in their order, then -1."""
    out = torch.full_like(values_TK, -1)
    rows, columns = keep_TK.nonzero(as_tuple=True)
    counts = keep_TK.sum(-1)
    firsts = counts.cumsum(0) - counts
    out[rows, torch.arange(rows.numel()) - firsts[rows]] = values_TK[rows, columns]
    return out


def merge_parts(parts: Sequence[PartialAttention]) -> PartialAttention:
    """All parts as one, part i merged with part i + half; the parts are overwritten."""
    left = list(parts)
    while len(left) > 1:
        half = -(-len(left) // 2)
        for (out, lse), (other, other_lse) in zip(left, left[half:], strict=False):
            merge(out, lse, other, other_lse)
        left = left[:half]
    return left[0]
