"""Elementwise functions whose bits do not depend on where in a call an element lies.

May import torch. Invariant: every step below is an operation that torch computes alike in vectors and in the scalar
tail behind them. `torch.sigmoid`, `silu` and `logaddexp` are not: their tails round differently, and which element is
in a tail depends on the shape of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, fp32."""
    return 1.0 / (1.0 + torch.exp(-x.float()))


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, computed in fp32 and rounded once to the dtype of `x`."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) + exp(b))`, fp32; -inf where both are."""
    high = torch.maximum(a, b)
    # Of two -inf the difference is NaN; the sum is then `high` itself.
    gap = torch.where(high == float("-inf"), 0.0, (a - b).abs())
    return high + torch.log1p(torch.exp(-gap))
