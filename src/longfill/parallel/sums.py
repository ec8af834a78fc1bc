"""The order in which parts of a sum are added, one for slices within a rank and for parts of several ranks.

May import torch. Invariant: the order depends on the number of parts alone, and where n is a power of two the sum of 2n
parts is that of the first n plus that of the last n, so that sums nest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """float32 sum of one or more tensors of equal shape, along a binary tree.

    The left half of n parts is the largest power of two below n: ((0+1)+(2+3))+4 for five. A single float32 part is
    returned as it is.
    """
    total = tree_sum_of(len(parts), lambda i: parts[i].float())
    assert total is not None
    return total


def tree_sum_of(count: int, part: Callable[[int], Tensor | None]) -> Tensor | None:
    """The same of float32 tensors that are made one after the other, so that few are held at once.

    A part that is None stands for nothing, not for zeros; None if all are.
    """
    if count == 1:
        return part(0)
    half = 1 << ((count - 1).bit_length() - 1)
    left = tree_sum_of(half, part)
    right = tree_sum_of(count - half, lambda i: part(half + i))
    if left is None or right is None:
        return right if left is None else left
    return left + right
