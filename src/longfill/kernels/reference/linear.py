"""Matrix products with stored weights, norms, and the mixture of experts.

May import torch. Invariant: a row's sum order does not depend on how many rows share the call.

Suffixes: T rows · C input width · O output width · E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.kernels.interface import ExpertChoice, StoredLinear, StoredMlp
from longfill.kernels.reference.elementwise import sigmoid, silu

MIN_ROWS = 16
"""Calls are padded to this many rows: below it the BLAS behind torch sums in other orders (measured: 1 to 3 rows)."""
ROW_BLOCK = 1024
"""Most rows of one call. With the tail padded to a power of two, a weight meets few shapes: the BLAS behind torch keeps
code and scratch for every shape that it has seen, and expert batches would show it a new one at every step."""
DEQUANT_ROWS = 1024
"""Output rows of a weight that are dequantised or widened at once."""


def pad_rows(x: Tensor) -> Tensor:
    """`x` with zero rows appended up to MIN_ROWS (unchanged when it has that many)."""
    if x.shape[0] >= MIN_ROWS:
        return x
    padded = x.new_zeros(MIN_ROWS, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def linear(x_TC: Tensor, weight: StoredLinear, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ W.T + b` in `dtype`, by default that of `x`: [T, C] -> [T, O]. A wider `dtype` gives the unrounded sums.

    Weights of another dtype are dequantised or widened a slice at a time; fp8 values are rounded to the dtype of `x`.
    """
    wanted = dtype or x_TC.dtype
    bias_O = None if weight.bias is None else weight.bias.to(wanted)
    if weight.scale is None and weight.weight.dtype == wanted:
        return _blocks(x_TC.to(wanted), weight.weight, bias_O)
    slices = [
        _blocks(x_TC.to(wanted), _values(weight, first, x_TC.dtype).to(wanted))
        for first in range(0, weight.out_size, DEQUANT_ROWS)
    ]
    out_TO = torch.cat(slices, -1)
    return out_TO if bias_O is None else out_TO + bias_O


def _values(weight: StoredLinear, first: int, dtype: torch.dtype) -> Tensor:
    """DEQUANT_ROWS output rows from `first` on, or those left: scaled ones in `dtype`, others as stored."""
    last = min(first + DEQUANT_ROWS, weight.out_size)
    return weight.weight[first:last] if weight.scale is None else weight.rows(first, last).to(dtype)


def per_head(x_THA: Tensor, weight_HAB: Tensor) -> Tensor:
    """[T, H, A] x [H, A, B] -> [T, H, B], one matrix a head."""
    padded = pad_rows(x_THA)
    return torch.bmm(padded.transpose(0, 1), weight_HAB).transpose(0, 1)[: x_THA.shape[0]]


def _blocks(x_TC: Tensor, weight_OC: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` in blocks of ROW_BLOCK rows, the last one padded to a power of two."""
    num_rows = x_TC.shape[0]
    out_TO = x_TC.new_empty(num_rows, weight_OC.shape[0])
    for first in range(0, num_rows, ROW_BLOCK):
        block = x_TC[first : first + ROW_BLOCK]
        height = block.shape[0]
        padded_height = max(MIN_ROWS, 1 << (height - 1).bit_length())
        if padded_height > height:
            block = torch.cat([block, block.new_zeros(padded_height - height, block.shape[1])])
        out_TO[first : first + height] = _product(block, weight_OC, bias_O)[:height]
    return out_TO


def _product(x_TC: Tensor, weight_OC: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, but a single output is computed twice: matrix-vector products sum in orders that depend on T."""
    width = weight_OC.shape[0]
    columns = max(2, width)
    bias_O = None if bias_O is None else bias_O.expand(columns)
    return F.linear(x_TC, weight_OC.expand(columns, -1), bias_O)[:, :width]


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`: the norm in fp32, rounded to the dtype of x before the weight (as Llama does)."""
    x32 = x_TC.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_C * scaled.to(x_TC.dtype)


def mlp(x_TC: Tensor, weights: StoredMlp, dtype: torch.dtype | None = None) -> Tensor:
    """SwiGLU: `down(silu(gate x) * up x)` in `dtype`, by default that of `x`, as the middle is."""
    return linear(silu(linear(x_TC, weights.gate)) * linear(x_TC, weights.up), weights.down, dtype)


def route(x_TC: Tensor, router_EC: Tensor, bias_E: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [T, K] (ascending) and fp32 weights [T, K].

    Scores are sigmoid or softmax of fp32 router logits. Experts are chosen by score + bias within the `topk_groups`
    best groups (a group's value: the sum of its two best, or its best for `group_limited_greedy`), weighed by the
    unbiased scores (DeepSeek-V3 technical report, section 2.1.2). Ties go to the lower id.
    """
    logits_TE = _product(pad_rows(x_TC.float()), router_EC)[: x_TC.shape[0]]
    scores_TE = sigmoid(logits_TE) if choice.scoring == "sigmoid" else logits_TE.softmax(-1)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if choice.num_groups > 1 and choice.group_value is not None:
        groups = biased_TE.view(x_TC.shape[0], choice.num_groups, biased_TE.shape[1] // choice.num_groups)
        value = groups.topk(2, -1).values.sum(-1) if choice.group_value == "top2" else groups.amax(-1)
        kept = _best(value, choice.topk_groups)
        closed = torch.ones_like(value, dtype=torch.bool).scatter_(1, kept, False)
        biased_TE = groups.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    ids_TK = _best(biased_TE, choice.experts_per_token).sort(-1).values
    weights_TK = scores_TE.gather(1, ids_TK)
    if choice.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * choice.scale


def _best(values_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest, ties to the lower index (a stable sort; torch.topk leaves ties open)."""
    return torch.sort(values_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def experts(
    x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: Sequence[StoredMlp],
    shared: StoredMlp | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Sum of the chosen experts' outputs times their weights, in ascending order of expert id, and `shared`'s output.

    Outputs and their sum are fp32; the sum is rounded once, to `dtype` (by default that of `x`).
    """
    total_TC = torch.zeros(x_TC.shape, dtype=torch.float32)
    order = ids_TK.flatten().argsort(stable=True)
    counts = torch.bincount(ids_TK.flatten(), minlength=len(expert_weights)).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        taken = order[first : first + count]
        rows = taken // ids_TK.shape[1]
        out = mlp(x_TC[rows], expert_weights[expert], torch.float32)
        total_TC[rows] += out * weights_TK.flatten()[taken, None]
        first += count
    if shared is not None:
        total_TC += mlp(x_TC, shared, torch.float32)
    return total_TC.to(dtype or x_TC.dtype)


def fold_experts(
    y_SC: Tensor, slots_TK: Tensor, weights_TK: Tensor, shared_TC: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The sum of `experts` over fp32 outputs that exist already: row t's k-th is `y_SC[slots_TK[t, k]]`.

    `slots_TK` (int64) and `weights_TK` (fp32) stand in ascending order of expert id; `shared_TC` is fp32 or None.
    """
    total_TC = torch.zeros(slots_TK.shape[0], y_SC.shape[1], dtype=torch.float32)
    for slots_T, weights_T in zip(slots_TK.unbind(1), weights_TK.unbind(1), strict=True):
        total_TC += y_SC[slots_T] * weights_T[:, None]
    if shared_TC is not None:
        total_TC += shared_TC
    return total_TC.to(dtype)
