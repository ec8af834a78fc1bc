"""Tokens on decode-context-parallel ranks: each on one rank, without holes."""

from __future__ import annotations

import numpy as np
import pytest

from longfill.partition import dcp_local_lens, dcp_local_position, dcp_owner


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 4, 64])
def test_dealing_runs_of_tokens_out_like_cards_gives_owner_position_and_length(ranks: int, interleave: int) -> None:
    held: list[list[int]] = [[] for _ in range(ranks)]
    lens: list[list[int]] = []
    for token in range(300):
        lens.append([len(tokens) for tokens in held])
        rank = dcp_owner(token, ranks=ranks, interleave=interleave)
        assert rank == (token // interleave) % ranks
        assert dcp_local_position(token, ranks=ranks, interleave=interleave) == len(held[rank])
        held[rank].append(token)
    for rank in range(ranks):
        got = dcp_local_lens(range(300), ranks=ranks, rank=rank, interleave=interleave)
        assert got.dtype == np.int64
        assert got.tolist() == [at[rank] for at in lens]


def test_arrays_give_the_same_as_single_positions() -> None:
    positions = np.arange(50, dtype=np.int64)
    owners = dcp_owner(positions, ranks=3, interleave=4)
    places = dcp_local_position(positions, ranks=3, interleave=4)
    assert owners.tolist() == [dcp_owner(p, ranks=3, interleave=4) for p in range(50)]
    assert places.tolist() == [dcp_local_position(p, ranks=3, interleave=4) for p in range(50)]


def test_long_contexts_sum_to_the_whole() -> None:
    lens = np.array([1 << 20, (1 << 20) - 1, 3 << 31])
    parts = sum(dcp_local_lens(lens, ranks=8, rank=rank, interleave=64) for rank in range(8))
    assert np.array_equal(parts, lens)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank is"):
        dcp_local_lens([1], ranks=4, rank=rank)


def test_an_interleave_of_zero_is_refused() -> None:
    for call in (dcp_owner, dcp_local_position):
        with pytest.raises(ValueError, match="interleave is 0"):
            call(3, ranks=2, interleave=0)
