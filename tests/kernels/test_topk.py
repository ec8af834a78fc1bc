"""Exact top-k: the highest scores, ties to the lower position, ascending, never NaN or -inf."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longfill.kernels.reference import topk
from longfill.kernels.reference.topk import select_topk

SPECIAL = [0.0, -0.0, 1.0, 1.0, -1.0, 2.0, float("nan"), float("inf"), float("-inf")]


def naive(scores: list[list[float]], k: int) -> list[list[int]]:
    """The rule spelled out: a stable sort by falling score."""
    rows = []
    for row in scores:
        valid = [i for i, score in enumerate(row) if not math.isnan(score) and score != float("-inf")]
        chosen = sorted(sorted(valid, key=lambda i: (-row[i], i))[:k])
        rows.append(chosen + [-1] * (k - len(chosen)))
    return rows


def check(scores: Tensor, k: int) -> None:
    want = naive(scores.tolist(), k)
    got = select_topk(scores.clone(), k)
    assert got.dtype == torch.int32
    assert got.tolist() == want


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_selection_is_the_naive_sorts(data: st.DataObject) -> None:
    rows, length, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 40)), data.draw(st.integers(1, 12))
    score = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    flat = data.draw(st.lists(score, min_size=rows * length, max_size=rows * length))
    check(torch.tensor(flat, dtype=torch.float32).view(rows, length), k)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pruning_by_block_maxima_changes_nothing(data: st.DataObject) -> None:
    long_row, k = data.draw(st.sampled_from([1, 40, 130, topk.LONG_ROW])), data.draw(st.integers(1, 4))
    length = 16 * k + data.draw(st.integers(-1, 400))
    rows = data.draw(st.integers(1, 3))
    # Few distinct values, so that maxima tie across blocks; or whole blocks without a valid score.
    values = data.draw(st.sampled_from([SPECIAL, [float("-inf"), float("-inf"), float("nan"), 1.0], [0.0, 1.0]]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    weights = np.random.default_rng(seed).dirichlet(np.full(len(values), 0.3))
    scores = np.random.default_rng(seed).choice(values, (rows, length), p=weights)
    with mock.patch.object(topk, "LONG_ROW", long_row):
        check(torch.tensor(scores, dtype=torch.float32), k)


@pytest.mark.parametrize("around", [16 * 70, topk.LONG_ROW, 64 * 140])
@pytest.mark.parametrize("offset", [-1, 0, 1, 8, 31, 33])
def test_the_real_sizes_around_the_lengths_where_pruning_begins_and_widens(around: int, offset: int) -> None:
    k = 140 if around == 64 * 140 else 70
    length = around + offset
    generator = torch.Generator().manual_seed(1 + offset)
    scores = torch.randn(4, length, generator=generator)
    scores[1] = scores[1].round()  # ties everywhere
    scores[2] = float("-inf")
    scores[2, [3, 700, length - 1]] = torch.tensor([1.0, 1.0, 2.0])  # fewer than k valid
    scores[3, :-2] = float("nan")
    check(scores, k)


def test_a_causal_row_never_selects_its_future() -> None:
    scores = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    scores.masked_fill_(torch.ones(50, 50, dtype=torch.bool).triu(1), float("-inf"))
    selected = select_topk(scores.clone(), 8)
    assert (selected <= torch.arange(50)[:, None]).all()
    assert ((selected >= 0).sum(-1) == torch.arange(1, 51).clamp(max=8)).all()


def test_a_rows_selection_does_not_depend_on_its_neighbours() -> None:
    scores = torch.randn(9, 700, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    whole = select_topk(scores.clone(), 3)
    for row in range(9):
        assert torch.equal(select_topk(scores[row : row + 1].clone(), 3)[0], whole[row])
