"""Cases of the attention kernels: sparse rows, dense rows, and the gather into a workspace.

A cache here is one request's context in pages of a random order, as a pool has them after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longfill.bench.work import Case, Setting, TorchPeer, Work
from longfill.cache.formats import latent_row_bytes
from longfill.kernels.cpu.attention import dense_mla, gather_rows, sparse_mla
from longfill.kernels.interface import LatentCache, RequestRows
from longfill.kernels.reference import attention as reference
from longfill.kernels.reference.quant import encode_latent

PAGE_SIZE = 64
SCALE = 2.0**-6
"""Static scale of format "fp8": normally distributed values stay below its largest."""
TORCH_KEYS = 2048
"""Keys that the torch formulation of sparse attention gathers at once: a row's, or those of several rows with few."""
TORCH_ROWS = 8
"""Rows that the torch formulation of dense attention takes at once. Both are the fastest of those tried."""


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int
    rope_dim: int
    topk: int
    rows: int
    context: int
    format: str

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def row_bytes(self) -> int:
        return latent_row_bytes(self.format, self.rank, self.rope_dim)

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)


def make_cache(shape: Shape, context: int) -> tuple[LatentCache, Tensor, Tensor]:
    """A cache of `context` random rows, its page table, and the same rows as one bf16 tensor [L, X]."""
    generator = torch.Generator().manual_seed(0)
    num_pages = -(-context // PAGE_SIZE)
    pages = torch.randperm(num_pages, generator=generator)
    rows_NBX = torch.zeros(num_pages, PAGE_SIZE, shape.row_bytes, dtype=torch.uint8)
    context_LX = torch.randn(num_pages * PAGE_SIZE, shape.width, generator=generator)
    for page, rows in zip(pages.tolist(), torch.split(context_LX, PAGE_SIZE), strict=True):
        latent, rope = torch.split(rows, [shape.rank, shape.rope_dim], -1)
        rows_NBX[page] = encode_latent(latent, rope, shape.format, SCALE, SCALE)
    cache = LatentCache(rows_NBX, shape.format, shape.rank, shape.rope_dim, SCALE, SCALE)
    return cache, pages, context_LX[:context].bfloat16()


def sparse_case(shape: Shape, setting: Setting) -> Work:
    rows, context = setting.size(shape.rows), setting.size(shape.context, least=shape.topk + 1)
    cache, pages, context_LX = make_cache(shape, context)
    generator = torch.Generator().manual_seed(1)
    q_THX = torch.randn(rows, shape.heads, shape.width, generator=generator).bfloat16()
    picks = [torch.randperm(context, generator=generator)[: shape.topk].sort().values for _ in range(rows)]
    selection_TK = torch.stack(picks).int()
    out_THR = torch.empty(rows, shape.heads, shape.rank, dtype=torch.bfloat16)
    request = RequestRows(0, rows, context - rows, pages)
    gathered = min(rows * shape.topk, context)
    return Work(
        call=partial(
            sparse_mla,
            *(q_THX, cache, request, selection_TK, shape.scale, out_THR),
            num_threads=setting.threads,
            isa=setting.isa,
        ),
        flops=2 * rows * shape.heads * shape.topk * (shape.width + shape.rank),
        bytes=gathered * shape.row_bytes + q_THX.nbytes + out_THR.nbytes,
        math=setting.math,
        traffic="read",
        items=rows,
        item="row",
        torch=TorchPeer(
            partial(torch_sparse, q_THX, context_LX, selection_TK.long(), shape),
            f"index_select of bf16 rows, bmm, softmax, bmm, {_torch_rows(shape)} row(s) at a time; no decoding",
        ),
    )


def _torch_rows(shape: Shape) -> int:
    return max(1, TORCH_KEYS // shape.topk)


def torch_sparse(q_THX: Tensor, context_LX: Tensor, selection_TK: Tensor, shape: Shape) -> Tensor:
    """bf16 [T, H, R] from one bf16 tensor of keys."""
    step = _torch_rows(shape)
    outs = []
    for q_MHX, selection_MK in zip(torch.split(q_THX, step), torch.split(selection_TK, step), strict=True):
        keys_MKX = context_LX.index_select(0, selection_MK.flatten()).view(*selection_MK.shape, -1)
        weights = (torch.bmm(q_MHX, keys_MKX.transpose(1, 2)) * shape.scale).softmax(-1)
        outs.append(torch.bmm(weights, keys_MKX[..., : shape.rank]))
    return torch.cat(outs)


def dense_case(shape: Shape, setting: Setting) -> Work:
    """All rows of a prompt from position 0, each over its causal range."""
    rows = setting.size(shape.rows, least=2)
    cache, pages, context_LX = make_cache(shape, rows)
    q_THX = torch.randn(rows, shape.heads, shape.width, generator=torch.Generator().manual_seed(1)).bfloat16()
    out_THR = torch.empty(rows, shape.heads, shape.rank, dtype=torch.bfloat16)
    request = RequestRows(0, rows, 0, pages)
    return Work(
        call=partial(
            dense_mla,
            *(q_THX, cache, request, request.visible(0, rows), shape.scale, out_THR),
            num_threads=setting.threads,
            isa=setting.isa,
        ),
        flops=shape.heads * rows * (rows + 1) * (shape.width + shape.rank),
        bytes=rows * shape.row_bytes + q_THX.nbytes + out_THR.nbytes,
        math=setting.math,
        traffic="read",
        items=rows,
        item="row",
        torch=TorchPeer(
            partial(torch_dense, q_THX, context_LX, shape),
            f"mm, softmax, mm over the keys of {TORCH_ROWS} rows at a time (scaled_dot_product_attention is slower)",
        ),
    )


def torch_dense(q_THX: Tensor, context_LX: Tensor, shape: Shape) -> Tensor:
    """bf16 [T, H, R] of rows from position 0, the heads of a few rows in one product."""
    outs = []
    for first in range(0, q_THX.shape[0], TORCH_ROWS):
        q_MHX = q_THX[first : first + TORCH_ROWS]
        end = first + q_MHX.shape[0]
        scores_MHL = (q_MHX.flatten(0, 1) @ context_LX[:end].T).view(*q_MHX.shape[:2], end) * shape.scale
        unseen = torch.arange(first, end) > torch.arange(first, end)[:, None]
        scores_MHL[..., first:].masked_fill_(unseen[:, None], float("-inf"))
        outs.append(scores_MHL.softmax(-1).flatten(0, 1) @ context_LX[:end, : shape.rank])
    return torch.cat(outs).view(*q_THX.shape[:2], -1)


def gather_case(shape: Shape, setting: Setting) -> Work:
    context = setting.size(shape.context)
    cache, pages, _ = make_cache(shape, context)
    out_LX = torch.empty(context, shape.width, dtype=torch.bfloat16)
    request = RequestRows(0, 1, context - 1, pages)
    return Work(
        call=partial(gather_rows, cache, request, out_LX, num_threads=setting.threads, isa=setting.isa),
        flops=0,
        bytes=context * shape.row_bytes + out_LX.nbytes,
        math=setting.math,
        traffic="copy",
        items=context,
        item="row",
        torch=TorchPeer(partial(reference.gather_rows, cache, request, out_LX), "index_select of pages, then decoding"),
    )


def _glm(rows: int, context: int, format: str) -> Shape:
    return Shape(64, 512, 64, 2048, rows, context, format)


def _bundled(rows: int, context: int, format: str) -> Shape:
    return Shape(4, 128, 32, 64, rows, context, format)


def _case(kernel: str, make: Callable[[Shape, Setting], Work], name: str, shape: Shape) -> Case:
    return Case(kernel, f"{name}, {shape.format}", partial(make, shape))


FORMATS = ("bfloat16", "fp8", "fp8_ds_mla")

CASES = (
    *(_case("sparse_mla", sparse_case, "GLM-5, 32 rows", _glm(32, 131_072, format)) for format in FORMATS),
    _case("sparse_mla", sparse_case, "GLM-5, 1 row", _glm(1, 131_072, "bfloat16")),
    _case("sparse_mla", sparse_case, "bundled, 2,048 rows", _bundled(2048, 131_072, "bfloat16")),
    _case("sparse_mla", sparse_case, "bundled, 2,048 rows", _bundled(2048, 131_072, "fp8_ds_mla")),
    _case("dense_mla", dense_case, "GLM-5, 2,048 rows from 0", _glm(2048, 2048, "bfloat16")),
    *(_case("gather_rows", gather_case, "131,072 rows", _glm(1, 131_072, format)) for format in FORMATS),
)
