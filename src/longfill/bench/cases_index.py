"""Cases of `index_topk`: scores, ReLU, heads' sum and the exact top-k, all of it timed.

The data sets beside random ones are the worst known for streaming selections: scores that rise towards the end, so that
each key is a new best, and keys of which most score exactly zero, so that everything ties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from longfill.bench.work import Case, Setting, TorchPeer, Work
from longfill.kernels.cpu import index_topk
from longfill.kernels.interface import IndexCache, RequestRows, ScoredRows
from longfill.kernels.reference.quant import quantise_index_keys, quantise_index_queries

PAGE_SIZE = 64
TORCH_ROWS = 64
TORCH_KEYS = 1024
"""Tile of the torch formulation, the fastest of those tried: its products stay in the caches."""


@dataclass(frozen=True)
class Shape:
    heads: int
    dim: int
    topk: int
    rows: int
    keys: int
    data: str = "random"
    screen: str = "auto"


def index_case(shape: Shape, setting: Setting) -> Work:
    rows = setting.size(shape.rows)
    keys = max(setting.size(shape.keys), rows, shape.topk + 1)
    k_LD, q_TID, w_TI = _data(shape, rows, keys)
    q_TID, w_TI = quantise_index_queries(q_TID, w_TI)
    values, scales = quantise_index_keys(k_LD)
    num_pages = -(-keys // PAGE_SIZE)
    cache = IndexCache(_paged(values, num_pages, shape.dim), _paged(scales, num_pages), "fp8", shape.dim)
    start = keys - rows
    scored = ScoredRows(RequestRows(0, rows, start, torch.arange(num_pages)), 0, rows, start)
    keys_bf16 = (values.view(torch.float8_e4m3fn).float() * scales[:, None]).bfloat16()
    return index_work(q_TID, w_TI, cache, scored, keys_bf16, shape.topk, shape.screen, setting)


def index_work(
    q_TID: Tensor, w_TI: Tensor, cache: IndexCache, scored: ScoredRows, keys_bf16: Tensor, topk: int, screen: str,
    setting: Setting,
) -> Work:  # fmt: skip
    """The rows of `scored`, which are all of q and w, over the cache; torch takes the keys as `keys_bf16` [L, D]."""
    rows, heads, dim = q_TID.shape
    start = scored.first_position
    selection_TK = torch.full((rows, topk), -1, dtype=torch.int32)
    scores = rows * start + rows * (rows + 1) // 2
    return Work(
        call=partial(
            index_topk,
            q_TID,
            w_TI,
            cache,
            [[scored]],
            selection_TK,
            num_threads=setting.threads,
            isa=setting.isa,
            screen=screen,
        ),
        flops=2 * scores * heads * dim,
        bytes=(start + rows) * (dim + 4) + q_TID.nbytes + selection_TK.nbytes,
        math=setting.math,
        traffic="read",
        items=scores,
        item="score",
        torch=TorchPeer(
            partial(torch_index_topk, q_TID.bfloat16(), w_TI.bfloat16(), keys_bf16, start, topk),
            f"bf16 mm, relu, bmm in tiles of {TORCH_ROWS} rows x {TORCH_KEYS} keys, then topk; keys already bf16",
        ),
    )


def _data(shape: Shape, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k_LD = torch.randn(keys, shape.dim, generator=generator)
    q_TID = torch.randn(rows, shape.heads, shape.dim, generator=generator)
    if shape.data == "ascending":
        k_LD[:] = torch.linspace(0.01, 1.0, keys)[:, None]
        q_TID = q_TID.abs()
    elif shape.data == "zeros":
        k_LD[torch.rand(keys, generator=generator) < 0.9] = 0.0
    elif shape.data == "narrow":
        k_LD = k_LD[:1] + 1e-3 * k_LD
    return k_LD, q_TID, torch.rand(rows, shape.heads, generator=generator)


def _paged(rows: Tensor, num_pages: int, *width: int) -> Tensor:
    """`rows` in pages, the last one filled up with zeros."""
    paged = rows.new_zeros(num_pages * PAGE_SIZE, *width)
    paged[: rows.shape[0]] = rows
    return paged.view(num_pages, PAGE_SIZE, *width)


def torch_index_topk(q_TID: Tensor, w_TI: Tensor, keys_LD: Tensor, first_position: int, topk: int) -> list[Tensor]:
    """The selected positions (unsorted) of rows from `first_position` on, a block of rows at a time."""
    blocks = zip(torch.split(q_TID, TORCH_ROWS), torch.split(w_TI, TORCH_ROWS), strict=True)
    return [
        _torch_rows(q_MID, w_MI, keys_LD, first_position + i * TORCH_ROWS, topk)
        for i, (q_MID, w_MI) in enumerate(blocks)
    ]


def _torch_rows(q_TID: Tensor, w_TI: Tensor, keys_LD: Tensor, first_position: int, topk: int) -> Tensor:
    rows, heads, _ = q_TID.shape
    scores_TL = torch.empty(rows, keys_LD.shape[0], dtype=torch.bfloat16)
    for first in range(0, keys_LD.shape[0], TORCH_KEYS):
        products = torch.relu_(q_TID.flatten(0, 1) @ keys_LD[first : first + TORCH_KEYS].T)
        scores_TL[:, first : first + TORCH_KEYS] = torch.bmm(w_TI[:, None], products.view(rows, heads, -1))[:, 0]
    unseen = torch.arange(keys_LD.shape[0])[first_position:] > first_position + torch.arange(rows)[:, None]
    scores_TL[:, first_position:].masked_fill_(unseen, float("-inf"))
    return scores_TL.topk(topk, -1, sorted=False).indices


def _case(name: str, shape: Shape) -> Case:
    return Case("index_topk", name, partial(index_case, shape))


def _glm(rows: int, keys: int, data: str = "random") -> Shape:
    return Shape(32, 128, 2048, rows, keys, data)


def _bundled(rows: int, keys: int, data: str = "random") -> Shape:
    return Shape(2, 64, 64, rows, keys, data)


CASES = (
    _case("GLM-5, 64 rows x 131,072 keys", _glm(64, 131_072)),
    _case("GLM-5, 1 row x 131,072 keys", _glm(1, 131_072)),
    _case("GLM-5, ascending scores", _glm(64, 65_536, "ascending")),
    _case("GLM-5, narrow band", _glm(64, 65_536, "narrow")),
    _case("GLM-5, 90% zeros", _glm(64, 65_536, "zeros")),
    _case("bundled, 2,048 rows x 131,072 keys", _bundled(2048, 131_072)),
    _case("bundled, 2,048 rows x 8,192 keys", _bundled(2048, 8_192)),
    _case("bundled, ascending scores", _bundled(2048, 65_536, "ascending")),
    _case("bundled, 90% zeros", _bundled(2048, 65_536, "zeros")),
    _case("bundled, 1 row x 131,072 keys", _bundled(1, 131_072)),
    _case("GLM-5, 64 rows x 131,072 keys, no screen", replace(_glm(64, 131_072), screen="off")),
    _case("bundled, 2,048 rows x 131,072 keys, no screen", replace(_bundled(2048, 131_072), screen="off")),
    _case("4 heads x 32, 2,048 rows x 65,536 keys", Shape(4, 32, 64, 2048, 65_536)),
)
