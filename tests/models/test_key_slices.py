"""Selections cut into slices of the keys: every position once, where its rank keeps it, and merged in one order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longfill.models.key_slices import KeySlices, merge_parts
from longfill.partition.dcp import dcp_local_position, dcp_owner

selections = st.lists(st.lists(st.integers(0, 200), max_size=12, unique=True).map(sorted), min_size=1, max_size=5)


def tensor(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([row + [-1] * (12 - len(row)) for row in rows], dtype=torch.int32)


@given(rows=selections, ranks=st.sampled_from([1, 2, 4]), factor=st.sampled_from([1, 2]), interleave=st.integers(1, 5))
def test_every_position_lies_in_one_slice_of_the_rank_that_keeps_it(
    rows: list[list[int]], ranks: int, factor: int, interleave: int
) -> None:
    found: list[set[int]] = [set() for _ in rows]
    for rank in range(ranks):
        slices = KeySlices(ranks * factor, interleave, ranks, rank)
        parts = list(slices.split(tensor(rows)))
        assert len(parts) == factor
        for part in parts:
            for seen, local, whole in zip(found, part.tolist(), slices.everywhere(part).tolist(), strict=True):
                kept = [(a, b) for a, b in zip(local, whole, strict=True) if a >= 0]
                assert local[: len(kept)] == sorted(a for a, _ in kept), "ascending, what is missing behind"
                for at, position in kept:
                    assert dcp_owner(position, ranks=ranks, interleave=interleave) == rank
                    assert dcp_local_position(position, ranks=ranks, interleave=interleave) == at
                    assert position not in seen
                    seen.add(position)
    assert found == [set(row) for row in rows]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parts_of_ranks_merge_to_the_bits_of_one_rank(ranks: int) -> None:
    """What a rank merges of its own slices first, one rank merges first too."""
    generator = torch.Generator().manual_seed(ranks)
    outs = torch.randn(8, 3, 2, 5, generator=generator)
    lses = torch.randn(8, 3, 2, generator=generator)
    lses[3] = float("-inf")  # a slice without keys
    want = merge_parts([(o.clone(), x.clone()) for o, x in zip(outs, lses, strict=True)])
    own = [merge_parts([(outs[i].clone(), lses[i].clone()) for i in range(r, 8, ranks)]) for r in range(ranks)]
    got = merge_parts(own)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_slices_must_be_shared_evenly() -> None:
    with pytest.raises(ValueError, match="8 slices cannot be shared by 3 ranks"):
        KeySlices(8, 1, 3, 0)
