"""Absorbed MLA over selected rows (sparse) or over a causal range (dense), with log-sum-exp.

May import torch. Invariant: every tile boundary is counted from position 0 or is one row, and no key that a row does
not see touches it, so a row's bits do not depend on its neighbours. All arithmetic is fp32 over the stored rows.

Formula: DeepSeek-V2 technical report, section 2.1; a query of H heads x (R + P) meets latent rows as one key head, and
the value is the row's first R numbers. LSE is natural-log based; a row without keys has output 0 and LSE -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.interface import LatentCache, RequestRows, pages_of
from longfill.kernels.reference.elementwise import logaddexp
from longfill.kernels.reference.linear import pad_rows
from longfill.kernels.reference.quant import decode_latent
from longfill.kernels.workspace import ATTENTION_TILE_BYTES, CONTEXT_TILE


def read_rows(cache: LatentCache, pages: Tensor, positions: Tensor) -> Tensor:
    """fp32 [..., R + P]: latent rows at `positions` (int64, any shape) of the request with page table `pages`."""
    page_size = cache.rows_NBX.shape[1]
    flat = positions.flatten()
    # Four bytes at a time: indexing moves single elements, and every row is a whole number of words.
    words_NBX = cache.rows_NBX.view(torch.int32)
    rows = words_NBX[pages[flat // page_size], flat % page_size].view(torch.uint8)
    decoded = decode_latent(rows, cache.format, cache.rank, cache.rope_dim, cache.scale, cache.rope_scale)
    return decoded.view(*positions.shape, -1)


def gather_rows(cache: LatentCache, request: RequestRows, out_LX: Tensor) -> None:
    """Copy a request's whole context into `out_LX` ([L, R + P], bf16 or fp32), page runs at a time."""
    page_size = cache.rows_NBX.shape[1]
    pages = pages_of(request, page_size)
    pages_a_time = max(1, CONTEXT_TILE // page_size)
    for first in range(0, pages.numel(), pages_a_time):
        rows = cache.rows_NBX[pages[first : first + pages_a_time]].flatten(0, 1)
        position = first * page_size
        count = min(rows.shape[0], request.seq_len - position)
        decoded = decode_latent(rows[:count], cache.format, cache.rank, cache.rope_dim, cache.scale, cache.rope_scale)
        out_LX[position : position + count] = decoded


def sparse_mla(
    q_THX: Tensor,
    cache: LatentCache,
    request: RequestRows,
    selection_TK: Tensor,
    scale: float,
    context_LX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 outputs [T, H, R] and LSE [T, H] of rows over their selected positions (int32 [T, K], -1 = none).

    Keys come from the pages directly, or from `context_LX`, the request's gathered context: the same bits either way.
    """
    num_rows, heads, width = q_THX.shape
    out = torch.empty(*q_THX.shape[:2], cache.rank, dtype=torch.float32)
    lse = torch.empty(q_THX.shape[:2], dtype=torch.float32)
    step = max(1, ATTENTION_TILE_BYTES // (selection_TK.shape[1] * width * 4))
    for first in range(0, num_rows, step):
        span = slice(first, first + step)
        positions_TK = selection_TK[span].long()
        empty_TK = positions_TK < 0
        safe_TK = positions_TK.clamp(min=0)
        if context_LX is None:
            keys_TKX = read_rows(cache, request.pages, safe_TK)
        else:
            keys_TKX = context_LX.index_select(0, safe_TK.flatten()).view(*safe_TK.shape, -1).float()
        # Keys first: torch multiplies a batch of small matrices several times faster this way round.
        # A single head is taken twice: a batch of one matrix-vector product would sum in another order.
        q_TXH = q_THX[span].float().transpose(1, 2).expand(-1, -1, max(2, heads))
        scores_THK = torch.bmm(keys_TKX, q_TXH)[..., :heads].mul_(scale).transpose(1, 2).contiguous()
        if empty_TK.any():
            # Padding may point at a row that was never written: 0 x NaN would reach the output.
            keys_TKX.masked_fill_(empty_TK[..., None], 0.0)
            scores_THK.masked_fill_(empty_TK[:, None], float("-inf"))
        lse[span] = scores_THK.logsumexp(-1)
        weights_THK = scores_THK.softmax(-1)
        # A softmax over no keys is NaN.
        weights_THK[empty_TK.all(-1)] = 0.0
        out[span] = torch.bmm(weights_THK, keys_TKX[..., : cache.rank])
    return out, lse


def dense_mla(
    q_THX: Tensor, cache: LatentCache, request: RequestRows, visible_T: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention: fp32 outputs [T, H, R] and LSE [T, H]; row i sees the first `visible_T[i]` (int64) keys.

    The context is taken in tiles counted from position 0, merged by log-sum-exp in that order.
    """
    num_rows, heads, _ = q_THX.shape
    out = torch.zeros(num_rows, heads, cache.rank, dtype=torch.float32)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float32)
    step = max(1, ATTENTION_TILE_BYTES // (heads * CONTEXT_TILE * 4))
    num_keys = int(visible_T[-1]) if num_rows else 0
    for tile in range(0, num_keys, CONTEXT_TILE):
        last = min(tile + CONTEXT_TILE, num_keys)
        keys_LX = read_rows(cache, request.pages, torch.arange(tile, last))
        if keys_LX.shape[0] < CONTEXT_TILE:
            keys_LX = torch.cat([keys_LX, keys_LX.new_zeros(CONTEXT_TILE - keys_LX.shape[0], keys_LX.shape[1])])
        finite_LX, broken_from_X = keys_LX, None
        first_row = int(torch.searchsorted(visible_T, tile, right=True))  # those before it see none of the tile
        if last > int(visible_T[first_row]):  # else every row sees every key of the tile
            finite_LX, broken_from_X = _set_broken_aside(keys_LX, tile)
        for first in range(first_row, num_rows, step):
            span = slice(first, min(first + step, num_rows))
            seen_T1 = visible_T[span, None]
            count = seen_T1.shape[0]
            hidden_TL = torch.arange(tile, tile + CONTEXT_TILE) >= seen_T1
            scores = torch.matmul(pad_rows(q_THX[span].float()), keys_LX.T).mul_(scale)
            scores[:count].masked_fill_(hidden_TL[:, None], float("-inf"))
            tile_lse = scores.logsumexp(-1)
            weights = scores.sub_(tile_lse[..., None]).exp_()
            values = torch.matmul(weights, finite_LX[:, : cache.rank])[:count]
            if broken_from_X is not None:
                # Keys that are NaN or inf get the weight 0 or NaN: for a row that sees one, the product is NaN.
                values.masked_fill_((broken_from_X[: cache.rank] < seen_T1)[:, None], float("nan"))
            merge(out[span], lse[span], values, tile_lse[:count])
    return out, lse


def _set_broken_aside(keys_LX: Tensor, first_position: int) -> tuple[Tensor, Tensor | None]:
    """Keys whose NaN and inf are 0, and int64 [R + P]: the first position of each column's; None where all are finite.

    A hidden key has the weight 0, but 0 x NaN would reach rows before it.
    """
    broken_LX = ~keys_LX.isfinite()
    if not broken_LX.any():
        return keys_LX, None
    positions_L = torch.arange(first_position, first_position + keys_LX.shape[0])
    broken_from_X = torch.where(broken_LX, positions_L[:, None], torch.iinfo(torch.int64).max).amin(0)
    return keys_LX.masked_fill(broken_LX, 0.0), broken_from_X


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Fold a second partial attention into (`out` [..., R], `lse` [...]) in place; -inf LSE means no keys."""
    total = logaddexp(lse, other_lse)
    settled = torch.where(total == float("-inf"), 0.0, total)
    out.mul_((lse - settled).exp()[..., None]).add_(other * (other_lse - settled).exp()[..., None])
    lse.copy_(total)
