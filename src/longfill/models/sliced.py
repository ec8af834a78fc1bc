"""Sums over slices of an inner width: what a rank adds itself, before or instead of other ranks' parts.

May import torch and `parallel`. Invariant: deterministic parts stay in float32 and are added along one tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longfill.parallel.sums import tree_sum_of

SliceProduct = Callable[[int, torch.dtype], Tensor | None]
"""(slice, dtype of the result) -> its partial [T, C], or None for an empty slice."""


def add_slices(count: int, product: SliceProduct, x_TC: Tensor, width: int, *, deterministic: bool) -> Tensor:
    """[T, width]: the sum of a rank's partial results for the rows of `x_TC`, in its dtype, or in float32 where they
    are `deterministic`; zeros where every slice is empty."""
    dtype = torch.float32 if deterministic else x_TC.dtype
    total = tree_sum_of(count, lambda i: product(i, dtype))
    return x_TC.new_zeros(x_TC.shape[0], width, dtype=dtype) if total is None else total
