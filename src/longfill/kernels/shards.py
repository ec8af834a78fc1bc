"""A rank's share of a stored weight: some of its outputs (rows) or some of its inputs (columns).

May import torch and the interface's tensors. Invariant: every value of a shard is the stored one, scale and all; where
a cut runs through a block that shares a scale, blocks get smaller and their scales are repeated.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from longfill.errors import ModelError
from longfill.kernels.interface import StoredLinear


def shard_rows(weight: StoredLinear, first: int, last: int) -> StoredLinear:
    """Outputs [first, last) with their bias: [last - first, C], views but for scales that are repeated.

    Raises ModelError where there are no such outputs.
    """
    _check("outputs", weight.out_size, first, last)
    if (first, last) == (0, weight.out_size):
        return weight
    shard = replace(
        weight, weight=weight.weight[first:last], bias=None if weight.bias is None else weight.bias[first:last]
    )
    return _rescaled(shard, 0, first, last)


def shard_columns(weight: StoredLinear, first: int, last: int) -> StoredLinear:
    """Inputs [first, last): [O, last - first], views but for scales that are repeated.

    The products of all shards add up to the whole one, so only the first of them, from input 0 on, keeps the bias.
    Raises ModelError where there are no such inputs.
    """
    _check("inputs", weight.in_size, first, last)
    if (first, last) == (0, weight.in_size):
        return weight
    shard = replace(weight, weight=weight.weight[:, first:last], bias=weight.bias if first == 0 else None)
    return _rescaled(shard, 1, first, last)


def _check(sides: str, size: int, first: int, last: int) -> None:
    if not 0 <= first < last <= size:
        raise ModelError(
            f"a weight of {size} {sides} has no shard [{first}, {last}); shard sizes must add up to {size}"
        )


def _rescaled(shard: StoredLinear, dim: int, first: int, last: int) -> StoredLinear:
    """`shard`, which still has the whole weight's scales, with those of its own [first, last) along `dim`."""
    if shard.scale is None or shard.block is None:
        return shard
    whole = shard.block[dim]
    # The largest size of blocks that both the cut and the stored blocks are made of.
    size = gcd(first, whole)
    scale = _repeated(shard.scale, dim, whole, size, first, last)
    block = (size, shard.block[1]) if dim == 0 else (shard.block[0], size)
    return replace(shard, scale=scale, block=block)


def _repeated(scale: Tensor, dim: int, whole: int, size: int, first: int, last: int) -> Tensor:
    first_block, end_block = first // size, -(-last // size)
    if size == whole:
        return scale.narrow(dim, first_block, end_block - first_block)
    return scale.index_select(dim, torch.arange(first_block, end_block, device=scale.device) * size // whole)
