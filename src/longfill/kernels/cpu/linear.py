"""Products with packed weights: what `reference.linear` means by `linear` and `mlp`, in native code.

May import torch and the extension. Invariant: a row's bits are a function of that row, the weights and the instruction
set; other rows, their number and the threads change nothing. Sums are fp32; a result is rounded once, after the bias.

Suffixes: T rows · C inputs · O outputs · H heads · A inputs of a head · B outputs of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A capsule crosses in a tenth of the time that a tensor's own __dlpack__ takes, which is Python code.
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from longfill.kernels.cpu.extension import selected_isa
from longfill.kernels.cpu.packing import PackedHeads, PackedLinear, PackedMlp


def linear(x_TC: Tensor, weight: PackedLinear, *, num_threads: int, out: Tensor | None = None) -> Tensor:
    """`x @ W.T + b`: [T, C] -> [T, O], in the dtype of `x` or of `out`, each bfloat16 or float32 with contiguous rows.

    Where the weight is packed for bfloat16 products, fp32 rows are rounded to it first; where it is packed for float32
    products, bfloat16 rows are widened, which is exact. Raises ValueError for shapes, dtypes or strides that do not
    fit.
    """
    from longfill.kernels.cpu import _native

    out_TO = x_TC.new_empty(x_TC.shape[0], weight.out_size) if out is None else out
    _native.linear(weight.native, to_dlpack(x_TC), to_dlpack(out_TO), num_threads)
    return out_TO


def per_head(x_THA: Tensor, heads: PackedHeads, out_THB: Tensor, *, num_threads: int) -> None:
    """Write `x[t, h] @ W[h]` into `out_THB`; both bfloat16 or float32, any strides but the last, which is 1.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    from longfill.kernels.cpu import _native

    _native.per_head(heads.native, to_dlpack(x_THA), to_dlpack(out_THB), num_threads)


def mlp(x_TC: Tensor, weights: PackedMlp, *, dtype: torch.dtype | None = None, num_threads: int) -> Tensor:
    """SwiGLU: `down(silu(gate x) * up x)` in `dtype`, by default that of `x`, [T, C] -> [T, C].

    The middle is computed in fp32 and rounded once, to the dtype of `x`. Raises ValueError for shapes, dtypes or
    strides that do not fit.
    """
    from longfill.kernels.cpu import _native

    out_TC = torch.empty(x_TC.shape, dtype=dtype or x_TC.dtype)
    _native.mlp(weights.native, to_dlpack(x_TC), to_dlpack(out_TC), num_threads)
    return out_TC


def linear_scratch_bytes(
    *,
    out_size: int,
    in_size: int,
    num_rows: int,
    compute_dtype: torch.dtype,
    num_threads: int,
    isa: str | None = None,
) -> int:
    """The most bytes that `linear` allocates beside its result, for up to `num_rows` rows."""
    from longfill.kernels.cpu import _native

    bf16 = compute_dtype == torch.bfloat16
    return _native.linear_scratch_bytes(isa or selected_isa(), bf16, out_size, in_size, num_rows, num_threads)


def per_head_scratch_bytes(
    *,
    out_size: int,
    in_size: int,
    num_rows: int,
    compute_dtype: torch.dtype,
    num_threads: int,
    isa: str | None = None,
) -> int:
    """The most bytes that `per_head` allocates, for up to `num_rows` rows."""
    from longfill.kernels.cpu import _native

    bf16 = compute_dtype == torch.bfloat16
    return _native.per_head_scratch_bytes(isa or selected_isa(), bf16, out_size, in_size, num_rows, num_threads)


def mlp_scratch_bytes(
    *,
    hidden_size: int,
    inner_size: int,
    num_rows: int,
    compute_dtype: torch.dtype,
    num_threads: int,
    isa: str | None = None,
) -> int:
    """The most bytes that `mlp` allocates beside its result, for up to `num_rows` rows."""
    from longfill.kernels.cpu import _native

    bf16 = compute_dtype == torch.bfloat16
    return _native.mlp_scratch_bytes(isa or selected_isa(), bf16, hidden_size, inner_size, num_rows, num_threads)
