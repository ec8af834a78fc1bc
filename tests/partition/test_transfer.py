"""Rank maps of a KV transfer between nodes of different tensor-parallel size."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from longfill.partition import expected_acks, tp_source_ranks

SIZES = [(a, b) for a in (1, 2, 3, 4, 6, 8, 16) for b in (1, 2, 3, 4, 6, 8, 16) if a % b == 0 or b % a == 0]


@pytest.mark.parametrize(("readers", "sources"), SIZES)
def test_a_reader_of_shares_reads_exactly_those_that_overlap_its_own(readers: int, sources: int) -> None:
    for rank in range(readers):
        low, high = Fraction(rank, readers), Fraction(rank + 1, readers)
        overlapping = [s for s in range(sources) if Fraction(s, sources) < high and Fraction(s + 1, sources) > low]
        assert list(tp_source_ranks(rank, readers, sources, replicated=False)) == overlapping


@pytest.mark.parametrize(("readers", "sources"), SIZES)
def test_readers_of_a_replicated_cache_read_one_rank_of_their_share_and_spread_evenly(
    readers: int, sources: int
) -> None:
    reads = Counter()
    for rank in range(readers):
        (source,) = tp_source_ranks(rank, readers, sources)
        assert source == tp_source_ranks(rank, readers, sources, replicated=False)[0]
        reads[source] += 1
    assert set(reads.values()) == {max(1, readers // sources)}


@pytest.mark.parametrize(("readers", "sources"), SIZES)
def test_every_producer_rank_gets_as_many_acks_as_it_expects(readers: int, sources: int) -> None:
    acks = Counter(s for rank in range(readers) for s in tp_source_ranks(rank, readers, sources, replicated=False))
    assert acks == dict.fromkeys(range(sources), expected_acks(sources, readers))


def test_examples() -> None:
    assert [tp_source_ranks(r, 8, 4) for r in range(8)] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert [tp_source_ranks(r, 4, 8) for r in range(4)] == [(0,), (2,), (4,), (6,)]
    assert tp_source_ranks(1, 2, 8, replicated=False) == (4, 5, 6, 7)
    assert (expected_acks(4, 8), expected_acks(8, 4), expected_acks(4, 4)) == (2, 1, 1)


@pytest.mark.parametrize(("readers", "sources"), [(6, 4), (4, 6), (3, 2)])
def test_sizes_that_straddle_are_refused(readers: int, sources: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        tp_source_ranks(0, readers, sources)
    with pytest.raises(ValueError, match="must be a multiple"):
        expected_acks(sources, readers)


@pytest.mark.parametrize(("rank", "readers", "sources"), [(-1, 2, 2), (2, 2, 2), (0, 0, 2), (0, 2, 0)])
def test_ranks_and_sizes_out_of_range_are_refused(rank: int, readers: int, sources: int) -> None:
    with pytest.raises(ValueError, match=r"must be (in|at least)"):
        tp_source_ranks(rank, readers, sources)
