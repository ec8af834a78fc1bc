"""Absorbed attention over pages: tiles merged by log-sum-exp, one result whichever way rows are read."""

from __future__ import annotations

import pytest
import torch
from tests.allocations import count_allocations
from tests.kernels.caches import RANK, ROPE, make_caches, random
from torch import Tensor

from longfill.kernels.interface import LatentCache, RequestRows
from longfill.kernels.reference import attention
from longfill.kernels.reference.attention import gather_rows, merge, read_rows, sparse_mla

FORMATS = ["float32", "bfloat16", "fp8", "fp8_ds_mla"]
SCALE = 0.2
TILE = 32


def dense_mla(
    q_THX: Tensor, cache: LatentCache, request: RequestRows, first_position: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Of rows at consecutive positions, each of which sees all up to its own."""
    visible_T = torch.arange(first_position + 1, first_position + q_THX.shape[0] + 1)
    return attention.dense_mla(q_THX, cache, request, visible_T, scale)


def single_pass(q_THX: Tensor, cache: LatentCache, request: RequestRows, first_position: int) -> tuple[Tensor, Tensor]:
    """Causal softmax in fp64 over the whole context at once: outputs and log-sum-exp."""
    length = first_position + q_THX.shape[0]
    keys_LX = read_rows(cache, request.pages, torch.arange(length)).double()
    scores_THL = torch.einsum("thx,lx->thl", q_THX.double(), keys_LX) * SCALE
    hidden_TL = torch.arange(length) > torch.arange(first_position, length)[:, None]
    scores_THL.masked_fill_(hidden_TL[:, None], float("-inf"))
    return scores_THL.softmax(-1) @ keys_LX[:, :RANK], scores_THL.logsumexp(-1)


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CONTEXT_TILE", TILE)


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1, 10 * TILE - 1, 10 * TILE, 10 * TILE + 1])
def test_mem_04_a_context_of_many_tiles_equals_a_single_pass(cache_format: str, length: int) -> None:
    for rows in {1, min(length, 5), length}:
        cache, _, request = make_caches(length, latent_format=cache_format, query_len=rows, scale=2.0**-4)
        q_THX = random(rows, 3, RANK + ROPE, seed=9)
        out, lse = dense_mla(q_THX, cache, request, request.start, SCALE)
        want, want_lse = single_pass(q_THX, cache, request, request.start)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tile")
def test_mem_04_the_peak_does_not_depend_on_the_prefix() -> None:
    q_THX = random(7, 4, RANK + ROPE)
    peaks = []
    for length in (10 * TILE, 80 * TILE):
        cache, _, request = make_caches(length, latent_format="bfloat16", query_len=7)
        peaks.append(count_allocations(lambda c=cache, r=request: dense_mla(q_THX, c, r, r.start, SCALE)))
    assert peaks[0] == peaks[1]


def poison(cache: LatentCache, request: RequestRows, position: int, value: float, column: int) -> None:
    """Put `value` into a stored float32 row."""
    page_size = cache.rows_NBX.shape[1]
    row = cache.rows_NBX[request.pages[position // page_size], position % page_size]
    row[4 * column : 4 * column + 4] = torch.tensor([value]).view(torch.uint8)


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, RANK - 1, RANK])
@pytest.mark.parametrize("position", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE - 1])
def test_a_broken_row_reaches_no_row_before_it(value: float, column: int, position: int) -> None:
    length = 3 * TILE
    q_THX = random(length, 3, RANK + ROPE, seed=9)
    cache, _, request = make_caches(length, query_len=length)
    clean, clean_lse = dense_mla(q_THX, cache, request, 0, SCALE)
    poison(cache, request, position, value, column)
    together, lse = dense_mla(q_THX, cache, request, 0, SCALE)
    assert torch.equal(together[:position], clean[:position])
    assert torch.equal(lse[:position], clean_lse[:position])
    # Rows that do see it get the same whoever is beside them.
    alone = torch.cat([dense_mla(q_THX[row : row + 1], cache, request, row, SCALE)[0] for row in range(length)])
    assert torch.equal(together.nan_to_num(nan=7e7), alone.nan_to_num(nan=7e7))
    assert together[position].isnan().any()


@pytest.mark.usefixtures("small_tile")
def test_many_broken_rows_reach_only_those_that_see_them() -> None:
    length = 2 * TILE
    q_THX = random(length, 3, RANK + ROPE, seed=9)
    cache, _, request = make_caches(length, query_len=length)
    clean, _ = dense_mla(q_THX, cache, request, 0, SCALE)
    for position in range(20, length, 3):
        poison(cache, request, position, float("nan"), position % RANK)
    got, _ = dense_mla(q_THX, cache, request, 0, SCALE)
    assert torch.equal(got[:20], clean[:20])
    assert got[20:].isnan().all()


def test_merging_partial_results_in_any_split_gives_the_whole() -> None:
    scores, values = 30 * random(6, 40).double(), random(40, RANK, seed=1).double()
    for cut in (0, 1, 20, 39, 40):
        parts = []
        for span in (slice(0, cut), slice(cut, 40)):
            lse = scores[:, span].logsumexp(-1) if scores[:, span].numel() else torch.full((6,), float("-inf"))
            weights = scores[:, span].softmax(-1)
            parts.append(((weights @ values[span]).float(), lse.float()))
        (out, lse), (other, other_lse) = parts
        merge(out, lse, other, other_lse)
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1))


def test_merging_rows_without_keys_gives_zero_and_minus_infinity() -> None:
    out, lse = torch.zeros(2, 4), torch.full((2,), float("-inf"))
    merge(out, lse, torch.zeros(2, 4), torch.full((2,), float("-inf")))
    assert out.tolist() == [[0.0] * 4] * 2
    assert lse.tolist() == [float("-inf")] * 2
    merge(out, lse, torch.ones(2, 4), torch.tensor([-3.0, float("-inf")]))
    assert out.tolist() == [[1.0] * 4, [0.0] * 4]
    assert lse.tolist() == [-3.0, float("-inf")]


def random_selection(rows: int, start: int, k: int) -> Tensor:
    """Ascending positions of each row's causal range, -1 behind them."""
    selection_TK = torch.full((rows, k), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for row in range(rows):
        positions = torch.randperm(start + row + 1, generator=generator)[:k].sort().values
        selection_TK[row, : positions.numel()] = positions.to(torch.int32)
    return selection_TK


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_gathered_and_paged_rows_give_the_same_bits(cache_format: str, page_size: int) -> None:
    length, rows = 100, 60
    cache, _, request = make_caches(
        length, latent_format=cache_format, page_size=page_size, query_len=rows, scale=2.0**-5
    )
    context_LX = torch.empty(length, RANK + ROPE, dtype=torch.float32 if cache_format == "float32" else torch.bfloat16)
    gather_rows(cache, request, context_LX)
    selection_TK = random_selection(rows, request.start, 16)
    q_THX = random(rows, 4, RANK + ROPE, seed=2)
    paged = sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    gathered = sparse_mla(q_THX, cache, request, selection_TK, SCALE, context_LX)[0]
    assert torch.equal(paged, gathered)
    assert paged.isfinite().all()


def test_sparse_attention_is_softmax_over_the_selected_rows() -> None:
    cache, _, request = make_caches(50, query_len=50)
    selection_TK = random_selection(50, 0, 12)
    q_THX = random(50, 4, RANK + ROPE, seed=2)
    got = sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    for row in range(50):
        chosen = selection_TK[row][selection_TK[row] >= 0].long()
        keys = read_rows(cache, request.pages, chosen).double()
        want = (q_THX[row].double() @ keys.T * SCALE).softmax(-1) @ keys[:, :RANK]
        torch.testing.assert_close(got[row].double(), want, rtol=1e-4, atol=1e-5)


def test_a_row_that_selects_nothing_gives_zero() -> None:
    cache, _, request = make_caches(50, query_len=4)
    selection_TK = random_selection(4, request.start, 12)
    q_THX = random(4, 4, RANK + ROPE, seed=2)
    want = sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    selection_TK[2] = -1
    got = sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    want[2] = 0
    assert torch.equal(got, want)


def test_selecting_everything_equals_dense() -> None:
    cache, _, request = make_caches(40, query_len=40)
    q_THX = random(40, 4, RANK + ROPE, seed=2)
    out, lse = dense_mla(q_THX, cache, request, 0, SCALE)
    got, got_lse = sparse_mla(q_THX, cache, request, random_selection(40, 0, 40), SCALE)
    torch.testing.assert_close(got, out)
    torch.testing.assert_close(got_lse, lse)
