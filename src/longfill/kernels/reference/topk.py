"""Exact top-k: highest scores, ties to the lower position, positions ascending, -1 where fewer are valid.

May import torch. Invariant: a row's selection is a function of that row's scores alone; NaN and -inf are never chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONG_ROW = 8192
"""Rows longer than this are pruned in wide blocks, whose maxima torch finds fastest."""


def select_topk(scores_TL: Tensor, topk: int) -> Tensor:
    """int32 [T, K] positions of each row's top-k scores. `scores_TL` (fp32 [T, L]) may be overwritten."""
    torch.nan_to_num(scores_TL, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"), out=scores_TL)
    return _choose(scores_TL, topk).to(torch.int32)


def merge_topk(scores_TN: Tensor, positions_TN: Tensor, topk: int) -> Tensor:
    """int32 [T, K] positions of each row's top-k candidates: fp32 scores beside int32 positions, -1 for none.

    Positions may come in any order; none appears twice.
    """
    if positions_TN.shape[1] == 0:
        return torch.full((positions_TN.shape[0], topk), -1, dtype=torch.int32)
    order_TN = positions_TN.argsort(-1)
    scores_TN = scores_TN.masked_fill(positions_TN < 0, float("-inf")).gather(1, order_TN)
    columns_TK = select_topk(scores_TN, topk)
    chosen_TK = order_TN.gather(1, columns_TK.clamp(min=0).long())
    return positions_TN.gather(1, chosen_TK).masked_fill_(columns_TK < 0, -1)


def _choose(scores_TL: Tensor, topk: int) -> Tensor:
    """int64 [T, K] columns of the top-k, ascending, -1 padded. Long rows are pruned by the maxima of their blocks.

    Every top-k element lies in one of the k blocks with the largest maxima (ties between blocks to the lower one): each
    block that beats or precedes its own holds at least one element that is better, or equal and earlier.
    """
    num_rows, length = scores_TL.shape
    block = 32 if length > LONG_ROW else 8
    if length <= 2 * topk * block:
        return _choose_directly(scores_TL, topk)
    whole = length // block * block
    blocks_TNB = scores_TL[:, :whole].view(num_rows, whole // block, block)
    chosen_TK = _choose(blocks_TNB.amax(-1), topk)
    missing_TK = chosen_TK < 0
    chosen_TK = chosen_TK.clamp(min=0)
    kept_TKB = blocks_TNB.gather(1, chosen_TK[..., None].expand(-1, -1, block))
    if missing_TK.any():  # fewer than k blocks are above -inf: the padding must not repeat block 0
        kept_TKB.masked_fill_(missing_TK[..., None], float("-inf"))
    candidates = torch.cat([kept_TKB.flatten(1), scores_TL[:, whole:]], 1)
    columns_TK = _choose(candidates, topk)
    in_block = chosen_TK.gather(1, (columns_TK // block).clamp(0, topk - 1)) * block + columns_TK % block
    positions = torch.where(columns_TK < topk * block, in_block, columns_TK - topk * block + whole)
    return torch.where(columns_TK < 0, -1, positions)


def _choose_directly(scores_TL: Tensor, topk: int) -> Tensor:
    """The same without pruning: everything above the k-th value, then the first of its equals."""
    num_rows, length = scores_TL.shape
    k = min(topk, length)
    out = torch.full((num_rows, topk), -1, dtype=torch.int64)
    if k == 0:
        return out
    kth_T1 = scores_TL.topk(k, dim=-1, sorted=True).values[:, -1:]
    above = scores_TL > kth_T1
    ties = (scores_TL == kth_T1) & (kth_T1 > float("-inf"))
    room_T1 = k - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room_T1))
    rows, columns = chosen.nonzero(as_tuple=True)
    counts_T = chosen.sum(-1)
    first_T = counts_T.cumsum(0) - counts_T
    out[rows, torch.arange(rows.numel()) - first_T[rows]] = columns
    return out
