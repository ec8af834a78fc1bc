"""Which attention form runs for which row, and the selection that full-indexer layers leave for shared ones.

May import kernels. Invariant: a row's form is a function of its position and the configuration, never of its batch.

- A row whose causal range is no longer than top-k selects everything: it is not scored and runs as dense attention
  (as sparse attention over all its positions with `force_mqa`).
- Any other row runs over its selected positions, read from the pages or from a gathered bf16 workspace.
- A model without an indexer runs every row dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import IndexCache, LatentCache, RequestRows, ScreenCounts, StepRows
from longfill.kernels.select import KernelChoice
from longfill.kernels.workspace import Workspace


class Attend:
    """Attention of one model over its caches; holds the current step's selection.

    `span`: the place of a block of rows in the step, whose tensors are given for those rows alone.
    """

    def __init__(
        self, kernels: KernelChoice, backend: Backend, index_backend: Backend, workspace: Workspace,
        softmax_scale: float,
    ) -> None:  # fmt: skip
        self.kernels = kernels
        self.backend = backend
        self.index_backend = index_backend
        self.workspace = workspace
        self.scale = softmax_scale
        self.selection_TK = torch.empty(0, 0, dtype=torch.int32)

    def begin(self, num_rows: int) -> None:
        """Start a step of so many rows: no layer has selected for any."""
        if self.kernels.topk is not None:
            self.selection_TK = self.workspace.selection(num_rows, self.kernels.topk)

    def select(self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, block: StepRows, span: slice) -> ScreenCounts:
        """Fill the block's rows of `selection_TK`: rows that need it are scored, others select their causal range."""
        selection_TK = self.selection_TK[span]
        for request, dense in zip(block.requests, block.dense_rows, strict=True):
            if dense:
                _select_all(selection_TK, request, dense)
        return self.index_backend.index_topk(q_TID, w_TI, cache, block.index_chunks, selection_TK, self.workspace)

    def __call__(self, q_THX: Tensor, cache: LatentCache, block: StepRows, span: slice, out_THR: Tensor) -> None:
        """Fill `out_THR` [T, H, R] with every row's attention over the current selection or its causal range."""
        selection_TK = self.selection_TK[span]

        def sparse(request: RequestRows, first: int, last: int, context_LX: Tensor | None) -> None:
            at = slice(request.first_row + first, request.first_row + last)
            self.backend.sparse_mla(
                q_THX[at], cache, request, selection_TK[at], self.scale, out_THR[at], context_LX
            )  # fmt: skip

        for request, dense in zip(block.requests, block.dense_rows, strict=True):
            if dense and not self.kernels.force_mqa:
                at = slice(request.first_row, request.first_row + dense)
                self.backend.dense_mla(q_THX[at], cache, request, request.start, self.scale, out_THR[at])
            elif dense:
                sparse(request, 0, dense, None)
        for chunk in block.workspace_chunks:
            requests = [block.requests[i] for i in chunk]
            for i, context_LX in zip(chunk, self._gather(cache, requests), strict=True):
                sparse(block.requests[i], block.dense_rows[i], block.requests[i].query_len, context_LX)

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


def _select_all(selection_TK: Tensor, request: RequestRows, dense: int) -> None:
    """The first `dense` rows of a request select every position up to their own."""
    columns_K = torch.arange(selection_TK.shape[1], dtype=torch.int32)
    positions_T = torch.arange(request.start, request.start + dense)[:, None]
    selection_TK[request.first_row : request.first_row + dense] = torch.where(columns_K <= positions_T, columns_K, -1)
