"""Norms, rotary embedding, rounding and both cache writes in native code: what `reference.store`, `reference.quant` and
`reference.linear.rms_norm` define.

May import torch and the extension. Invariant: a row's result is a function of that row alone; neither threads nor
neighbours nor the instruction set change a bit of it. Roundings are the reference's; only sums have another order.

All rows may be strided views whose last dimension is contiguous. Every function raises ValueError for shapes, strides,
dtypes or slots that do not fit together. `isa` overrides the process's instruction set.

Suffixes: T rows · C width of a row · R latent rank · P rope dim · F = P / 2 · X = R + P · H heads · I indexer heads ·
D indexer dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A capsule crosses in 0.2 microseconds; a tensor's own __dlpack__, which is Python code, takes 2.
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from longfill.kernels.cpu.extension import selected_isa
from longfill.kernels.interface import IndexCache, LatentCache


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, *, num_threads: int, out: Tensor | None = None, isa: str | None = None
) -> Tensor:
    """`x / rms(x) * weight`, [T, C] in the dtype of x (float32 or bfloat16, as the weight's); `out` may be x itself."""
    chosen = isa or selected_isa()
    # Imported here because an installation without a compiler has no extension.
    from longfill.kernels.cpu import _native

    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format) if out is None else out
    _native.rms_norm(chosen, to_dlpack(x_TC), to_dlpack(weight_C), eps, to_dlpack(out_TC), num_threads)
    return out_TC


def store_latent(
    kv_TX: Tensor,
    norm_R: Tensor,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    cache: LatentCache,
    slots_T: Tensor,
    *,
    interleaved: bool,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Write a layer's latent rows: RMS-normalised first R values, rotated last P ones, at `slots_T` (int64, distinct).

    `kv_TX` and `norm_R` share one dtype, float32 or bfloat16; cosines and sines are float32. The scales of format
    "fp8" must be powers of two.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    _native.store_latent(
        chosen, to_dlpack(kv_TX), to_dlpack(norm_R), eps, to_dlpack(cos_TF), to_dlpack(sin_TF), interleaved,
        to_dlpack(cache.rows_NBX), cache.format, cache.scale, cache.rope_scale, to_dlpack(slots_T), num_threads,
    )  # fmt: skip


def store_index_keys(
    k_TD: Tensor,
    norm: tuple[Tensor, Tensor],
    cos_TF: Tensor,
    sin_TF: Tensor,
    cache: IndexCache,
    slots_T: Tensor,
    *,
    interleaved: bool,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Write a full layer's index keys: LayerNorm (eps 1e-6, float32 weight and bias), first P dims rotated.

    `k_TD` is float32 or bfloat16, `slots_T` int64 and distinct.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    weight_D, bias_D = norm
    scales = None if cache.scales_NB is None else to_dlpack(cache.scales_NB)
    _native.store_index_keys(
        chosen, to_dlpack(k_TD), to_dlpack(weight_D), to_dlpack(bias_D), to_dlpack(cos_TF), to_dlpack(sin_TF),
        interleaved, to_dlpack(cache.values_NBX), scales, to_dlpack(slots_T), num_threads,
    )  # fmt: skip


def put_rows(rows_SX: Tensor, order_K: Tensor, cache_NBX: Tensor, slots_K: Tensor, *, num_threads: int) -> None:
    """`cache[slot k] = rows[order k]`, byte by byte; slots (int64) are distinct."""
    from longfill.kernels.cpu import _native

    _native.put_rows(
        to_dlpack(rows_SX), to_dlpack(order_K), to_dlpack(cache_NBX), to_dlpack(slots_K), num_threads
    )  # fmt: skip


def index_queries(
    q_TJ: Tensor,
    w_TI: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    interleaved: bool,
    quantise: bool,
    w_scale: float,
    num_threads: int,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The indexer's queries float32 [T, I, D] and head weights float32 [T, I], as `index_topk` takes them.

    `q_TJ`: float32 or bfloat16 [T, I * D]; `w_TI`: float32. The first P dims of every head are rotated in float32. With
    `quantise`, each head is rounded to e4m3 under a power-of-two scale, which goes into its weight:
    `(w * w_scale) * scale`, in that order.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    num_rows, num_heads = w_TI.shape
    q_TID = torch.empty(num_rows, num_heads, q_TJ.shape[1] // num_heads, dtype=torch.float32)
    folded_TI = torch.empty(num_rows, num_heads, dtype=torch.float32)
    _native.index_queries(
        chosen, to_dlpack(q_TJ), to_dlpack(w_TI), to_dlpack(cos_TF), to_dlpack(sin_TF), interleaved, quantise,
        w_scale, to_dlpack(q_TID), to_dlpack(folded_TI), num_threads,
    )  # fmt: skip
    return q_TID, folded_TI


def rotate(
    x_THP: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    interleaved: bool,
    out_THP: Tensor,
    *,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Write the rotary embedding of every vector of x to `out_THP`, in x's dtype (float32 or bfloat16).

    Both may be strided views, and the same one; other overlap is an error of the caller.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    _native.rotate(
        chosen, to_dlpack(x_THP), to_dlpack(cos_TF), to_dlpack(sin_TF), interleaved, to_dlpack(out_THP), num_threads
    )


def row_scratch_bytes(width: int, *, num_threads: int) -> int:
    """The most bytes that one of these calls allocates for itself: `width` is R + P, D, or P for `rotate`."""
    from longfill.kernels.cpu import _native

    return _native.row_scratch_bytes(width, num_threads)
