"""Query rows on prefill-context-parallel ranks: complete, restorable, written once, and balanced."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition import PcpLayout, pcp_layout

SPLITS = ("zigzag", "interleave", "contiguous")


def test_worked_example_of_seven_tokens_on_two_ranks() -> None:
    layout = pcp_layout([7], ranks=2)
    batch = np.array(list("ABCDEFG"))
    assert ["".join(batch[rows]) for rows in layout.rank_rows] == ["ABG", "CDEF"]
    assert layout.hidden_restore_idx.tolist() == [0, 1, 4, 5, 6, 7, 2]
    assert layout.padded_gather_idx.tolist() == [0, 1, 6, 0, 2, 3, 4, 5]
    assert layout.kv_write_mask.tolist() == [True] * 3 + [False] + [True] * 4
    assert layout.padded_rows == 4
    assert layout.replicated == ()


def brute_force_rank_rows(
    lens: list[int], ranks: int, decode: list[bool], shard_decodes: bool, split: str
) -> list[list[int]]:
    """Rank by rank, piece by piece, with lists."""
    out: list[list[int]] = [[] for _ in range(ranks)]
    cut_rows, turn, start = [], 0, 0
    for length, is_decode in zip(lens, decode, strict=True):
        rows = list(range(start, start + length))
        start += length
        piece = (length + 2 * ranks - 1) // (2 * ranks)
        pieces = [rows[i * piece : (i + 1) * piece] for i in range(2 * ranks)]
        if not rows:
            continue
        if is_decode and shard_decodes:
            out[turn % ranks] += rows
            turn += 1
        elif is_decode or (split == "zigzag" and not shard_decodes and not pieces[-1]):
            for rank in range(ranks):
                out[rank] += rows
        elif split == "zigzag":
            for rank in range(ranks):
                out[rank] += pieces[rank] + pieces[2 * ranks - 1 - rank]
        else:
            cut_rows += rows
    size = max(1, (len(cut_rows) + ranks - 1) // ranks)
    for rank in range(ranks):
        mine = cut_rows[rank::ranks] if split == "interleave" else cut_rows[rank * size : (rank + 1) * size]
        out[rank] = sorted(out[rank] + mine)
    return out


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[bool], int, bool, str]:
    lens = draw(st.lists(st.integers(0, 25), max_size=6))
    decode = draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    return lens, decode, draw(st.integers(1, 5)), draw(st.booleans()), draw(st.sampled_from(SPLITS))


def layout_of(batch: tuple[list[int], list[bool], int, bool, str]) -> PcpLayout:
    lens, decode, ranks, shard_decodes, split = batch
    return pcp_layout(lens, ranks=ranks, is_decode=decode, shard_decodes=shard_decodes, split=split)


@given(batch=batches())
def test_rank_rows_equal_a_brute_force(batch: tuple[list[int], list[bool], int, bool, str]) -> None:
    lens, decode, ranks, shard_decodes, split = batch
    got = [rows.tolist() for rows in layout_of(batch).rank_rows]
    assert got == brute_force_rank_rows(lens, ranks, decode, shard_decodes, split)


def test_zigzag_equals_the_brute_force_for_every_short_request() -> None:
    for ranks in (1, 2, 3, 4, 8):
        for length in range(4 * ranks + 3):
            for shard_decodes in (False, True):
                got = pcp_layout([length], ranks=ranks, shard_decodes=shard_decodes)
                want = brute_force_rank_rows([length], ranks, [False], shard_decodes, "zigzag")
                assert [rows.tolist() for rows in got.rank_rows] == want


@given(batch=batches())
def test_gather_and_restore_are_inverse_and_kv_is_written_once(
    batch: tuple[list[int], list[bool], int, bool, str],
) -> None:
    lens, _, ranks, _, _ = batch
    layout, total = layout_of(batch), sum(lens)
    assert layout.padded_gather_idx[layout.hidden_restore_idx].tolist() == list(range(total))
    assert sorted(layout.padded_gather_idx[layout.kv_write_mask].tolist()) == list(range(total))
    assert layout.padded_gather_idx.size == layout.kv_write_mask.size == ranks * layout.padded_rows
    for rank, rows in enumerate(layout.rank_rows):
        own = layout.padded_gather_idx[rank * layout.padded_rows :][: layout.padded_rows]
        assert own[: rows.size].tolist() == rows.tolist()
        assert not own[rows.size :].any(), "padding points at row 0"
        assert not layout.kv_write_mask[rank * layout.padded_rows + rows.size :][: layout.padded_rows - rows.size].any()


@given(batch=batches())
def test_a_row_is_on_every_rank_if_replicated_else_on_one(
    batch: tuple[list[int], list[bool], int, bool, str],
) -> None:
    lens, _, ranks, shard_decodes, _ = batch
    layout = layout_of(batch)
    copies = np.zeros(sum(lens), dtype=int)
    for rows in layout.rank_rows:
        copies[rows] += 1
    request_of = np.repeat(np.arange(len(lens)), lens)
    want = np.where(np.isin(request_of, layout.replicated), ranks, 1)
    assert copies.tolist() == want.tolist()
    assert not (shard_decodes and layout.replicated)


def test_decodes_go_to_every_rank_or_in_turn_to_one() -> None:
    decodes = [True, True, True, False]
    everywhere = pcp_layout([1, 0, 1, 8], ranks=2, is_decode=decodes)
    assert everywhere.replicated == (0, 2)
    assert [r.tolist() for r in everywhere.rank_rows] == [[0, 1, 2, 3, 8, 9], [0, 1, 4, 5, 6, 7]]
    assert everywhere.kv_write_mask.tolist() == [True] * 6 + [False] * 2 + [True] * 4
    in_turn = pcp_layout([1, 0, 1, 8], ranks=2, is_decode=decodes, shard_decodes=True)
    assert [r.tolist() for r in in_turn.rank_rows] == [[0, 2, 3, 8, 9], [1, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("length", "replicated"), [(4, False), (5, True), (6, True), (7, False), (3, True), (8, False)]
)
def test_a_request_that_leaves_a_piece_empty_is_replicated_unless_decodes_are_sharded(
    length: int, replicated: bool
) -> None:
    assert pcp_layout([length], ranks=2).replicated == ((0,) if replicated else ())
    assert pcp_layout([length], ranks=2, shard_decodes=True).replicated == ()


def test_a_rank_may_stay_without_rows() -> None:
    layout = pcp_layout([1], ranks=3, shard_decodes=True)
    assert [rows.size for rows in layout.rank_rows] == [1, 0, 0]
    assert layout.kv_write_mask.tolist() == [True, False, False]


def causal_speedup(split: str, length: int, chunk: int, ranks: int) -> Fraction:
    """One rank's causal work over that of the slowest of `ranks`, summed over a prompt's chunks."""
    alone, slowest = 0, 0
    rows = pcp_layout([chunk], ranks=ranks, split=split).rank_rows  # type: ignore[arg-type]
    for start in range(0, length, chunk):
        work = [int((start + r + 1).sum()) for r in rows]
        alone, slowest = alone + sum(work), slowest + max(work)
    return Fraction(alone, slowest)


def test_four_zigzag_ranks_are_exactly_four_times_as_fast_on_causal_work() -> None:
    assert causal_speedup("zigzag", 16384, 16384, 4) == 4
    assert causal_speedup("zigzag", 1 << 20, 16384, 4) == 4


def test_four_contiguous_ranks_lose_most_in_the_first_chunk() -> None:
    assert round(float(causal_speedup("contiguous", 16384, 16384, 4)), 2) == 2.29
    assert round(float(causal_speedup("contiguous", 1 << 20, 16384, 4)), 2) == 3.95
    assert 3.99 < causal_speedup("interleave", 16384, 16384, 4) < 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 2, "is_decode": [True]}, "is_decode has shape"),
        ({"ranks": 2, "split": "ring"}, "split 'ring' is not one of zigzag, interleave, contiguous"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pcp_layout([4, 4], **arguments)  # type: ignore[arg-type]
