"""The mesh of ranks: every axis cuts the world into groups, and DCP lies over TP and PCP."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition.mesh import Axis, MeshShape

sizes = st.integers(1, 3)


@given(tp=sizes, pcp=sizes, pp=sizes, dp=sizes, data=st.data())
def test_every_axis_cuts_the_world_into_groups_of_one_size(
    tp: int, pcp: int, pp: int, dp: int, data: st.DataObject
) -> None:
    dcp = data.draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0] if pcp == 1 else [1, pcp, tp * pcp]))
    shape = MeshShape(tp=tp, pcp=pcp, dcp=dcp, pp=pp, dp=dp)
    want = {"tp": tp, "pcp": pcp, "dcp": dcp, "rows": tp * pcp, "ep": tp * pcp * dp, "world": tp * pcp * pp * dp}
    for axis in get_args(Axis):
        groups = {shape.group(axis, rank) for rank in range(shape.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(shape.world))
        assert {len(group) for group in groups} == {want[axis]}
        assert all(list(group) == sorted(group) for group in groups)
    for rank in range(shape.world):
        at = shape.place(rank)
        assert ((at["dp"] * pp + at["pp"]) * pcp + at["pcp"]) * tp + at["tp"] == rank


def test_a_worked_example() -> None:
    shape = MeshShape(tp=2, pcp=2, dcp=4)
    assert shape.group("tp", 3) == (2, 3)
    assert shape.group("pcp", 3) == (1, 3)
    assert shape.group("dcp", 3) == (0, 1, 2, 3)
    assert MeshShape(tp=2, pcp=2, dcp=2).group("dcp", 3) == (1, 3)
    assert MeshShape(tp=4, dcp=2).group("dcp", 3) == (2, 3)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 3, "dcp": 2}, "dcp is 2; without pcp it must divide tp, which is 3"),
        ({"tp": 2, "pcp": 2, "dcp": 3}, "dcp is 3; with pcp 2 and tp 2 it must be 1, 2 or 4"),
        ({"tp": 0}, "tp is 0; it must be at least 1"),
    ],
)
def test_other_sizes_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MeshShape(**sizes)
