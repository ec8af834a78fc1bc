"""Cases of the products with stored weights: `linear` and `experts`, in bf16 and with fp8 block-scaled weights.

One random matrix is copied for all experts: making hundreds of millions of random numbers would take longer than
multiplying them, and speed does not depend on the values.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.bench.work import Case, Setting, TorchPeer, Work
from longfill.kernels.cpu.experts import experts
from longfill.kernels.cpu.linear import linear
from longfill.kernels.cpu.packing import PackedLinear, PackedMlp, pack_linear
from longfill.kernels.interface import StoredLinear, StoredMlp

BLOCK = 128
HIDDEN, INNER, EXPERTS, PER_TOKEN = 6144, 2048, 16, 8
DECODE_MATRICES = 8
"""Matrices that a one-row case reads in turn: one alone might stay in the last-level cache."""


def random_weight(out_size: int, in_size: int) -> Tensor:
    return torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(out_size)).mul_(in_size**-0.5)


def stored(weight_OC: Tensor, format: str) -> StoredLinear:
    """The weight as a checkpoint of that format holds it; each call copies the values."""
    if format == "bf16":
        return StoredLinear(weight_OC.to(torch.bfloat16, copy=True))
    blocks = [-(-size // BLOCK) for size in weight_OC.shape]
    values = (weight_OC * 256).to(torch.float8_e4m3fn)
    return StoredLinear(values, scale=torch.full(blocks, 1 / 256), block=(BLOCK, BLOCK))


def packed(weight: StoredLinear, setting: Setting) -> PackedLinear:
    return pack_linear(weight, compute_dtype=torch.bfloat16, isa=setting.isa, num_threads=setting.threads)


def linear_case(rows: int, out_size: int, in_size: int, format: str, setting: Setting) -> Work:
    height = setting.size(rows)
    copies = DECODE_MATRICES if rows == 1 else 1
    weights = [stored(random_weight(out_size, in_size), format) for _ in range(copies)]
    packs = [packed(weight, setting) for weight in weights]
    x_TC = torch.randn(height, in_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    return Work(
        call=lambda: [linear(x_TC, pack, num_threads=setting.threads) for pack in packs],
        flops=2 * copies * height * out_size * in_size,
        bytes=copies * (packs[0].num_bytes + 2 * height * (in_size + out_size)),
        math=setting.math,
        traffic="read",
        items=copies * height,
        item="row",
        torch=TorchPeer(lambda: [_torch_linear(x_TC, weight) for weight in weights], _torch_note(format)),
    )


def experts_case(tokens: int, format: str, setting: Setting) -> Work:
    """GLM-5's widths with fewer experts: each token takes 8 of 16."""
    height = setting.size(tokens, least=2)
    wide, narrow = random_weight(INNER, HIDDEN), random_weight(HIDDEN, INNER)
    weights = [StoredMlp(stored(wide, format), stored(wide, format), stored(narrow, format)) for _ in range(EXPERTS)]
    packs = [PackedMlp(*(packed(part, setting) for part in (w.gate, w.up, w.down))) for w in weights]
    generator = torch.Generator().manual_seed(1)
    x_TC = torch.randn(height, HIDDEN, generator=generator).bfloat16()
    ids_TK = torch.rand(height, EXPERTS, generator=generator).topk(PER_TOKEN, -1).indices.sort(-1).values
    weights_TK = torch.rand(height, PER_TOKEN, generator=generator)
    return Work(
        call=lambda: experts(x_TC, ids_TK, weights_TK, packs, None, num_threads=setting.threads),
        flops=6 * height * PER_TOKEN * HIDDEN * INNER,
        bytes=sum(pack.num_bytes for pack in packs) + 2 * x_TC.nbytes,
        math=setting.math,
        traffic="read",
        items=height * PER_TOKEN,
        item="expert row",
        torch=TorchPeer(
            partial(_torch_experts, x_TC, ids_TK, weights_TK, weights),
            f"index_select, three times {_torch_note(format)}, index_add_, expert after expert",
        ),
    )


def _torch_note(format: str) -> str:
    return "F.linear" if format == "bf16" else "F.linear, the fp8 weight turned into bf16 in each call"


def _torch_linear(x_TC: Tensor, weight: StoredLinear) -> Tensor:
    if weight.scale is None:
        return F.linear(x_TC, weight.weight)
    rows, columns = weight.scale.shape
    # Every size here is a multiple of the block.
    blocks = weight.weight.bfloat16().view(rows, BLOCK, columns, BLOCK)
    return F.linear(x_TC, blocks.mul_(weight.scale.bfloat16()[:, None, :, None]).view(weight.weight.shape))


def _torch_experts(x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: list[StoredMlp]) -> Tensor:
    total_TC = torch.zeros(x_TC.shape)
    for expert, w in enumerate(weights):
        rows, columns = (ids_TK == expert).nonzero(as_tuple=True)
        taken = x_TC.index_select(0, rows)
        inner = F.silu(_torch_linear(taken, w.gate)).mul_(_torch_linear(taken, w.up))
        total_TC.index_add_(0, rows, _torch_linear(inner, w.down).float() * weights_TK[rows, columns, None])
    return total_TC.to(x_TC.dtype)


def _linear(rows: int, out_size: int, in_size: int, format: str) -> Case:
    name = f"{rows:,} row{'s' if rows > 1 else ''}, {in_size:,} to {out_size:,}, {format}"
    return Case("linear", name, partial(linear_case, rows, out_size, in_size, format))


def _experts(tokens: int, format: str) -> Case:
    name = f"GLM-5 width, {tokens:,} tokens, {PER_TOKEN} of {EXPERTS} experts, {format}"
    return Case("experts", name, partial(experts_case, tokens, format))


CASES = (
    _linear(2048, 4096, 4096, "bf16"),
    _linear(2048, 4096, 4096, "fp8"),
    _linear(2048, 2048, 6144, "bf16"),
    _linear(2048, 2048, 6144, "fp8"),
    _linear(1, 4096, 4096, "bf16"),
    _linear(1, 4096, 4096, "fp8"),
    _experts(2048, "bf16"),
    _experts(2048, "fp8"),
    _experts(256, "bf16"),
    _experts(256, "fp8"),
)
