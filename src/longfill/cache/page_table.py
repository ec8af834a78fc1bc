"""One request's page table as a growing array.

Imports numpy and units. Invariant: entries are appended, never changed, so a view handed out stays right while the
table grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longfill.units import PageId

PageTableView = npt.NDArray[np.int64]


class PageTable:
    """Page ids of one request in token order, int64; appending costs amortised O(1) per page."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def extend(self, pages: Sequence[PageId]) -> None:
        """Append pages."""
        end = self._len + len(pages)
        if end > self._pages.size:
            grown = np.empty(max(end, 2 * self._pages.size), dtype=np.int64)
            grown[: self._len] = self._pages[: self._len]
            self._pages = grown
        self._pages[self._len : end] = pages
        self._len = end

    @property
    def view(self) -> PageTableView:
        """int64 [pages so far], not a copy; for reading only."""
        return self._pages[: self._len]
