"""Operations of groups between real processes: what arrives where, in what order it is added, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.parallel.processes import Ranks, mesh_of
from torch import Tensor

from longfill.parallel import Group, Link, Mesh, tree_sum

SIZE = 4
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(SIZE, timeout=30)
    yield ranks
    ranks.close()


def rows_of(rank: int, count: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What anybody knows of the rows that a rank has, so that each can tell what it should get."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 100, (count, width), generator=generator).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def layouts(link: Link, size: int) -> Mesh | None:
    """Meshes of 1 to 4 ranks on the same four processes: dp holds the others."""
    return {1: mesh_of(link, dp=4), 2: mesh_of(link, tp=2, dp=2), 3: None, 4: mesh_of(link, tp=4)}[size]


def group_of(link: Link, size: int) -> tuple[Group, Mesh] | None:
    """A group of the first ranks, or of two pairs; None for a rank that stands aside."""
    mesh = layouts(link, size) or mesh_of(link, tp=4)
    if size == 3:
        if link.rank == 3:
            return None
        return Group((0, 1, 2), link.rank, link, mesh.comm), mesh
    return mesh.tp, mesh


def gather(link: Link, counts: list[int], width: int, dtype: torch.dtype, form: str) -> Any:
    found = group_of(link, len(counts))
    if found is None:
        return True
    group, mesh = found
    mine = rows_of(group.ranks[group.rank], counts[group.rank], width, dtype)
    whole = torch.cat([bits(rows_of(r, n, width, dtype)) for r, n in zip(group.ranks, counts, strict=True)]).view(dtype)
    # Neither rows nor columns in one piece.
    given_rows = mine.t().contiguous().t() if width > 1 else mine
    if form == "gather_rows":
        got = group.gather_rows("kv", given_rows, counts)
    elif form == "in place":
        out, first = torch.full_like(whole, 77), sum(counts[: group.rank])
        own = out[first : first + counts[group.rank]].copy_(given_rows)
        got = group.gather_rows("kv", own, counts, out=out)
        assert group.size == 1 or got is out
    elif form == "start_gather":
        held = given_rows.clone()
        pending = group.start_gather("kv", held, counts)
        if group.size > 1:
            held.zero_()
        got = pending.wait()
        assert pending.wait() is got
    else:
        found_rows = group.to_first("kv", given_rows, counts)
        assert (found_rows is None) == (group.rank > 0)
        got = whole if found_rows is None else found_rows
    others = group.size - 1 if form != "to_first" else int(group.rank > 0)
    sent = others * mine.nbytes
    assert mesh.comm.take() == ({"kv": sent} if sent else {})
    assert mesh.comm.take() == {}
    return same(got, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["gather_rows", "in place", "start_gather", "to_first"])
@pytest.mark.parametrize("counts", [[3], [2, 5], [0, 4], [1, 0, 3], [2, 2, 2, 2], [0, 7, 0, 1], [0, 0, 0, 0]], ids=str)
def test_a_gather_gives_every_members_rows_in_order_and_counts_what_was_sent(
    ranks: Ranks, counts: list[int], form: str, dtype: torch.dtype
) -> None:
    assert all(ranks.run(gather, counts, 3, dtype, form))


def exchange(link: Link, table: list[list[int]], dtype: torch.dtype) -> bool:
    """`table[i][j]` rows go from member i to member j."""
    found = group_of(link, len(table))
    if found is None:
        return True
    group, mesh = found
    me, width = group.rank, 5

    def part(i: int, j: int) -> Tensor:
        return rows_of(group.ranks[i] * 10 + j, table[i][j], width, dtype)

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([bits(each) for each in parts]).view(dtype)

    send, receive = table[me], [row[me] for row in table]
    members = range(group.size)
    got = group.exchange_rows("experts", joined([part(me, j) for j in members]), send, receive)
    sent = sum(part(me, j).nbytes for j in members if j != me)
    assert mesh.comm.take() == ({"experts": sent} if sent else {})
    return same(got, joined([part(i, me) for i in members]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), size=st.integers(1, SIZE), dtype=st.sampled_from(DTYPES))
def test_an_exchange_brings_each_row_to_its_member(
    ranks: Ranks, data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    line = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    table = data.draw(st.lists(line, min_size=size, max_size=size))
    assert all(ranks.run(exchange, table, dtype))


def partial_of(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Values whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, 7, generator=generator) * 10.0 ** (3 - rank)).to(dtype)


def add(link: Link, counts: list[int], dtype: torch.dtype, out: torch.dtype | None) -> bool:
    found = group_of(link, len(counts))
    if found is None:
        return True
    group, mesh = found
    total, me = sum(counts), group.rank
    partials = [partial_of(rank, total, dtype) for rank in group.ranks]
    got = group.sum_rows("hidden", partials[me], counts, dtype=out)
    first = sum(counts[:me])
    a = [each[first : first + counts[me]].float() for each in partials]
    expected = {
        1: lambda: a[0],
        2: lambda: a[0] + a[1],
        3: lambda: (a[0] + a[1]) + a[2],
        4: lambda: (a[0] + a[1]) + (a[2] + a[3]),
    }[group.size]()
    sent = partials[me].nbytes // max(total, 1) * (total - counts[me])
    assert mesh.comm.take() == ({"hidden": sent} if sent else {})
    return same(got, expected.to(dtype if out is None else out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[4], [3, 2], [0, 5], [1, 2, 0], [1, 1, 1, 1], [0, 9, 2, 0]], ids=str)
def test_a_sum_is_added_in_float32_along_the_tree_and_rounded_once(
    ranks: Ranks, counts: list[int], dtype: torch.dtype, out: torch.dtype | None
) -> None:
    assert all(ranks.run(add, counts, dtype, out))


def from_first(link: Link, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    found = group_of(link, size)
    if found is None:
        return True
    group, mesh = found
    x = rows_of(group.ranks[0], shape[0], shape[1], dtype)
    got = group.from_first("tokens", x if group.rank == 0 else None, shape, dtype)
    sent = x.nbytes * (group.size - 1) if group.rank == 0 else 0
    assert mesh.comm.take() == ({"tokens": sent} if sent else {})
    return same(got, x)


@pytest.mark.parametrize("size", range(1, SIZE + 1))
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)], ids=str)
def test_all_get_what_the_first_has(ranks: Ranks, size: int, shape: tuple[int, int]) -> None:
    assert all(ranks.run(from_first, size, shape, torch.int64))


def least(link: Link, size: int, values: list[int]) -> int:
    found = group_of(link, size)
    return min(values) if found is None else found[0].smallest("pages", values[found[0].rank])


@pytest.mark.parametrize("size", range(1, SIZE + 1))
def test_all_agree_on_the_smallest(ranks: Ranks, size: int) -> None:
    values = [7, 2**40, 5, 9][:size]
    assert set(ranks.run(least, size, values)) == {min(values)}


def overlap(link: Link) -> bool:
    """Three gathers in flight, of which the last is waited for first, beside an operation of another group."""
    mesh = mesh_of(link, tp=2, pcp=2)
    pending = [mesh.pcp.start_gather(f"kv{n}", torch.full((100, 3), 10 * n + link.rank), [100, 100]) for n in range(3)]
    total = mesh.tp.sum_rows("hidden", torch.full((2, 1), float(link.rank)), [1, 1])
    for n, each in reversed(list(enumerate(pending))):
        expected = torch.cat([torch.full((100, 3), 10 * n + rank) for rank in mesh.pcp.ranks])
        assert torch.equal(each.wait(), expected)
    return total.item() == sum(mesh.tp.ranks)


def test_operations_of_several_groups_can_be_under_way_at_once(ranks: Ranks) -> None:
    assert all(ranks.run(overlap))


def wrong_counts(link: Link) -> list[str]:
    group, errors = mesh_of(link, tp=4).tp, []
    for attempt in (
        lambda: group.gather_rows("kv", torch.zeros(2, 1), [2, 2, 2]),
        lambda: group.gather_rows("kv", torch.zeros(3, 1), [2, 2, 2, 2]),
        lambda: group.sum_rows("kv", torch.zeros(3, 1), [1, 1, 1, 1]),
        lambda: group.exchange_rows("kv", torch.zeros(3, 1), [1, 1, 1, 1], [1, 1, 1, 1]),
        lambda: group.exchange_rows("kv", torch.zeros(4, 1), [1, 1, 1, 1], [2, 2]),
    ):
        with pytest.raises(ValueError, match="kv") as caught:
            attempt()
        errors.append(str(caught.value))
    return errors


def test_counts_that_do_not_fit_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    errors = ranks.run(wrong_counts)[1]
    assert "3 counts for 4 members" in errors[0]
    assert "gives 3 rows where counts say 2" in errors[1]
    assert all(ranks.run(gather, [1, 1, 1, 1], 2, torch.float32, "gather_rows"))


def test_one_rank_exchanges_nothing_and_needs_no_link() -> None:
    mesh, x = Mesh.single(), torch.arange(6).reshape(3, 2)
    for group in (mesh.tp, mesh.pcp, mesh.dcp, mesh.rows, mesh.ep, mesh.world):
        assert (group.size, group.rank, group.ranks) == (1, 0, (0,))
        assert group.gather_rows("a", x, [3]) is x
        assert group.start_gather("a", x, [3]).wait() is x
        assert group.exchange_rows("a", x, [3], [3]) is x
        assert group.to_first("a", x, [3]) is x
        assert group.from_first("a", x, x.shape, x.dtype) is x
        assert group.sum_rows("a", x, [3], dtype=torch.float32).dtype == torch.float32
        assert group.smallest("a", 5) == 5
    assert mesh.comm.take() == mesh.comm.take_seconds() == {}


@settings(deadline=None)
@given(slices=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9))
def test_sums_nest_so_that_the_number_of_ranks_changes_no_bit(slices: int, ranks: int, seed: int) -> None:
    """Each of R ranks adds its own slices, then the ranks are added: the same as one rank with all slices."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(50, generator=generator) * 10.0 ** (i % 5) for i in range(slices * ranks)]
    own = [tree_sum(parts[r * slices : (r + 1) * slices]) for r in range(ranks)]
    assert torch.equal(tree_sum(own), tree_sum(parts))


ORDERS = {
    1: lambda v: v[0],
    2: lambda v: v[0] + v[1],
    3: lambda v: (v[0] + v[1]) + v[2],
    5: lambda v: ((v[0] + v[1]) + (v[2] + v[3])) + v[4],
    6: lambda v: ((v[0] + v[1]) + (v[2] + v[3])) + (v[4] + v[5]),
    7: lambda v: ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6]),
}


@pytest.mark.parametrize("count", ORDERS)
def test_the_tree_has_the_largest_power_of_two_to_the_left(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(99, generator=generator) * 10.0 ** (i % 4) for i in range(count)]
    assert torch.equal(tree_sum(values), ORDERS[count](values))
