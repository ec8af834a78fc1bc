"""Units as types: a page is not a token is not a slot. Imports nothing.

Arithmetic between units goes through the few functions that know the page size; everything else that mixes them is a
type error under mypy.
"""

from __future__ import annotations

from typing import NewType

PageId = NewType("PageId", int)
"""Index of a page (vLLM: block) in the pool; page 0 is the null page and never holds a token."""

NumPages = NewType("NumPages", int)
"""A count of pages."""

Slot = NewType("Slot", int)
"""Index of one token's row in the pool: page * page_size + offset. 64-bit."""

PageSize = NewType("PageSize", int)
"""Tokens in one page of one rank: the unit of allocation and of the kernels' page tables."""

HashBlockSize = NewType("HashBlockSize", int)
"""Tokens under one prefix hash: the page size times the decode-context-parallel ranks that share a page table."""

Bytes = NewType("Bytes", int)

SCALE_GROUP = 128
"""Latent values that share one scale in cache format `fp8_ds_mla`: the layout counts them, the kernels write them."""


def pages_for(num_tokens: int, page_size: PageSize) -> NumPages:
    """Pages that hold `num_tokens` tokens (rounded up)."""
    return NumPages(-(-num_tokens // page_size))
