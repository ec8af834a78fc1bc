"""The lightning indexer: `sum over heads of w_h relu(q_h . k)` over a row's causal range, then exact top-k.

May import torch. Invariant: transient memory is the reserved logits and score tiles, whatever the context.

Source of the formula: DeepSeek-V3.2-Exp technical report, section 2.1. The scores of a q-chunk are materialised in the
reserved logits buffer; keys are decoded tile by tile, so nothing here grows with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.interface import IndexCache, IndexChunks, ScoredRows
from longfill.kernels.reference.linear import pad_rows
from longfill.kernels.reference.topk import select_topk
from longfill.kernels.workspace import KEY_STEP, KEY_TILE, ROW_TILE, SELECT_TILE, Workspace


def index_topk(
    q_TID: Tensor,
    w_TI: Tensor,
    cache: IndexCache,
    chunks: IndexChunks,
    selection_TK: Tensor,
    workspace: Workspace,
    scores_TK: Tensor | None = None,
) -> None:
    """Write the selected positions of every scored row into `selection_TK` (int32 [T, K], in place).

    `q_TID`: fp32 [T, I, D] as quantised for the cache's format; `w_TI`: fp32 [T, I] head weights with all scales
    folded in. Keys already include this step's rows. `scores_TK`, if given, receives the fp32 scores of the selected
    positions, -inf in the padding.
    """
    topk = selection_TK.shape[1]
    for chunk in chunks:
        for rows in chunk:
            logits_ML = score_rows(q_TID, w_TI, cache, rows, workspace)
            step = max(1, SELECT_TILE // max(1, logits_ML.shape[1]))
            for first in range(0, rows.num_rows, step):
                last = min(first + step, rows.num_rows)
                at = slice(rows.first_row + first, rows.first_row + last)
                selection_TK[at] = select_topk(logits_ML[first:last], topk)
                if scores_TK is not None:
                    scores_TK[at] = _scores_at(logits_ML[first:last], selection_TK[at])


def _scores_at(logits_ML: Tensor, selection_MK: Tensor) -> Tensor:
    """fp32 [M, K]: the scores of the selected positions, -inf where there is none."""
    if logits_ML.shape[1] == 0:
        return torch.full(selection_MK.shape, float("-inf"))
    scores_MK = logits_ML.gather(1, selection_MK.clamp(min=0).long())
    return scores_MK.masked_fill_(selection_MK < 0, float("-inf"))


def score_rows(q_TID: Tensor, w_TI: Tensor, cache: IndexCache, rows: ScoredRows, workspace: Workspace) -> Tensor:
    """fp32 [M, L] scores of one request's rows over the keys that the last one sees, -inf beyond what each sees."""
    visible_M = rows.visible(0, rows.num_rows)
    num_keys = int(visible_M[-1]) if rows.num_rows else 0
    logits_ML = workspace.logits(rows.num_rows, num_keys)
    pages = rows.request.pages
    for first_key in range(0, num_keys, KEY_TILE):
        keys_LD = _pad_keys(decode_index_keys(cache, pages, first_key, min(first_key + KEY_TILE, num_keys)))
        for first in range(0, rows.num_rows, ROW_TILE):
            height = min(ROW_TILE, rows.num_rows - first)
            span = slice(rows.first_row + first, rows.first_row + first + height)
            tile_ML = logits_ML[first : first + height, first_key : first_key + KEY_TILE]
            _score_tile(q_TID[span], w_TI[span], keys_LD, tile_ML, workspace)
    _mask_unseen(logits_ML, visible_M)
    return logits_ML


def _pad_keys(keys_LD: Tensor) -> Tensor:
    """`keys_LD` with zero keys appended up to a multiple of KEY_STEP."""
    missing = -keys_LD.shape[0] % KEY_STEP
    return torch.cat([keys_LD, keys_LD.new_zeros(missing, keys_LD.shape[1])]) if missing else keys_LD


def _score_tile(q_MID: Tensor, w_MI: Tensor, keys_LD: Tensor, out_ML: Tensor, workspace: Workspace) -> None:
    """Write fp32 [M, L]: heads are added in order, each as `w_h * relu(q_h . k)`; rows and keys past it are padding."""
    num_rows, num_keys = out_ML.shape
    q_MID = pad_rows(q_MID)
    product_ML = workspace.score_tile(q_MID.shape[0], keys_LD.shape[0])
    out_ML.zero_()
    for head in range(q_MID.shape[1]):
        torch.mm(q_MID[:, head], keys_LD.T, out=product_ML)
        out_ML.addcmul_(product_ML[:num_rows, :num_keys].clamp_(min=0), w_MI[:, head, None])


def decode_index_keys(cache: IndexCache, pages: Tensor, first: int, last: int) -> Tensor:
    """fp32 [last - first, D]: index keys at positions [first, last) of the request with page table `pages`."""
    page_size = cache.values_NBX.shape[1]
    first_page, last_page = first // page_size, -(-last // page_size)
    span = slice(first - first_page * page_size, last - first_page * page_size)
    wanted = pages[first_page:last_page]
    values_LX = cache.values_NBX[wanted].flatten(0, 1)[span]
    if cache.scales_NB is None:
        return values_LX.contiguous().view(torch.float32)
    scales_L = cache.scales_NB[wanted].flatten()[span]
    return values_LX.view(torch.float8_e4m3fn).float().mul_(scales_L[:, None])


def _mask_unseen(logits_ML: Tensor, visible_M: Tensor) -> None:
    """Row i sees keys [0, visible_M[i]); the rest becomes -inf. No row sees fewer than the one before it."""
    num_rows, num_keys = logits_ML.shape
    for first in range(0, num_rows, ROW_TILE):
        seen_by_all = int(visible_M[first])
        columns = torch.arange(seen_by_all, num_keys)
        unseen = columns >= visible_M[first : first + ROW_TILE, None]
        logits_ML[first : first + ROW_TILE, seen_by_all:].masked_fill_(unseen, float("-inf"))
