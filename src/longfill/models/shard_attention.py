"""Attention of rows whose keys lie on several ranks (decode context parallelism): each rank over its own, then merged.

May import kernels, `parallel` and models' attention. Invariant: the selection is global and exact, the same on every
rank, and a rank without a key of a row adds nothing to it.

The ranks of a DCP group attend for the same rows. Where they hold different heads, the queries of all are brought
together first; each rank attends with them over its own keys, and every rank gets the parts of the heads that are its
own: by all-to-all (`a2a`), merged there, or (`ag_rs`) weighed with the log-sum-exp of all before a reduce-scatter.

Suffixes: h heads of this rank · H heads brought together · W ranks of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.interface import IndexCache, LatentCache, RequestRows, ScreenCounts, StepRows
from longfill.kernels.reference.elementwise import logaddexp
from longfill.models.attention import Attend
from longfill.models.key_slices import KeySlices, PartialAttention, merge_parts
from longfill.parallel.group import Group
from longfill.parallel.mesh import Mesh


class ShardAttend:
    """Attention over this rank's share of the keys and the others'; the selection is that of `attend`."""

    def __init__(self, attend: Attend, mesh: Mesh, slices: KeySlices, backend: str) -> None:
        self._attend = attend
        self._group = mesh.dcp
        self._slices = slices
        self._reduces = backend == "ag_rs"
        self._head_group = _head_group(mesh)
        heads = 1 if self._head_group is None else self._head_group.size
        self._head_blocks = [rank % mesh.shape.tp % heads for rank in mesh.dcp.ranks]
        """Of each rank of the group: which of the blocks of h heads are its own."""

    def select(self, q_TID: Tensor, w_TI: Tensor, cache: IndexCache, block: StepRows, span: slice) -> ScreenCounts:
        """As `Attend.select`, over all ranks' keys: each one's best candidates, and the best of those."""
        attend = self._attend
        selection_TK = attend.selection_TK[span]
        local_TK = torch.full_like(selection_TK, -1)
        scores_TK = torch.full(selection_TK.shape, float("-inf"))
        counts = attend.index_backend.index_topk(
            q_TID, w_TI, cache, block.index_chunks, local_TK, attend.workspace, scores_TK=scores_TK
        )  # fmt: skip
        found = torch.stack([scores_TK.view(torch.int32), self._slices.everywhere(local_TK)], 1)
        num_rows, _, topk = found.shape
        every = self._group.gather_rows("index_candidates", found, [num_rows] * self._group.size)
        per_row = every.view(self._group.size, num_rows, 2, topk).permute(2, 1, 0, 3).reshape(2, num_rows, -1)
        attend.index_backend.merge_topk(per_row[0].view(torch.float32), per_row[1], selection_TK)
        attend.select_dense(block, span)
        return counts

    def __call__(self, q_ThX: Tensor, cache: LatentCache, block: StepRows, span: slice, out_ThR: Tensor) -> None:
        """Fill `out_ThR` [T, h, R] for this rank's heads."""
        q_THX = self._all_heads(q_ThX)
        out_THR = torch.zeros(*q_THX.shape[:2], cache.rank)
        lse_TH = torch.full(q_THX.shape[:2], float("-inf"))
        for request in block.requests:
            at = slice(request.first_row, request.first_row + request.query_len)
            out_THR[at], lse_TH[at] = self._part(
                q_THX[at], cache, request, slice(span.start + at.start, span.start + at.stop)
            )
        merged_hTR = self._reduce(out_THR, lse_TH) if self._reduces else self._exchange(out_THR, lse_TH)
        out_ThR.copy_(merged_hTR.transpose(0, 1))

    def _part(self, q_THX: Tensor, cache: LatentCache, request: RequestRows, span: slice) -> PartialAttention:
        """One request's rows over this rank's keys."""
        attend = self._attend
        if attend.kernels.topk is not None:
            parts = [attend.part(q_THX, cache, request, own) for own in self._slices.split(attend.selection_TK[span])]
            return merge_parts(parts)
        out_THR, lse_TH = torch.empty(*q_THX.shape[:2], cache.rank), torch.empty(q_THX.shape[:2])
        visible_T = request.visible(0, request.query_len)
        attend.backend.dense_mla(q_THX, cache, request, visible_T, attend.scale, out_THR, lse_TH=lse_TH)
        return out_THR, lse_TH

    def _all_heads(self, q_ThX: Tensor) -> Tensor:
        if self._head_group is None:
            return q_ThX
        heads = q_ThX.shape[1]
        q_hTX = q_ThX.transpose(0, 1).contiguous()
        every = self._head_group.gather_rows("dcp_queries", q_hTX, [heads] * self._head_group.size)
        return every.transpose(0, 1)

    def _for_each(self, part_HT: Tensor) -> Tensor:
        """[W h, T, ...]: the heads of every rank of the group, one after the other."""
        if self._head_blocks == list(range(len(self._head_blocks))):
            return part_HT
        heads = part_HT.shape[0] // (max(self._head_blocks) + 1)
        return torch.cat([part_HT[block * heads : (block + 1) * heads] for block in self._head_blocks])

    def _exchange(self, out_THR: Tensor, lse_TH: Tensor) -> Tensor:
        """fp32 [h, T, R] of this rank's heads, from every rank's part of them."""
        parts = self._for_each(torch.cat([out_THR, lse_TH[..., None]], -1).transpose(0, 1))
        heads = parts.shape[0] // self._group.size
        each = [heads] * self._group.size
        received = self._group.exchange_rows("dcp_parts", parts, each, each).view(
            self._group.size, heads, *parts.shape[1:]
        )
        merged, _ = merge_parts([(part[..., :-1].contiguous(), part[..., -1].contiguous()) for part in received])
        return merged

    def _reduce(self, out_THR: Tensor, lse_TH: Tensor) -> Tensor:
        """The same, weighed before they are sent."""
        lse_HT = lse_TH.transpose(0, 1).contiguous()
        every = self._group.gather_rows("dcp_lse", lse_HT, [lse_HT.shape[0]] * self._group.size)
        parts = every.view(self._group.size, *lse_HT.shape)
        total_HT = parts[0]
        for part in parts[1:]:
            total_HT = logaddexp(total_HT, part)
        settled = torch.where(total_HT == float("-inf"), 0.0, total_HT)
        weighed_HTR = out_THR.transpose(0, 1) * (lse_HT - settled).exp()[..., None]
        spread = self._for_each(weighed_HTR)
        return self._group.sum_rows("dcp_parts", spread, [spread.shape[0] // self._group.size] * self._group.size)


def _head_group(mesh: Mesh) -> Group | None:
    """The ranks of a DCP group that hold different heads; None where all hold the same."""
    if mesh.shape.pcp == 1:
        return mesh.dcp
    return mesh.tp if mesh.shape.dcp > mesh.shape.pcp and mesh.shape.tp > 1 else None
