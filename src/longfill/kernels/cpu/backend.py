"""The native kernels as a `Backend`: packed weights, and every operation in native code.

May import torch and this folder's files. Invariant: nothing is decided here; every call is one native call on the
process's instruction set and the given number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from longfill.kernels.cpu import attention, experts, indexer, linear, packing, rows
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


class NativeBackend:
    """Weights that it is given back were made by its own `pack` and `pack_heads`."""

    copies = True

    def __init__(self, dtype: torch.dtype, num_threads: int, screen: str = "auto") -> None:
        """`dtype` is the model's: what products with fp8 weights compute in. `screen`: of `index_topk`."""
        self.dtype = dtype
        self.screen = screen
        self.num_threads = num_threads

    def packed_bytes(self, out_size: int, in_size: int, dtype: torch.dtype) -> int:
        size = packing.packed_bytes(out_size, in_size, dtype, compute_dtype=self._compute_dtype(dtype))
        return -(-size // packing.ALIGNMENT) * packing.ALIGNMENT

    def pack(self, weight: StoredLinear) -> packing.PackedLinear:
        dtype = self._compute_dtype(weight.weight.dtype)
        return packing.pack_linear(weight, compute_dtype=dtype, num_threads=self.num_threads)

    def pack_mlp(self, weights: StoredMlp) -> packing.PackedMlp:
        return packing.PackedMlp(self.pack(weights.gate), self.pack(weights.up), self.pack(weights.down))

    def pack_heads(self, weight_HAB: Tensor) -> packing.PackedHeads:
        dtype = self._compute_dtype(weight_HAB.dtype)
        return packing.pack_heads(weight_HAB, compute_dtype=dtype, num_threads=self.num_threads)

    def _compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Float32 weights are float32 for a reason."""
        return torch.float32 if stored == torch.float32 else self.dtype

    def linear(
        self, x_TC: Tensor, weight: Linear, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out is None and dtype is not None:
            out = x_TC.new_empty(x_TC.shape[0], weight.out_size, dtype=dtype)
        packed = cast(packing.PackedLinear, weight)
        return linear.linear(x_TC, packed, num_threads=self.num_threads, out=out)

    def per_head(self, x_THA: Tensor, heads: Heads, out_THB: Tensor) -> None:
        linear.per_head(x_THA, cast(packing.PackedHeads, heads), out_THB, num_threads=self.num_threads)

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x_TC, weight_C, eps, num_threads=self.num_threads)

    def mlp(self, x_TC: Tensor, weights: Mlp, *, dtype: torch.dtype | None = None) -> Tensor:
        return linear.mlp(x_TC, cast(packing.PackedMlp, weights), dtype=dtype, num_threads=self.num_threads)

    def route(self, x_TC: Tensor, router: Linear, bias_E: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        packed = cast(packing.PackedLinear, router)
        return experts.route(x_TC, packed, bias_E, choice, num_threads=self.num_threads)

    def experts(
        self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts_: Sequence[Mlp], shared: Mlp | None, *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        return experts.experts(
            x_TC, ids_TK, weights_TK, cast(Sequence[packing.PackedMlp], experts_),
            cast(packing.PackedMlp | None, shared), dtype=dtype, num_threads=self.num_threads,
        )  # fmt: skip

    def fold_experts(
        self, y_SC: Tensor, slots_TK: Tensor, weights_TK: Tensor, shared_TC: Tensor | None, *, dtype: torch.dtype
    ) -> Tensor:
        return experts.fold_experts(y_SC, slots_TK, weights_TK, shared_TC, dtype=dtype, num_threads=self.num_threads)

    def rotate(self, x_THP: Tensor, cos_TF: Tensor, sin_TF: Tensor, out_THP: Tensor, *, interleaved: bool) -> None:
        rows.rotate(x_THP, cos_TF, sin_TF, interleaved, out_THP, num_threads=self.num_threads)

    def store_latent(
        self, kv_TX: Tensor, norm_R: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, cache: LatentCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        rows.store_latent(
            kv_TX, norm_R, eps, cos_TF, sin_TF, cache, slots_T, interleaved=interleaved, num_threads=self.num_threads
        )

    def store_index_keys(
        self, k_TD: Tensor, norm: tuple[Tensor, Tensor], cos_TF: Tensor, sin_TF: Tensor, cache: IndexCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        rows.store_index_keys(
            k_TD, norm, cos_TF, sin_TF, cache, slots_T, interleaved=interleaved, num_threads=self.num_threads
        )

    def put_rows(self, rows_SX: Tensor, order_K: Tensor, cache_NBX: Tensor, slots_K: Tensor) -> None:
        rows.put_rows(rows_SX, order_K, cache_NBX, slots_K, num_threads=self.num_threads)

    def index_queries(
        self, q_TJ: Tensor, w_TI: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool, quantise: bool,
        w_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return rows.index_queries(
            q_TJ, w_TI, cos_TF, sin_TF,
            interleaved=interleaved, quantise=quantise, w_scale=w_scale, num_threads=self.num_threads,
        )  # fmt: skip

    def index_topk(
        self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, chunks: IndexChunks, selection_TK: Tensor,
        workspace: Workspace, *, scores_TK: Tensor | None = None,
    ) -> ScreenCounts:  # fmt: skip
        del workspace  # scores stream through registers
        return indexer.index_topk(
            q_TID, w_TI, cache, chunks, selection_TK,
            num_threads=self.num_threads, scores_TK=scores_TK, screen=self.screen,
        )  # fmt: skip

    def merge_topk(self, scores_TN: Tensor, positions_TN: Tensor, selection_TK: Tensor) -> None:
        indexer.merge_topk(scores_TN, positions_TN, selection_TK, num_threads=self.num_threads)

    def sparse_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor, scale: float,
        out_THR: Tensor, context_LX: Tensor | None, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        attention.sparse_mla(
            q_THX, cache, request, selection_TK, scale, out_THR,
            context_LX=context_LX, lse_TH=lse_TH, num_threads=self.num_threads,
        )  # fmt: skip

    def dense_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, visible_T: Tensor, scale: float,
        out_THR: Tensor, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        attention.dense_mla(
            q_THX, cache, request, visible_T, scale, out_THR, lse_TH=lse_TH, num_threads=self.num_threads
        )

    def gather_rows(self, cache: LatentCache, request: RequestRows, out_LX: Tensor) -> None:
        attention.gather_rows(cache, request, out_LX, num_threads=self.num_threads)
