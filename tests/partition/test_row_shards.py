"""Query rows are sharded over tensor-parallel ranks by the keys they score."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition import row_shards


def costs_of(queries: list[int], seqs: list[int], ratio: int) -> list[int]:
    return [(position + 1) // ratio for q, s in zip(queries, seqs, strict=True) for position in range(s - q, s)]


def brute_force(queries: list[int], seqs: list[int], ranks: int, ratio: int) -> list[int] | None:
    costs = costs_of(queries, seqs, ratio)
    if ranks == 1 or len(costs) < ranks or sum(costs) == 0:
        return None
    bounds = []
    for rank in range(1, ranks):
        row = 0
        while sum(costs[: row + 1]) < rank * sum(costs) // ranks:
            row += 1
        bounds.append(max(row, bounds[-1] + 1 if bounds else 1))
    end = len(costs)
    for i in reversed(range(len(bounds))):
        bounds[i] = end = min(bounds[i], end - 1)
    edges = [0, *bounds, len(costs)]
    return [b - a for a, b in itertools.pairwise(edges)]


batches = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=5)


@given(batch=batches, ranks=st.integers(1, 9), ratio=st.integers(1, 4))
def test_shards_equal_a_brute_force_and_cover_every_row(batch: list[tuple[int, int]], ranks: int, ratio: int) -> None:
    queries, seqs = [q for q, _ in batch], [q + start for q, start in batch]
    shards = row_shards(queries, seqs, ranks=ranks, compress_ratio=ratio)
    assert shards == brute_force(queries, seqs, ranks, ratio)
    if shards is not None:
        assert len(shards) == ranks
        assert sum(shards) == sum(queries)
        assert min(shards) >= 1


@given(start=st.integers(0, 1 << 20), ranks=st.sampled_from([2, 4, 8]))
def test_ranks_score_even_shares_of_a_long_chunk(start: int, ranks: int) -> None:
    shards = row_shards([4096], [start + 4096], ranks=ranks)
    assert shards is not None
    costs = np.split(np.arange(start + 1, start + 4097), np.cumsum(shards)[:-1])
    work = [int(c.sum()) for c in costs]
    assert max(work) - min(work) <= 2 * (start + 4096), "no rank is off by more than two rows"


def test_eight_ranks_on_16384_rows() -> None:
    assert row_shards([16384], [16384], ranks=8) == [5792, 2399, 1841, 1553, 1367, 1236, 1137, 1059]
    late = row_shards([16384], [1 << 20], ranks=8)
    assert late is not None
    assert (late[0], late[1], late[-1]) == (2062, 2058, 2034)


@pytest.mark.parametrize(
    ("rows", "ranks", "min_rows", "pays"),
    [(8, 1, 1, False), (7, 8, 1, False), (8, 8, 1, True), (99, 2, 100, False), (100, 2, 100, True), (0, 2, 1, False)],
)
def test_sharding_is_declined_where_it_does_not_pay(rows: int, ranks: int, min_rows: int, pays: bool) -> None:
    assert (row_shards([rows], [rows], ranks=ranks, min_rows=min_rows) is not None) is pays


def test_rows_that_score_nothing_are_not_sharded() -> None:
    assert row_shards([3, 3], [3, 3], ranks=2, compress_ratio=4) is None
    assert row_shards([3, 4], [3, 4], ranks=2, compress_ratio=4) is not None
