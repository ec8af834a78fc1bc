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

from longfill.kernels import cpu
from longfill.kernels.interface import IndexCache, IndexChunks, LatentCache, RequestRows, StepRows
from longfill.kernels.reference import indexer as reference
from longfill.kernels.reference.attention import dense_mla, gather_rows, sparse_mla
from longfill.kernels.select import KernelChoice
from longfill.kernels.workspace import Workspace


class Attend:
    """Attention of one model over its caches; holds the current step's selection."""

    def __init__(self, kernels: KernelChoice, workspace: Workspace, softmax_scale: float, *, num_threads: int) -> None:
        self.kernels = kernels
        self.workspace = workspace
        self.scale = softmax_scale
        self.num_threads = num_threads
        self._selection_TK = torch.empty(0, 0, dtype=torch.int32)

    def select(self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, rows: StepRows) -> Tensor:
        """int32 [T, K]: score the rows that need it; the others select their whole causal range."""
        assert self.kernels.topk is not None
        self._selection_TK = self.workspace.selection(q_TID.shape[0], self.kernels.topk)
        self._selection_TK.fill_(-1)
        for request, dense in zip(rows.requests, rows.dense_rows, strict=True):
            if dense:
                self._select_all(request, dense)
        self._score(q_TID, w_TI, cache, rows.index_chunks)
        return self._selection_TK

    def _score(self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, chunks: IndexChunks) -> None:
        if self.kernels.native_index:
            cpu.index_topk(q_TID, w_TI, cache, chunks, self._selection_TK, num_threads=self.num_threads)
        else:
            reference.index_topk(q_TID, w_TI, cache, chunks, self._selection_TK, self.workspace)

    def _select_all(self, request: RequestRows, dense: int) -> None:
        columns_K = torch.arange(min(request.start + dense, self._selection_TK.shape[1]), dtype=torch.int32)
        positions_T = torch.arange(request.start, request.start + dense)[:, None]
        chosen = torch.where(columns_K <= positions_T, columns_K, -1)
        self._selection_TK[request.first_row : request.first_row + dense, : columns_K.numel()] = chosen

    def __call__(self, q_THX: Tensor, cache: LatentCache, rows: StepRows) -> Tensor:
        """fp32 [T, H, R]: every row's attention over the current selection or its causal range."""
        out_THR = torch.empty(*q_THX.shape[:2], cache.rank, dtype=torch.float32)
        for request, dense in zip(rows.requests, rows.dense_rows, strict=True):
            if dense and not self.kernels.force_mqa:
                span = slice(request.first_row, request.first_row + dense)
                out_THR[span], _ = dense_mla(q_THX[span], cache, request, request.start, self.scale)
            elif dense:
                self._sparse(q_THX, cache, request, 0, dense, None, out_THR)
        for chunk in rows.workspace_chunks:
            contexts = self._gather(cache, [rows.requests[i] for i in chunk])
            for i, context_LX in zip(chunk, contexts, strict=True):
                request, dense = rows.requests[i], rows.dense_rows[i]
                self._sparse(q_THX, cache, request, dense, request.query_len, context_LX, out_THR)
        return out_THR

    def _sparse(
        self, q_THX: Tensor, cache: LatentCache, request: RequestRows, first: int, last: int,
        context_LX: Tensor | None, out_THR: Tensor,
    ) -> None:  # fmt: skip
        span = slice(request.first_row + first, request.first_row + last)
        selection_TK = self._selection_TK[span]
        out_THR[span] = sparse_mla(q_THX[span], cache, request, selection_TK, self.scale, context_LX)

    def _gather(self, cache: LatentCache, requests: list[RequestRows]) -> list[Tensor] | list[None]:
        """Each request's context in the workspace, or None each when pages are read directly."""
        if not self.kernels.use_workspace:
            return [None] * len(requests)
        dtype = torch.float32 if cache.format == "float32" else torch.bfloat16
        lengths = [request.seq_len for request in requests]
        space = self.workspace.context(sum(lengths), cache.rank + cache.rope_dim, dtype)
        contexts = list(torch.split(space, lengths))
        for request, context_LX in zip(requests, contexts, strict=True):
            gather_rows(cache, request, context_LX)
        return contexts
