"""Which attention form runs for which row, and the selection that full-indexer layers leave for shared ones.

May import kernels. Invariant: a row's form is a function of its position and the configuration, never of its batch.

- A row whose causal range is no longer than top-k selects everything: it is not scored and runs as dense attention
  (as sparse attention over all its positions with `force_mqa`).
- Any other row runs over its selected positions, read from the pages or from a gathered bf16 workspace.
- A model without an indexer runs every row dense.
- With `slices` every row of a model with an indexer runs over its selected positions, slice by slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import IndexCache, LatentCache, RequestRows, ScreenCounts, StepRows
from longfill.kernels.select import KernelChoice
from longfill.kernels.workspace import Workspace
from longfill.models.key_slices import KeySlices, PartialAttention, merge_parts


class Attend:
    """Attention of one model over its caches; holds the current step's selection.

    `span`: the place of a block of rows in the step, whose tensors are given for those rows alone.
    """

    def __init__(
        self, kernels: KernelChoice, backend: Backend, index_backend: Backend, workspace: Workspace,
        softmax_scale: float, slices: KeySlices | None = None,
    ) -> None:  # fmt: skip
        self.kernels = kernels
        self.backend = backend
        self.index_backend = index_backend
        self.workspace = workspace
        self.scale = softmax_scale
        self.slices = slices if kernels.topk is not None else None
        self.selection_TK = torch.empty(0, 0, dtype=torch.int32)

    def begin(self, num_rows: int) -> None:
        """Start a step of so many rows: no layer has selected for any."""
        if self.kernels.topk is not None:
            self.selection_TK = self.workspace.selection(num_rows, self.kernels.topk)

    def select(self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, block: StepRows, span: slice) -> ScreenCounts:
        """Fill the block's rows of `selection_TK`: rows that need it are scored, others select their causal range."""
        self.select_dense(block, span)
        chunks = block.index_chunks
        return self.index_backend.index_topk(q_TID, w_TI, cache, chunks, self.selection_TK[span], self.workspace)

    def select_dense(self, block: StepRows, span: slice) -> None:
        """Let the rows that are not scored select every position up to their own."""
        selection_TK = self.selection_TK[span]
        columns_K = torch.arange(selection_TK.shape[1], dtype=torch.int32)
        for request, dense in zip(block.requests, block.dense_rows, strict=True):
            if dense:
                at = slice(request.first_row, request.first_row + dense)
                positions_T1 = block.positions_T[at, None]
                selection_TK[at] = torch.where(columns_K <= positions_T1, columns_K, -1)

    def __call__(self, q_THX: Tensor, cache: LatentCache, block: StepRows, span: slice, out_THR: Tensor) -> None:
        """Fill `out_THR` [T, H, R] with every row's attention over the current selection or its causal range."""
        selection_TK = self.selection_TK[span]
        dense_form = not self.kernels.force_mqa and self.slices is None

        def sparse(request: RequestRows, first: int, last: int, context_LX: Tensor | None) -> None:
            at = slice(request.first_row + first, request.first_row + last)
            self._sparse(q_THX[at], cache, request, selection_TK[at], out_THR[at], context_LX)

        for request, dense in zip(block.requests, block.dense_rows, strict=True):
            if dense and dense_form:
                at = slice(request.first_row, request.first_row + dense)
                self.backend.dense_mla(q_THX[at], cache, request, request.visible(0, dense), self.scale, out_THR[at])
            elif dense:
                sparse(request, 0, dense, None)
        for chunk in block.workspace_chunks:
            requests = [block.requests[i] for i in chunk]
            for i, context_LX in zip(chunk, self._gather(cache, requests), strict=True):
                sparse(block.requests[i], block.dense_rows[i], block.requests[i].query_len, context_LX)

    def _sparse(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor, out_THR: Tensor,
        context_LX: Tensor | None,
    ) -> None:  # fmt: skip
        if self.slices is None:
            self.backend.sparse_mla(q_THX, cache, request, selection_TK, self.scale, out_THR, context_LX)
            return
        parts = (self.part(q_THX, cache, request, own, context_LX) for own in self.slices.split(selection_TK))
        out_THR.copy_(merge_parts(list(parts))[0])

    def part(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor,
        context_LX: Tensor | None = None,
    ) -> PartialAttention:  # fmt: skip
        """Attention over some of a row's keys: fp32 [T, H, R] and its log-sum-exp [T, H]."""
        out_THR = torch.empty(*q_THX.shape[:2], cache.rank)
        lse_TH = torch.empty(q_THX.shape[:2])
        self.backend.sparse_mla(
            q_THX, cache, request, selection_TK, self.scale, out_THR, context_LX, lse_TH=lse_TH
        )  # fmt: skip
        return out_THR, lse_TH

    def _gather(self, cache: LatentCache, requests: list[RequestRows]) -> list[Tensor] | list[None]:
        """Each request's context in the workspace, or None each when pages are read directly."""
        if not self.kernels.use_workspace:
            return [None] * len(requests)
        dtype = torch.float32 if cache.format == "float32" else torch.bfloat16
        lengths = [request.seq_len for request in requests]
        space = self.workspace.context(sum(lengths), cache.rank + cache.rope_dim, dtype)
        contexts = list(torch.split(space, lengths))
        for request, context_LX in zip(requests, contexts, strict=True):
            self.backend.gather_rows(cache, request, context_LX)
        return contexts
