"""The torch reference as a `Backend`: weights as stored, every operation by its definition.

May import torch and the reference's files. Invariant: nothing is decided here but which function defines an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

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
from longfill.kernels.reference import attention, indexer, linear, store, topk
from longfill.kernels.reference.quant import quantise_index_queries
from longfill.kernels.workspace import Workspace


@dataclass(frozen=True)
class StoredHeads:
    """One matrix a head: [H, A, B], a view of what was given."""

    weight_HAB: Tensor

    @property
    def num_heads(self) -> int:
        return self.weight_HAB.shape[0]

    @property
    def in_size(self) -> int:
        return self.weight_HAB.shape[1]

    @property
    def out_size(self) -> int:
        return self.weight_HAB.shape[2]


class ReferenceBackend:
    """Weights that it is given back were made by its own `pack` and `pack_heads`."""

    copies = False

    def packed_bytes(self, out_size: int, in_size: int, dtype: torch.dtype) -> int:
        return out_size * in_size * dtype.itemsize

    def pack(self, weight: StoredLinear) -> StoredLinear:
        return weight

    def pack_mlp(self, weights: StoredMlp) -> StoredMlp:
        return weights

    def pack_heads(self, weight_HAB: Tensor) -> StoredHeads:
        return StoredHeads(weight_HAB)

    def linear(
        self, x_TC: Tensor, weight: Linear, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        wanted = dtype if out is None else out.dtype
        result_TO = linear.linear(x_TC, cast(StoredLinear, weight), wanted)
        return result_TO if out is None else out.copy_(result_TO)

    def per_head(self, x_THA: Tensor, heads: Heads, out_THB: Tensor) -> None:
        weight_HAB = cast(StoredHeads, heads).weight_HAB
        out_THB.copy_(linear.per_head(x_THA.to(weight_HAB.dtype), weight_HAB))

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return linear.rms_norm(x_TC, weight_C, eps)

    def mlp(self, x_TC: Tensor, weights: Mlp, *, dtype: torch.dtype | None = None) -> Tensor:
        return linear.mlp(x_TC, cast(StoredMlp, weights), dtype)

    def route(self, x_TC: Tensor, router: Linear, bias_E: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
        return linear.route(x_TC, cast(StoredLinear, router).weight, bias_E, choice)

    def experts(
        self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Sequence[Mlp], shared: Mlp | None, *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        stored = cast(Sequence[StoredMlp], experts)
        return linear.experts(x_TC, ids_TK, weights_TK, stored, cast(StoredMlp | None, shared), dtype)

    def fold_experts(
        self, y_SC: Tensor, slots_TK: Tensor, weights_TK: Tensor, shared_TC: Tensor | None, *, dtype: torch.dtype
    ) -> Tensor:
        return linear.fold_experts(y_SC, slots_TK, weights_TK, shared_TC, dtype)

    def rotate(self, x_THP: Tensor, cos_TF: Tensor, sin_TF: Tensor, out_THP: Tensor, *, interleaved: bool) -> None:
        out_THP.copy_(store.rotate(x_THP, cos_TF, sin_TF, interleaved))

    def store_latent(
        self, kv_TX: Tensor, norm_R: Tensor, eps: float, cos_TF: Tensor, sin_TF: Tensor, cache: LatentCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        store.store_latent(kv_TX, norm_R, eps, cos_TF, sin_TF, cache, slots_T, interleaved=interleaved)

    def store_index_keys(
        self, k_TD: Tensor, norm: tuple[Tensor, Tensor], cos_TF: Tensor, sin_TF: Tensor, cache: IndexCache,
        slots_T: Tensor, *, interleaved: bool,
    ) -> None:  # fmt: skip
        store.store_index_keys(k_TD, norm, cos_TF, sin_TF, cache, slots_T, interleaved=interleaved)

    def put_rows(self, rows_SX: Tensor, order_K: Tensor, cache_NBX: Tensor, slots_K: Tensor) -> None:
        store.put_rows(rows_SX, order_K, cache_NBX, slots_K)

    def index_queries(
        self, q_TJ: Tensor, w_TI: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool, quantise: bool,
        w_scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        w_TI, rope_dim = w_TI * w_scale, 2 * cos_TF.shape[-1]
        q_TID = q_TJ.float().view(*w_TI.shape, q_TJ.shape[1] // w_TI.shape[1])
        rotated_TIP = store.rotate(q_TID[..., :rope_dim], cos_TF, sin_TF, interleaved)
        q_TID = torch.cat([rotated_TIP, q_TID[..., rope_dim:]], -1)
        return quantise_index_queries(q_TID, w_TI) if quantise else (q_TID, w_TI)

    def index_topk(
        self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, chunks: IndexChunks, selection_TK: Tensor,
        workspace: Workspace, *, scores_TK: Tensor | None = None,
    ) -> ScreenCounts:  # fmt: skip
        indexer.index_topk(q_TID, w_TI, cache, chunks, selection_TK, workspace, scores_TK)
        return ScreenCounts()

    def merge_topk(self, scores_TN: Tensor, positions_TN: Tensor, selection_TK: Tensor) -> None:
        selection_TK.copy_(topk.merge_topk(scores_TN, positions_TN, selection_TK.shape[1]))

    def sparse_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor, scale: float,
        out_THR: Tensor, context_LX: Tensor | None, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        out, lse = attention.sparse_mla(q_THX, cache, request, selection_TK, scale, context_LX)
        out_THR.copy_(out)
        if lse_TH is not None:
            lse_TH.copy_(lse)

    def dense_mla(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, visible_T: Tensor, scale: float,
        out_THR: Tensor, lse_TH: Tensor | None = None,
    ) -> None:  # fmt: skip
        out, lse = attention.dense_mla(q_THX, cache, request, visible_T, scale)
        out_THR.copy_(out)
        if lse_TH is not None:
            lse_TH.copy_(lse)

    def gather_rows(self, cache: LatentCache, request: RequestRows, out_LX: Tensor) -> None:
        attention.gather_rows(cache, request, out_LX)
