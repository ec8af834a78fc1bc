"""What the extension refuses: arguments whose arithmetic would wrap around, and objects that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import needs_native
from torch import Tensor

from longfill.kernels import cpu

if cpu.available():
    from longfill.kernels.cpu import _native

pytestmark = needs_native

MOST = 2**63 - 1
NONE = (None, None, None)


def select(rows: list[tuple[int, int, int, Tensor | None, Tensor]], weights: Any = None) -> Tensor:
    selection_TK = torch.full((2, 3), -7, dtype=torch.int32)
    _native.index_topk(
        "portable", torch.ones(2, 1, 16), torch.ones(2, 1) if weights is None else weights,
        torch.full((3, 4, 16), 0x38, dtype=torch.uint8), torch.ones(3, 4), rows, selection_TK, None, "off", 1,
    )  # fmt: skip
    return selection_TK


@pytest.mark.parametrize(
    ("first_row", "count", "position"),
    [(MOST, 1, 0), (MOST, 2, 0), (1, 2, 0), (2, 1, 0), (-1, 1, 0), (0, 1, MOST), (0, 1, 2**31 - 1), (0, 2, 2**31 - 2)],
)
def test_rows_and_positions_that_would_wrap_are_refused(first_row: int, count: int, position: int) -> None:
    with pytest.raises(ValueError, match=r"rows outside the step|does not fit 32 bits"):
        select([(first_row, count, position, None, torch.tensor([0, 1, 2]))])


@pytest.mark.parametrize(
    ("counts", "match"),
    [([1], "one a row"), ([1, 2, 3], "one a row"), ([2, 1], "ascend"), ([-1, 1], "ascend"), ([1, 2**31], "ascend"),
     ([1, 13], "shorter")],
    ids=str,
)  # fmt: skip
def test_counts_that_are_none_are_refused(counts: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        select([(0, 2, 0, torch.tensor(counts), torch.tensor([0, 1, 2]))])


def test_the_stride_of_a_single_head_means_nothing() -> None:
    weights_TI = np.lib.stride_tricks.as_strided(np.ones(2, np.float32), (2, 1), (4, 40))
    rows = [(0, 2, 0, None, torch.tensor([0, 1, 2]))]
    assert torch.equal(select(rows, weights_TI), select(rows))


def matrix(n: int = 4, k: int = 4, count: int = 1, block: tuple[int, int] | None = None) -> Any:
    """A weight of one packed 4 x 4 matrix, whatever it claims to be."""
    name = "float32" if block is None else "fp8"
    data = torch.zeros(4096, dtype=torch.uint8)
    data = data[-data.data_ptr() % 64 :][:256]
    scale = None if block is None else torch.zeros(0, 0)
    return _native.PackedMatrix("portable", name, False, n, k, count, data, scale, block or (1, 1), None)


@pytest.mark.parametrize(
    "claims",
    [
        {"n": MOST},
        {"k": MOST},
        {"n": 2**32, "k": 2**32},  # 2^66 bytes are 0 in 64 bits
        {"n": 2**29, "k": 2**29},
        {"count": 2**58},
        {"count": MOST},
        {"block": (MOST, MOST)},
    ],
    ids=str,
)
def test_a_weight_larger_than_its_bytes_is_refused(claims: dict[str, Any]) -> None:
    assert matrix() is not None
    with pytest.raises(ValueError, match=r"cover|at most|scale"):
        matrix(**claims)


def test_a_block_without_weights_is_refused() -> None:
    x_TC, ids_TK, factors_TK = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    whole = (matrix(),) * 3
    for weights in (NONE, (whole[0], None, whole[2])):
        with pytest.raises(ValueError, match="gate, up and down"):
            _native.mlp(weights, x_TC, x_TC.clone(), 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gate, up and down"):
            _native.experts([weights], None, ids_TK, factors_TK, x_TC, x_TC.clone(), 1)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="gate, up and down"):
            _native.experts([whole], weights, ids_TK, factors_TK, x_TC, x_TC.clone(), 1)  # type: ignore[arg-type]


def test_rows_of_an_odd_width_are_refused_where_products_take_pairs() -> None:
    pool = torch.zeros(3, 4, 8, dtype=torch.uint8)  # fp8_ds_mla: 2 latent values, a scale, 1 rotary value
    q_THX, out_THR = torch.zeros(1, 2, 3, dtype=torch.bfloat16), torch.zeros(1, 2, 2)
    layout = ("fp8_ds_mla", 2, 1, 1.0, 1.0)
    with pytest.raises(ValueError, match="must be even"):
        _native.dense_mla("portable", q_THX, layout, pool, torch.tensor([0]), torch.tensor([1]), 0.1, out_THR, None, 1)


SIZES: dict[str, Callable[..., int]] = {
    "index": lambda rows, threads: _native.index_topk_scratch_bytes("portable", True, rows, 16, 4, "off", threads),
    "attention": lambda rows, threads: _native.attention_scratch_bytes("portable", rows, 8, 4, threads),
    "linear": lambda rows, threads: _native.linear_scratch_bytes("portable", False, 8, 8, rows, threads),
    "per_head": lambda rows, threads: _native.per_head_scratch_bytes("portable", False, 8, 8, rows, threads),
    "mlp": lambda rows, threads: _native.mlp_scratch_bytes("portable", False, 8, 8, rows, threads),
    "experts": lambda rows, threads: _native.experts_scratch_bytes("portable", False, 8, 8, 0, 2, 1, rows, threads),
    "route": lambda rows, threads: _native.route_scratch_bytes("portable", 8, 8, rows, threads),
    "rows": lambda rows, threads: _native.row_scratch_bytes(rows, threads),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sizes_of_no_call_are_refused(size: Callable[..., int]) -> None:
    assert size(1, 1) > 0
    for rows, threads in ((-1, 1), (1, 0), (1, -1)):
        with pytest.raises(ValueError, match=r"thread|shape"):
            size(rows, threads)
