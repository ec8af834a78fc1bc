"""Absorbed MLA over paged latent rows in native code: what `reference.attention` means.

May import torch and the extension. Invariant: the bits of a (row, head) depend on its query, its keys in their order,
the instruction set and the dtypes alone: rows, heads, threads, pages or a gathered copy beside it change nothing. A
dense row has the bits of a sparse one that selects its whole causal range in ascending order.

bf16 queries over rows that bf16 holds exactly (any format but "float32") are multiplied in bf16 with fp32 sums where
the instruction set can; softmax weights are then rounded to bf16, and normalised by the sum of the rounded ones.
Everything else is fp32 throughout.
"""

from __future__ import annotations

from torch import Tensor

from longfill.kernels.cpu.extension import selected_isa
from longfill.kernels.interface import LatentCache, RequestRows


def sparse_mla(
    q_THX: Tensor,
    cache: LatentCache,
    request: RequestRows,
    selection_TK: Tensor,
    scale: float,
    out_THR: Tensor,
    *,
    context_LX: Tensor | None = None,
    lse_TH: Tensor | None = None,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Attention of rows over their selected positions, written to `out_THR` ([T, H, R], bf16 or fp32).

    `q_THX`: [T, H, R + P], bf16 or fp32, heads contiguous, any row and head stride; `selection_TK`: int32 [T, K],
    negative entries select nothing, and a row that selects nothing gives 0 and the LSE -inf. Keys come from the pages
    or from `context_LX` ([L, R + P], bf16 or fp32, as `gather_rows` fills it). `scale` is positive.

    `lse_TH`, if given, receives the natural-log log-sum-exp of the scaled scores (fp32 [T, H]); where weights are
    rounded to bf16, of the rounded ones, so that partial outputs merge by it to the whole.

    Raises ValueError for shapes, strides, dtypes, positions or pages that do not fit together.
    """
    from longfill.kernels.cpu import _native

    _native.sparse_mla(
        isa or selected_isa(),
        q_THX,
        _layout(cache),
        cache.rows_NBX,
        request.pages,
        context_LX,
        selection_TK,
        scale,
        out_THR,
        lse_TH,
        num_threads,
    )


def dense_mla(
    q_THX: Tensor,
    cache: LatentCache,
    request: RequestRows,
    visible_T: Tensor,
    scale: float,
    out_THR: Tensor,
    *,
    lse_TH: Tensor | None = None,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Causal attention written to `out_THR`: row i sees the first `visible_T[i]` keys (int64 [T], nondecreasing).

    Other arguments as in `sparse_mla`. A row that sees no key gives 0 and the LSE -inf.
    """
    from longfill.kernels.cpu import _native

    _native.dense_mla(
        isa or selected_isa(),
        q_THX,
        _layout(cache),
        cache.rows_NBX,
        request.pages,
        visible_T,
        scale,
        out_THR,
        lse_TH,
        num_threads,
    )


def gather_rows(
    cache: LatentCache, request: RequestRows, out_LX: Tensor, *, num_threads: int, isa: str | None = None
) -> None:
    """Decode a request's whole context into `out_LX` ([seq_len, R + P], bf16 or fp32, rows contiguous).

    Raises ValueError for shapes, strides, dtypes or pages that do not fit together.
    """
    from longfill.kernels.cpu import _native

    chosen = isa or selected_isa()
    _native.gather_rows(chosen, _layout(cache), cache.rows_NBX, request.pages, request.seq_len, out_LX, num_threads)


def attention_scratch_bytes(*, heads: int, rank: int, rope_dim: int, num_threads: int, isa: str | None = None) -> int:
    """The most bytes that `sparse_mla` or `dense_mla` allocates for itself, for any rows, top-k and context."""
    from longfill.kernels.cpu import _native

    return _native.attention_scratch_bytes(isa or selected_isa(), heads, rank, rope_dim, num_threads)


def _layout(cache: LatentCache) -> tuple[str, int, int, float, float]:
    return cache.format, cache.rank, cache.rope_dim, cache.scale, cache.rope_scale
