"""The operations of a step, as the model calls them: what the torch reference defines and native kernels must equal.

May import torch and the interface's tensors. Invariant: a row's result depends on that row's inputs alone, never on
which other rows share the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longfill.kernels.interface import (
    ExpertChoice,
    Heads,
    IndexCache,
    IndexChunks,
    LatentCache,
    Linear,
    Mlp,
    RequestRows,
    ScreenCounts,
    StoredLinear,
    StoredMlp,
)
from longfill.kernels.workspace import Workspace


class Backend(Protocol):
    """Outputs have the dtype of `x` unless an `out` is given, which may be a strided view. Suffix C is any width, S any
    number of expert outputs. Every operation takes 0 rows: a rank may have none."""

    @property
    def copies(self) -> bool:
        """Whether `pack` and `pack_heads` make copies, so that the stored tensors may go."""
        ...

    def packed_bytes(self, out_size: int, in_size: int, dtype: torch.dtype) -> int:
        """Bytes of a weight, or of one head's matrix, in this backend's form; scales and bias apart."""
        ...

    def pack(self, weight: StoredLinear) -> Linear:
        """A weight in this backend's form. The stored tensor is not needed afterwards."""
        ...

    def pack_mlp(self, weights: StoredMlp) -> Mlp:
        """`pack` of all three."""
        ...

    def pack_heads(self, weight_HAB: Tensor) -> Heads:
        """One matrix a head, of any strides, in this backend's form."""
        ...

    def linear(
        self, x_TC: Tensor, weight: Linear, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """`x @ W.T + b`: [T, O]. `dtype`: of the result; float32 from bfloat16 rows is the unrounded sum."""
        ...

    def per_head(self, x_THA: Tensor, heads: Heads, out_THB: Tensor) -> None:
        """`out[t, h] = x[t, h] @ W[h]`."""
        ...

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight`: the norm in fp32, rounded to the dtype of x before the weight (as Llama does)."""
        ...

    def mlp(self, x_TC: Tensor, weights: Mlp, *, dtype: torch.dtype | None = None) -> Tensor:
        """`down(silu(gate x) * up x)`, the middle in the dtype of x. `dtype`: of the result, as in `linear`."""
        ...

    def route(self, x_TC: Tensor, router: Linear, bias_E: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        """Expert ids int64 [T, K], ascending in a row, and their fp32 weights [T, K]; the router [E, C] is fp32."""
        ...

    def experts(
        self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Sequence[Mlp], shared: Mlp | None, *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Routed experts' outputs times their weights, and the output of the expert that every token takes: [T, C].

        `ids_TK`: int64, ascending in a row, indices into `experts`. A row's outputs are added in fp32 in the order of
        its ids, `shared` last, and rounded once to `dtype` (by default that of x); float32 is the unrounded sum.
        """
        ...

    def fold_experts(
        self, y_SC: Tensor, slots_TK: Tensor, weights_TK: Tensor, shared_TC: Tensor | None, *, dtype: torch.dtype
    ) -> Tensor:
        """The same sum, bit for bit, over outputs that were computed elsewhere: [T, C] in `dtype`.

        Row t's k-th output, in ascending order of its experts' ids, is `y_SC[slots_TK[t, k]]`. `y_SC` and `shared_TC`
        are fp32, as `experts` (one expert a row, of weight 1) and `mlp` give them unrounded; `slots_TK` is int64.
        """
        ...

    def rotate(self, x_THP: Tensor, cos_TF: Tensor, sin_TF: Tensor, out_THP: Tensor, *, interleaved: bool) -> None:
        """Rotary embedding (P = 2 F): pairs (0, 1), (2, 3)... when `interleaved`, else (i, i + P/2)."""
        ...

    def store_latent(
        self, kv_TX: Tensor, norm_R: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, cache: LatentCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        """Write a layer's latent rows: RMS-normalised first R values, rotated last P ones."""
        ...

    def store_index_keys(
        self, k_TD: Tensor, norm: tuple[Tensor, Tensor], cos_TF: Tensor, sin_TF: Tensor, cache: IndexCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        """Write a layer's index keys: LayerNorm (weight, bias; eps 1e-6), first P dims rotated."""
        ...

    def put_rows(self, rows_SX: Tensor, order_K: Tensor, cache_NBX: Tensor, slots_K: Tensor) -> None:
        """Copy row `order_K[k]` (uint8 [X], of adjacent bytes) into slot `slots_K[k]` of the cache; slots are distinct.

        Both are int64; rows and pages may be strided views.
        """
        ...

    def index_queries(
        self, q_TJ: Tensor, w_TI: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool, quantise: bool,
        w_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Queries [T, I D] with their first P dims rotated, as fp32 [T, I, D], and head weights times `w_scale`.

        `quantise`: rounded to e4m3 a head, the scales folded into the weights (fp32 [T, I]).
        """
        ...

    def index_topk(
        self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, chunks: IndexChunks, selection_TK: Tensor,
        workspace: Workspace, *, scores_TK: Tensor | None = None,
    ) -> ScreenCounts:  # fmt: skip
        """Write every scored row's top-k positions, ascending, -1 where fewer count; ties go to the lower one.

        `scores_TK`, if given, receives the fp32 scores of the selected positions, -inf in the padding. `workspace` has
        room for the scores, for a backend that writes them all down.
        """
        ...

    def merge_topk(self, scores_TN: Tensor, positions_TN: Tensor, selection_TK: Tensor) -> None:
        """Write every row's exact top-k of its candidates, as `index_topk` over all keys would: int32 [T, K].

        N = shards x K: fp32 scores and int32 positions of several shards side by side, each shard's ascending and
        padded with -1. NaN and -inf are never chosen; ties go to the lower position.
        """
        ...

    def sparse_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor, scale: float,
        out_THR: Tensor, context_LX: Tensor | None, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of rows over their selected positions, read from the pages or from a gathered context.

        Entries of -1, anywhere in a row, select nothing. `lse_TH`, if given, receives the natural-log log-sum-exp of
        the scaled scores (fp32 [T, H]). A row without keys has the output 0 and the LSE -inf. `out_THR` may be fp32
        where q is bfloat16.
        """
        ...

    def dense_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, visible_T: Tensor, scale: float,
        out_THR: Tensor, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Causal attention: row i attends to the first `visible_T[i]` (int64, nondecreasing) rows of the page table.

        `out_THR` and `lse_TH` as in `sparse_mla`.
        """
        ...

    def gather_rows(self, cache: LatentCache, request: RequestRows, out_LX: Tensor) -> None:
        """A request's whole context, decoded."""
        ...
