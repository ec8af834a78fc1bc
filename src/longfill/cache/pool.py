"""The pages of one KV pool: which are free, who may be reused first, which prefix hash each holds.

Imports units and errors. Invariant: a page is in the free list exactly when nobody holds it; in the list, pages
without a hash come before pages with one, those that no other request ever hit ("cold") before those that one did
("hot"), and both least recently used first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from longfill.cache.prefix import BlockHash
from longfill.errors import CapacityError, ConfigError, LongfillError
from longfill.units import NumPages, PageId

NULL_PAGE = PageId(0)
"""Never given out: page tables are padded with it, and rows nobody needs are written to it."""
HOT_SHARE = 0.75
"""Of the usable pages, at most so many that are free are kept as hot; the rest is for prefixes yet to be hit."""


class BlockPool:
    """Reference counts, prefix hashes and the free list of `num_pages` pages (the null page counts as one).

    The free list is two rings of page ids, doubly linked through two arrays. The cold one starts and ends at the null
    page, which is never free, the hot one at an entry behind the last page. All single-page operations are O(1). This
    is a segmented LRU (Karedla, Love, Wherry 1994): a page is hot from its first hit on, until it is reused, or until
    too many others that are hot were used after it; then it is cold again, and the last of those to be reused.
    """

    def __init__(self, num_pages: NumPages) -> None:
        if num_pages < 2:
            raise ConfigError(f"a KV pool needs at least 2 pages (page 0 is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.num_free_pages = NumPages(num_pages - 1)
        self.num_cached_pages = NumPages(0)
        """Free pages that hold a hash."""
        self._hot_end = PageId(num_pages)
        self._most_hot_free = int(HOT_SHARE * (num_pages - 1))
        self._num_hot_free = 0
        self._is_hot = bytearray(num_pages)
        # Arrays, not lists: a pool may have millions of pages, and boxed integers would take several times as much.
        self._next = array("q", [*range(1, num_pages), NULL_PAGE, self._hot_end])
        self._prev = array("q", [num_pages - 1, *range(num_pages - 1), self._hot_end])
        self._ref_count = array("q", bytes(8 * num_pages))
        self._hash: list[BlockHash | None] = [None] * num_pages
        # Pages by hash, in the order they were published. Requests that compute the same block side by side each
        # keep their own page, since their page tables are already in use.
        self._by_hash: dict[BlockHash, dict[PageId, None]] = {}

    @property
    def num_usable_pages(self) -> NumPages:
        """Pages that can hold tokens: all but the null page."""
        return NumPages(self.num_pages - 1)

    def find(self, block_hash: BlockHash) -> PageId | None:
        """A page that holds this block, free or in use."""
        pages = self._by_hash.get(block_hash)
        return next(iter(pages)) if pages else None

    def num_free_among(self, pages: Iterable[PageId]) -> NumPages:
        """How many of `pages` are free, and so leave the free list when they are held."""
        return NumPages(sum(self._ref_count[page] == 0 for page in pages))

    def num_holders(self, page: PageId) -> int:
        """Page tables that the page stands in."""
        return self._ref_count[page]

    def take(self, count: NumPages) -> list[PageId]:
        """Hold `count` free pages, next in the order of reuse; their old content can no longer be found.

        Raises CapacityError, with nothing changed, where fewer are free.
        """
        if count > self.num_free_pages:
            raise CapacityError(f"{count} pages asked for, {self.num_free_pages} of {self.num_usable_pages} are free")
        taken = []
        for _ in range(count):
            page = PageId(self._next[NULL_PAGE] or self._next[self._hot_end])
            self._unlink(page)
            self._drop_hash(page)
            self._ref_count[page] = 1
            taken.append(page)
        return taken

    def hold(self, pages: Sequence[PageId], *, is_hit: bool = True) -> None:
        """Hold pages that were found by hash; free ones leave the free list.

        `is_hit` is False for the request that computed them, whose use of them again does not make them hot.
        """
        for page in pages:
            if self._ref_count[page] == 0:
                self._unlink(page)
            self._ref_count[page] += 1
            if is_hit:
                self._is_hot[page] = 1

    def release(self, pages: Iterable[PageId]) -> None:
        """Let go of pages, in this order: earlier ones are reused before later ones where both hold a hash."""
        for page in pages:
            if self._ref_count[page] == 0:
                raise LongfillError(f"page {page} is released but nobody holds it: two owners believed it theirs")
            self._ref_count[page] -= 1
            if self._ref_count[page] == 0:
                self._put_in_list(page)

    def publish(self, page: PageId, block_hash: BlockHash) -> None:
        """Let a held page be found under `block_hash` from now on."""
        self._drop_hash(page)
        self._hash[page] = block_hash
        self._by_hash.setdefault(block_hash, {})[page] = None

    def forget_hashes(self) -> bool:
        """Make every page unfindable; refused (False, nothing changed) while any page is held."""
        if self.num_free_pages != self.num_usable_pages:
            return False
        while (page := PageId(self._next[self._hot_end])) != self._hot_end:
            self._cool(page)
        self._hash = [None] * self.num_pages
        self._by_hash.clear()
        self.num_cached_pages = NumPages(0)
        return True

    def check(self, holders: Sequence[int]) -> None:
        """Assert the invariants; `holders[page]` is how many owners the caller counts for each page."""
        cold, hot = self._ring(NULL_PAGE), self._ring(self._hot_end)
        free = cold + hot
        assert self._ref_count.tolist() == list(holders), "reference counts differ from the owners' page tables"
        assert holders[NULL_PAGE] == 0, "the null page is held"
        assert sorted(free) == [p for p in range(1, self.num_pages) if not holders[p]], "free list and holders disagree"
        cached = [p for p in free if self._hash[p] is not None]
        in_use = sum(count > 0 for count in holders)
        assert len(free) == self.num_free_pages, "the count of free pages is off"
        assert len(cached) == self.num_cached_pages, "the count of cached pages is off"
        assert len(free) + in_use == self.num_usable_pages, "a page was lost"
        assert free[len(free) - len(cached) :] == cached, "a page with a hash would be reused before one without"
        assert {p for p in free if self._is_hot[p]} == set(hot), "a page is in the wrong ring"
        assert len(hot) == self._num_hot_free <= self._most_hot_free, "too many hot pages, or their count is off"
        named = {p: h for h, pages in self._by_hash.items() for p in pages}
        assert named == {p: h for p, h in enumerate(self._hash) if h is not None}, "hash map and pages disagree"
        assert all(self._by_hash.values()), "a hash without pages is kept"

    def _ring(self, end: PageId) -> list[int]:
        """Free pages of one ring in the order of reuse; asserts that it is one."""
        pages, page = [], self._next[end]
        while page != end:
            assert self._prev[self._next[page]] == page, f"page {page}: broken link"
            pages.append(page)
            assert len(pages) <= self.num_usable_pages, "the free list does not end"
            page = self._next[page]
        return pages

    def _put_in_list(self, page: PageId) -> None:
        # Between a ring's last page and its end is the tail; behind its end is the head.
        if self._hash[page] is None:
            self._link_after(NULL_PAGE, page)
        elif not self._is_hot[page]:
            self._link_after(PageId(self._prev[NULL_PAGE]), page)
        else:
            self._link_after(PageId(self._prev[self._hot_end]), page)
            self._num_hot_free += 1
            if self._num_hot_free > self._most_hot_free:
                self._cool(PageId(self._next[self._hot_end]))

    def _cool(self, page: PageId) -> None:
        """Move a free hot page to the end of the cold ones."""
        self._unlink(page)
        self._is_hot[page] = 0
        self._put_in_list(page)

    def _drop_hash(self, page: PageId) -> None:
        block_hash = self._hash[page]
        if block_hash is None:
            return
        self._hash[page] = None
        self._is_hot[page] = 0
        pages = self._by_hash[block_hash]
        del pages[page]
        if not pages:
            del self._by_hash[block_hash]

    def _unlink(self, page: PageId) -> None:
        before, behind = self._prev[page], self._next[page]
        self._next[before], self._prev[behind] = behind, before
        self.num_free_pages = NumPages(self.num_free_pages - 1)
        self.num_cached_pages = NumPages(self.num_cached_pages - (self._hash[page] is not None))
        self._num_hot_free -= self._is_hot[page]

    def _link_after(self, before: PageId, page: PageId) -> None:
        behind = self._next[before]
        self._prev[page], self._next[page] = before, behind
        self._next[before], self._prev[behind] = page, page
        self.num_free_pages = NumPages(self.num_free_pages + 1)
        self.num_cached_pages = NumPages(self.num_cached_pages + (self._hash[page] is not None))
