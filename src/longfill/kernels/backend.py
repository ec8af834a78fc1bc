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
    """Outputs have the dtype of `x` unless an `out` is given, which may be a strided view. Suffix C is any width."""

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
        """`x @ W.T + b`: [T, O]. `dtype`: of the result, and of a float32 weight where x is bfloat16, which widens."""
        ...

    def per_head(self, x_THA: Tensor, heads: Heads, out_THB: Tensor) -> None:
        """`out[t, h] = x[t, h] @ W[h]`."""
        ...

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight`: the norm in fp32, rounded to the dtype of x before the weight (as Llama does)."""
        ...

    def mlp(self, x_TC: Tensor, weights: Mlp) -> Tensor:
        """`down(silu(gate x) * up x)`."""
        ...

    def experts(
        self, x_TC: Tensor, router: Linear, bias_E: Tensor | None, choice: ExpertChoice, experts: Sequence[Mlp],
        shared: Mlp | None,
    ) -> Tensor:  # fmt: skip
        """Routed experts, summed in ascending order of their id, and the expert that every token takes."""
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
        workspace: Workspace,
    ) -> ScreenCounts:  # fmt: skip
        """Write every scored row's top-k positions, ascending, -1 where fewer count; ties go to the lower one.

        `workspace` has room for the scores, for a backend that writes them down.
        """
        ...

    def sparse_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor, scale: float,
        out_THR: Tensor, context_LX: Tensor | None,
    ) -> None:  # fmt: skip
        """Attention of rows over their selected positions, read from the pages or from a gathered context."""
        ...

    def dense_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, first_position: int, scale: float,
        out_THR: Tensor,
    ) -> None:  # fmt: skip
        """Causal attention: row i sits at `first_position + i` and attends to all positions up to it."""
        ...

    def gather_rows(self, cache: LatentCache, request: RequestRows, out_LX: Tensor) -> None:
        """A request's whole context, decoded."""
        ...
