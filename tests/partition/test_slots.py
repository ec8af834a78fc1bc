"""A token's slot is one place in the pool, whatever unit the table counts in and however the prompt was cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition import CompressRatio, KernelBlockSize, kernel_block_table, slot_mapping
from longfill.units import PageSize


@st.composite
def caches(draw: st.DrawFn) -> tuple[int, int, int, np.ndarray, int]:
    """(kernel block, page size, compress ratio, page table, pages of the pool); units divide as the cache needs."""
    ratio = draw(st.sampled_from([1, 2, 4, 8]))
    kernel_block = ratio * draw(st.sampled_from([1, 2, 3, 16]))
    page_size = kernel_block * draw(st.integers(1, 5))
    pool = draw(st.integers(4, 40))
    width = draw(st.integers(1, pool - 1))
    pages = np.array(draw(st.permutations(range(1, pool)))[:width], dtype=np.int64)
    return kernel_block, page_size, ratio, pages, pool


@given(cache=caches(), data=st.data())
def test_dsa_08_slots_are_unique_inside_the_cache_and_independent_of_chunking(
    cache: tuple[int, int, int, np.ndarray, int], data: st.DataObject
) -> None:
    kernel_block, page_size, ratio, pages, pool = cache
    length = data.draw(st.integers(1, pages.size * page_size))
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=5)) | {0, length})
    tables = [
        (pages, page_size),
        (kernel_block_table(pages, PageSize(page_size), KernelBlockSize(kernel_block)), kernel_block),
    ]
    whole = []
    for table, block in tables:
        chunks = [
            slot_mapping(table, np.arange(a, b), PageSize(block), CompressRatio(ratio))
            for a, b in itertools.pairwise(cuts)
        ]
        whole.append(np.concatenate(chunks))
        assert (
            whole[-1].tolist() == slot_mapping(table, np.arange(length), PageSize(block), CompressRatio(ratio)).tolist()
        )
    by_page, by_kernel_block = whole
    assert by_page.tolist() == by_kernel_block.tolist(), "the table's unit does not move a row"
    stored = by_page[by_page >= 0]
    assert stored.size == length // ratio
    assert np.unique(stored).size == stored.size
    assert stored.size == 0 or stored.max() < pool * page_size // ratio
    assert np.isin(stored // (page_size // ratio), pages).all(), "every row lies in a page of this request"


@given(cache=caches(), data=st.data())
def test_dsa_08_a_slot_is_found_by_walking_the_pages(
    cache: tuple[int, int, int, np.ndarray, int], data: st.DataObject
) -> None:
    _, page_size, ratio, pages, _ = cache
    position = data.draw(st.integers(0, pages.size * page_size - 1))
    (slot,) = slot_mapping(pages, np.array([position]), PageSize(page_size), CompressRatio(ratio))
    rows = [
        page * (page_size // ratio) + row if last else -1
        for page in pages.tolist()
        for row in range(page_size // ratio)
        for last in [False] * (ratio - 1) + [True]
    ]
    assert slot == rows[position]


@pytest.mark.parametrize("position", [-1, 3 * 64, 3 * 64 + 1, 1 << 40])
def test_dsa_08_a_position_outside_the_table_raises(position: int) -> None:
    pages = np.array([7, 2, 9])
    with pytest.raises(ValueError, match=rf"position {position} is outside its page table of 3 pages of 64 tokens"):
        slot_mapping(pages, np.array([5, position]), PageSize(64))


def test_dsa_08_a_table_read_with_the_wrong_unit_raises_past_its_end() -> None:
    """The fault itself: a table of 64-token pages read as one of 16-token blocks ends after a quarter."""
    pages = np.arange(1, 5)
    slot_mapping(pages, np.arange(4 * 64), PageSize(64))
    with pytest.raises(ValueError, match="position 255 is outside"):
        slot_mapping(pages, np.arange(4 * 64), KernelBlockSize(16))


def test_dsa_08_page_edges() -> None:
    pages = np.array([7, 2, 9])
    got = slot_mapping(pages, np.array([0, 63, 64, 127, 128, 191]), PageSize(64))
    assert got.tolist() == [448, 511, 128, 191, 576, 639]


def test_slots_are_64_bit() -> None:
    slots = slot_mapping(np.array([1 << 30]), np.array([63]), PageSize(64))
    assert slots.dtype == np.int64
    assert slots.tolist() == [(1 << 36) + 63]


def test_units_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="compress_ratio 3 does not divide the page size 64"):
        slot_mapping(np.array([1]), np.array([0]), PageSize(64), CompressRatio(3))
    with pytest.raises(ValueError, match="kernel_block 48 does not divide the page size 64"):
        kernel_block_table(np.array([1]), PageSize(64), KernelBlockSize(48))


def test_a_page_that_was_never_allocated_is_refused() -> None:
    with pytest.raises(ValueError, match="entry 1 of the page table is -1"):
        slot_mapping(np.array([3, -1]), np.array([5, 70]), PageSize(64))


def test_the_null_page_is_no_place_for_a_token() -> None:
    with pytest.raises(ValueError, match="entry 1 of the page table is 0"):
        slot_mapping(np.array([3, 0]), np.array([5, 64]), PageSize(64))
    assert slot_mapping(np.array([3, 0]), np.array([5, 63]), PageSize(64)).tolist() == [197, 255]
