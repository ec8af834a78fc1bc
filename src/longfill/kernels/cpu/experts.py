"""The mixture of experts on packed weights: what `reference.linear` means by `route` and `experts`, in native code.

May import torch and the extension. Invariant: as in `linear.py`; a row's experts are added in ascending order of their
ids, in fp32, then the shared one, and the sum is rounded once.

Suffixes: T rows · C hidden size · E experts · K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# As in linear.py: a capsule crosses faster than a tensor.
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from longfill.kernels.cpu.extension import selected_isa
from longfill.kernels.cpu.packing import PackedLinear, PackedMlp
from longfill.kernels.interface import ExpertChoice


def experts(
    x_TC: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: Sequence[PackedMlp],
    shared: PackedMlp | None,
    *,
    dtype: torch.dtype | None = None,
    num_threads: int,
) -> Tensor:
    """The chosen experts' outputs times their weights, plus the shared one's: [T, C] in `dtype`, or in x's.

    `ids_TK`: int64, ascending in a row; `weights_TK`: fp32. An expert's output is not rounded before it is weighed.
    Raises ValueError for ids that do not ascend or exist, and for shapes, dtypes or strides that do not fit.
    """
    from longfill.kernels.cpu import _native

    out_TC = torch.empty(x_TC.shape, dtype=dtype or x_TC.dtype)
    always = None if shared is None else shared.native
    _native.experts(
        [e.native for e in experts], always, to_dlpack(ids_TK), to_dlpack(weights_TK), to_dlpack(x_TC),
        to_dlpack(out_TC), num_threads,
    )  # fmt: skip
    return out_TC


def fold_experts(
    y_SC: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    shared_TC: Tensor | None,
    *,
    dtype: torch.dtype,
    num_threads: int,
    isa: str | None = None,
) -> Tensor:
    """The sum that `experts` forms, bit for bit, over outputs that exist already: [T, C] in `dtype`.

    Row t's k-th output, in ascending order of its experts' ids, is `y_SC[slots_TK[t, k]]`; `y_SC` and `shared_TC` are
    fp32 with contiguous rows, `slots_TK` is int64, `weights_TK` fp32. `isa` overrides the process's instruction set.
    Raises ValueError for slots outside `y_SC`, and for shapes, dtypes or strides that do not fit.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    out_TC = torch.empty(slots_TK.shape[0], y_SC.shape[1], dtype=dtype)
    _native.fold_experts(
        chosen, to_dlpack(y_SC), to_dlpack(slots_TK), to_dlpack(weights_TK),
        None if shared_TC is None else to_dlpack(shared_TC), to_dlpack(out_TC), num_threads,
    )  # fmt: skip
    return out_TC


def route(
    x_TC: Tensor, router: PackedLinear, bias_E: Tensor | None, choice: ExpertChoice, *, num_threads: int
) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [T, K] (ascending) and fp32 weights [T, K], by the rule of `reference.linear.route`.

    `router` [E, C] is packed for float32 products; `bias_E` is fp32. Raises ValueError for groups that do not divide
    the experts, and for shapes, dtypes or strides that do not fit.
    """
    from longfill.kernels.cpu import _native

    shape = (x_TC.shape[0], choice.experts_per_token)
    ids_TK = torch.empty(shape, dtype=torch.int64)
    weights_TK = torch.empty(shape)
    _native.route(
        router.native,
        None if bias_E is None else to_dlpack(bias_E),
        choice.scoring,
        choice.group_value or "",
        choice.num_groups,
        choice.topk_groups,
        choice.normalise,
        choice.scale,
        to_dlpack(x_TC),
        to_dlpack(ids_TK),
        to_dlpack(weights_TK),
        num_threads,
    )
    return ids_TK, weights_TK


def experts_scratch_bytes(
    *,
    hidden_size: int,
    inner_size: int,
    shared_inner_size: int,
    num_experts: int,
    experts_per_token: int,
    num_rows: int,
    compute_dtype: torch.dtype,
    num_threads: int,
    isa: str | None = None,
) -> int:
    """The most bytes that `experts` allocates beside its result, whichever experts up to `num_rows` rows choose.

    `shared_inner_size` is 0 without a shared expert.
    """
    from longfill.kernels.cpu import _native

    return _native.experts_scratch_bytes(
        isa or selected_isa(),
        compute_dtype == torch.bfloat16,
        hidden_size,
        inner_size,
        shared_inner_size,
        num_experts,
        experts_per_token,
        num_rows,
        num_threads,
    )


def route_scratch_bytes(
    *, hidden_size: int, num_experts: int, num_rows: int, num_threads: int, isa: str | None = None
) -> int:
    """The most bytes that `route` allocates beside its result, for up to `num_rows` rows."""
    from longfill.kernels.cpu import _native

    return _native.route_scratch_bytes(isa or selected_isa(), num_experts, hidden_size, num_rows, num_threads)
