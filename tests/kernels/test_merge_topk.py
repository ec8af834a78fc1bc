"""Candidates of several shards of a row's keys, merged to the selection over all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.conftest import MakeBackend
from tests.kernels.test_native_index_topk import Case, integer_case, random_case
from tests.kernels.test_visible_counts import select, with_counts
from tests.native import needs_native
from torch import Tensor

from longfill.kernels.cpu import isa_names, merge_scratch_bytes
from longfill.kernels.cpu.indexer import merge_topk
from longfill.kernels.interface import IndexCache

NAN, INF = float("nan"), float("inf")
# The fixture holds no state that an example could change.
examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shard_of(case: Case, positions: Tensor, page_size: int = 8) -> Case:
    """A cache of the keys at `positions` alone, in that order; what fills up the last page is never a key."""
    cache, pages = case.cache, case.request.pages
    assert cache.scales_NB is not None
    num_pages = max(1, -(-positions.numel() // page_size))
    values_LX = torch.full((num_pages * page_size, cache.dim), 0xFF, dtype=torch.uint8)
    scales_L = torch.full((num_pages * page_size,), NAN)
    at = pages[positions // cache.values_NBX.shape[1]], positions % cache.values_NBX.shape[1]
    values_LX[: positions.numel()], scales_L[: positions.numel()] = cache.values_NBX[at], cache.scales_NB[at]
    shard = IndexCache(
        values_LX.view(num_pages, page_size, -1), scales_L.view(num_pages, page_size), "fp8", cache.dim
    )  # fmt: skip
    return replace(case, cache=shard, request=replace(case.request, pages=torch.arange(num_pages)))


@pytest.mark.parametrize("tied", [False, True])
@given(
    world=st.integers(1, 5), interleave=st.sampled_from([1, 2, 16, 64]), rows=st.integers(1, 12),
    length=st.integers(1, 700), topk=st.sampled_from([1, 16, 64]),
)  # fmt: skip
@examples
def test_shards_of_the_keys_select_what_one_selection_does(
    backend_of: MakeBackend, tied: bool, world: int, interleave: int, rows: int, length: int, topk: int
) -> None:
    """Keys dealt out in turns, as under decode context parallelism; each row of each shard sees its share of them."""
    length = max(rows, length)
    case = integer_case(2, 16, length, rows)[0] if tied else random_case(2, 16, length, rows)
    backend = backend_of(torch.float32)
    want_TK, _ = select(backend, case, [[case.rows]], topk)
    positions, visible_T = torch.arange(length), case.rows.visible(0, rows)
    scores, found = [], []
    for rank in range(world):
        mine = positions[positions // interleave % world == rank]
        shard = shard_of(case, mine)
        counts_T = torch.searchsorted(mine, visible_T)
        local_TK, scores_TK = select(backend, shard, [[with_counts(shard, counts_T)]], topk)
        padded = torch.cat([mine, torch.tensor([-1])])  # -1 finds the last one
        scores.append(scores_TK)
        found.append(padded[local_TK.long()].int())
    merged_TK = torch.full((rows, topk), -7, dtype=torch.int32)
    backend.merge_topk(torch.cat(scores, 1), torch.cat(found, 1), merged_TK)
    assert torch.equal(merged_TK, want_TK)


def sorted_best(scores: list[float], positions: list[int], topk: int) -> list[int]:
    counted = [(-score, p) for score, p in zip(scores, positions, strict=True) if p >= 0 and score > -INF]
    chosen = sorted(p for _, p in sorted(counted)[:topk])
    return chosen + [-1] * (topk - len(chosen))


@given(
    shards=st.integers(1, 4), candidates=st.integers(0, 40), rows=st.integers(0, 9), topk=st.integers(1, 50),
    values=st.sampled_from([[0.0, -0.0], [1.0, 2.0, 3.0], [NAN, -INF, INF, 0.5, -0.5], [-1e-45, 1e-45, 0.0, 3e38]]),
    seed=st.integers(0, 999),
)  # fmt: skip
@examples
def test_merging_is_a_sort_by_score_and_then_position(
    backend_of: MakeBackend, shards: int, candidates: int, rows: int, topk: int, values: list[float], seed: int
) -> None:
    """Candidates in any order, with ties, padding anywhere, and scores that nobody may choose."""
    generator = torch.Generator().manual_seed(seed)
    count = shards * candidates
    order = torch.rand(rows, 2 * count, generator=generator).argsort(-1)[:, :count]
    positions_TN = order.int()
    positions_TN[torch.rand(rows, count, generator=generator) < 0.2] = -1
    scores_TN = torch.tensor(values)[torch.randint(len(values), (rows, count), generator=generator)]
    merged_TK = torch.full((rows, topk), -7, dtype=torch.int32)
    backend_of(torch.float32).merge_topk(scores_TN, positions_TN, merged_TK)
    for row in range(rows):
        assert merged_TK[row].tolist() == sorted_best(scores_TN[row].tolist(), positions_TN[row].tolist(), topk)


@pytest.mark.parametrize("isa", isa_names())
@needs_native
def test_rows_of_views_merge_alike_on_any_number_of_threads(isa: str) -> None:
    """GLM's top-k of four shards, as columns of wider tensors."""
    rows, count, topk = 33, 4 * 2048, 2048
    generator = torch.Generator().manual_seed(0)
    scores_TN = torch.randn(rows, count + 3, generator=generator)[:, 2:-1]
    shards = [torch.randperm(9000, generator=generator)[:2048].sort().values for _ in range(4)]
    positions_TN = torch.stack([4 * shard + rank for rank, shard in enumerate(shards)]).flatten().int().expand(rows, -1)
    want_TK = torch.stack(
        [
            positions_TN[row][scores_TN[row].argsort(descending=True, stable=True)[:topk]].sort().values
            for row in range(rows)
        ]
    )
    for num_threads in (1, 2, 3):
        room_TK = torch.full((rows, topk + 2), -7, dtype=torch.int32)
        merge_topk(scores_TN, positions_TN, room_TK[:, 1:-1], num_threads=num_threads, isa=isa)
        assert torch.equal(room_TK[:, 1:-1], want_TK)
        assert room_TK[:, [0, -1]].eq(-7).all()


@needs_native
def test_candidates_that_do_not_fit_are_refused() -> None:
    scores_TN, positions_TN = torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.int32)
    selection_TK = torch.zeros(2, 3, dtype=torch.int32)
    for bad in (
        (scores_TN[:1], positions_TN),
        (scores_TN, positions_TN[:, 1:]),
        (scores_TN.T.contiguous().T, positions_TN),
    ):
        with pytest.raises(ValueError, match="a score and a position"):
            merge_topk(*bad, selection_TK, num_threads=1)
    with pytest.raises(ValueError, match="k must be at least 1"):
        merge_topk(scores_TN, positions_TN, selection_TK[:, :0], num_threads=1)
    with pytest.raises(TypeError):
        merge_topk(scores_TN, positions_TN.long(), selection_TK, num_threads=1)
    assert merge_scratch_bytes(candidates=8192, num_threads=2) == 2 * merge_scratch_bytes(
        candidates=8192, num_threads=1
    )
    assert merge_scratch_bytes(candidates=8192, num_threads=1) < 2**18
