"""Where a token's row lies in the pool: page tables and slots.

May import NumPy, units and `partition.lengths`. Invariant: a page table is only ever read with the block size that it
was built for; the kernel's blocks, the pool's pages and the compression of keys are three types.
"""

from __future__ import annotations

from typing import NewType

import numpy as np

from longfill.partition.lengths import Int64Array, positive
from longfill.units import PageSize

KernelBlockSize = NewType("KernelBlockSize", int)
"""Tokens in one block of a kernel that addresses the pool in smaller units than pages; divides the page size."""

CompressRatio = NewType("CompressRatio", int)
"""Tokens under one stored row; divides the page size."""

UNCOMPRESSED = CompressRatio(1)
NO_SLOT = -1
"""Slot of a token that stores no row: it does not complete a group of `compress_ratio` tokens."""


def slot_mapping(
    pages: Int64Array,
    positions: Int64Array,
    page_size: PageSize | KernelBlockSize,
    compress_ratio: CompressRatio = UNCOMPRESSED,
) -> Int64Array:
    """int64 [T]: the pool row of each token of one request.

    `pages` int64 [W] is the request's table of pages (or of kernel blocks), `positions` int64 [T] the tokens'
    positions, and `page_size` the tokens in one block *of that table*. With `compress_ratio` c a block stores
    `page_size / c` rows, and the last token of each group of c stores its row; the others get `NO_SLOT`.

    Raises ValueError for a position outside the table (an index past it would hit another request's rows), a page
    below 1 (page 0 is the null page), or a compress ratio that does not divide the page size.
    """
    positive("page_size", page_size)
    rows_per_block, rest = divmod(page_size, positive("compress_ratio", compress_ratio))
    if rest:
        raise ValueError(f"compress_ratio {compress_ratio} does not divide the page size {page_size}")
    if positions.size:
        check_table(pages, int(positions.min()), int(positions.max()), page_size)
    rows = positions // compress_ratio
    blocks = pages[rows // rows_per_block]
    slots = blocks * rows_per_block + rows % rows_per_block
    if compress_ratio > 1:
        slots[(positions + 1) % compress_ratio != 0] = NO_SLOT
    return slots


def check_table(pages: Int64Array, low: int, high: int, page_size: int, where: str = "") -> None:
    """Raise ValueError, behind the prefix `where`, unless the table has a page for positions `low` to `high`."""
    if low < 0 or high >= pages.size * page_size:
        raise ValueError(
            f"{where}position {low if low < 0 else high} is outside its page table of {pages.size} pages of "
            f"{page_size} tokens; allocate the pages before the step is planned"
        )
    first = low // page_size
    used = pages[first : high // page_size + 1]
    if used.min() < 1:
        missing = first + int(used.argmin())
        raise ValueError(
            f"{where}entry {missing} of the page table is {used.min()}; pages that hold tokens are allocated from 1 on"
        )


def kernel_block_table(pages: Int64Array, page_size: PageSize, kernel_block: KernelBlockSize) -> Int64Array:
    """int64 [W * page_size / kernel_block]: the same pages as a table of the kernel's smaller blocks.

    The pool is one array of rows, so page p is the kernel's blocks p * k to p * k + k - 1, and slots computed from
    either table with its own block size are equal. Raises ValueError where the block does not divide the page.
    """
    blocks_per_page, rest = divmod(positive("page_size", page_size), positive("kernel_block", kernel_block))
    if rest:
        raise ValueError(f"kernel_block {kernel_block} does not divide the page size {page_size}")
    return (pages[:, None] * blocks_per_page + np.arange(blocks_per_page)).reshape(-1)
