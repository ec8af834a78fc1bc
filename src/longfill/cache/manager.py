"""Who owns which pages, and which of them later requests may share.

Imports the pool, the prefix hashes, units and Request. Invariant: pages free, cached (free, but findable) and in use
add up to the pool, and a page can be found by its hash only once all its tokens are computed. Pages of a request that
ended while steps in flight may still write them stay in use ("parked") until those steps are booked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from longfill.cache.page_table import PageTable, PageTableView
from longfill.cache.pool import BlockPool
from longfill.cache.prefix import PrefixHashChain, PrefixIdentity
from longfill.errors import ConfigError, LongfillError
from longfill.request import Request, TokenIds
from longfill.units import HashBlockSize, NumPages, PageId, PageSize, pages_for


@dataclass(frozen=True)
class PrefixHit:
    """Pages that already hold a request's first `num_tokens` tokens; whole pages only."""

    pages: list[PageId]
    num_tokens: int


@dataclass
class PrefixStats:
    """Totals over first admissions, in tokens. A resumed request that finds its own pages is no hit and no query."""

    queries: int = 0
    hits: int = 0


@dataclass
class _Owned:
    """What one request owns: its pages, and how many of them, from the front, have their hash."""

    pages: PageTable = field(default_factory=PageTable)
    num_published: int = 0


class KVCacheManager:
    """Allocates the pages of one KV pool to requests and finds the prefixes that are in it.

    `num_pages` counts the null page. `identity` None turns prefix caching off. `check_token_ids` keeps the token ids
    of every published page and compares them on each hit (for debugging: 8 bytes a token).
    """

    def __init__(
        self,
        num_pages: NumPages,
        page_size: PageSize,
        *,
        identity: PrefixIdentity | None,
        check_token_ids: bool = False,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"--block-size: a page must hold at least 1 token, got {page_size}")
        self.page_size = page_size
        self.stats = PrefixStats()
        self._pool = BlockPool(num_pages)
        self._identity = identity
        self._owned: dict[str, _Owned] = {}
        self._parked: deque[tuple[int, PageTable]] = deque()  # with the last step that may write them
        # Keyed by the request itself, not by its id: a later request under the same id has other tokens.
        self._chains: WeakKeyDictionary[Request, PrefixHashChain] = WeakKeyDictionary()
        self._published_tokens: dict[PageId, TokenIds] | None = {} if check_token_ids else None

    @property
    def num_usable_pages(self) -> NumPages:
        """Pages that can hold tokens: all but the null page."""
        return self._pool.num_usable_pages

    @property
    def num_free_pages(self) -> NumPages:
        """Pages that nobody holds, cached ones included."""
        return self._pool.num_free_pages

    @property
    def num_cached_pages(self) -> NumPages:
        """Free pages whose prefix can be found."""
        return self._pool.num_cached_pages

    @property
    def usage(self) -> float:
        """Share of the usable pages that requests hold, 0 to 1."""
        return 1.0 - self.num_free_pages / self.num_usable_pages

    def lookup(self, request: Request) -> PrefixHit:
        """The longest cached prefix of `request`: whole pages, and never its last token, whose logits are wanted.

        Changes nothing; `allocate` makes use of the hit, before any other call that takes pages.
        """
        pages: list[PageId] = []
        if self._identity is None:
            return PrefixHit(pages, 0)
        chain = self._chain(request)
        for block in range((request.num_tokens - 1) // self.page_size):
            page = self._pool.find(chain.block(block, request.token_ids))
            if page is None:
                break
            self._compare_token_ids(request, block, page)
            pages.append(page)
        return PrefixHit(pages, len(pages) * self.page_size)

    def num_pages_needed(self, request: Request, num_tokens_total: int, hit: PrefixHit | None = None) -> NumPages:
        """Pages that leave the free list when `allocate` gets the same arguments."""
        hit_pages = hit.pages if hit else []
        return NumPages(
            self._num_new_pages(request, num_tokens_total, hit_pages) + self._pool.num_free_among(hit_pages)
        )

    def can_allocate(self, request: Request, num_tokens_total: int, hit: PrefixHit | None = None) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        return self.num_pages_needed(request, num_tokens_total, hit) <= self.num_free_pages

    def num_pages_missing(
        self, request: Request, num_tokens_total: int, hit: PrefixHit | None = None, *, gone: Collection[str] = ()
    ) -> int:
        """Pages that `allocate` would lack once the steps in flight are booked and the requests `gone` have let go.

        Negative where that leaves more than it needs.
        """
        leaving = [self._owned[request_id].pages for request_id in gone] + [table for _, table in self._parked]
        lets_go = Counter(page for table in leaving for page in table.view.tolist())
        freed = {page for page, count in lets_go.items() if self._pool.num_holders(PageId(page)) == count}
        needed = self.num_pages_needed(request, num_tokens_total, hit)
        needed_again = sum(page in freed for page in hit.pages) if hit else 0
        return needed + needed_again - self.num_free_pages - len(freed)

    def allocate(self, request: Request, num_tokens_total: int, hit: PrefixHit | None = None) -> bool:
        """Give `request` the pages that its first `num_tokens_total` tokens need, all or none (False).

        Pages it owns already stay. `hit` marks an admission: it comes from `lookup` for a request that owns nothing.
        """
        if not self.can_allocate(request, num_tokens_total, hit):
            return False
        owned = self._owned.setdefault(request.request_id, _Owned())
        if hit is not None:
            if len(owned.pages):
                raise LongfillError(f"request {request.request_id} owns pages already, so it cannot take a prefix hit")
            # Before taking others, which could evict these.
            self._pool.hold(hit.pages, is_hit=request.num_preemptions == 0)
            owned.pages.extend(hit.pages)
            owned.num_published = len(hit.pages)
            self._count(request, hit)
        owned.pages.extend(self._pool.take(self._num_new_pages(request, num_tokens_total, [])))
        return True

    def num_owned_pages(self, request_id: str) -> NumPages:
        """Pages in a request's table; 0 for one that owns none."""
        owned = self._owned.get(request_id)
        return NumPages(len(owned.pages) if owned else 0)

    def page_table(self, request_id: str) -> PageTableView:
        """Pages of a request in token order: int64 [pages], a view that stays right while the table grows."""
        return self._owned[request_id].pages.view

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Let the pages that `num_computed_tokens` tokens fill be found. Only for tokens that *are* computed."""
        if self._identity is None:
            return
        owned = self._owned[request.request_id]
        chain = self._chain(request)
        num_full = num_computed_tokens // self.page_size
        for block in range(owned.num_published, num_full):
            page = PageId(int(owned.pages.view[block]))
            self._pool.publish(page, chain.block(block, request.token_ids))
            if self._published_tokens is not None:
                self._published_tokens[page] = self._block_tokens(request, block).copy()
        owned.num_published = max(owned.num_published, num_full)

    def free(self, request_id: str, *, busy_until: int | None = None) -> None:
        """Let go of a request's pages; published ones stay findable until reused. Fine for one that owns none.

        `busy_until` is the last step in flight that may write them: they are parked until `settle` has passed it.
        """
        owned = self._owned.pop(request_id, None)
        if owned is None:
            return
        if busy_until is None:
            self._release(owned.pages)
        else:
            self._parked.append((busy_until, owned.pages))

    def settle(self, oldest_in_flight: int | None) -> None:
        """Free what was parked for steps before `oldest_in_flight` (None: no step is in flight)."""
        kept: deque[tuple[int, PageTable]] = deque()
        for busy_until, pages in self._parked:
            if oldest_in_flight is None or busy_until < oldest_in_flight:
                self._release(pages)
            else:
                kept.append((busy_until, pages))
        self._parked = kept

    def _release(self, pages: PageTable) -> None:
        # Tail before head: the end of a prefix is worth less than its beginning.
        self._pool.release(PageId(page) for page in pages.view[::-1].tolist())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; refused (False) while any request, or a step in flight, holds pages."""
        return self._pool.forget_hashes()

    def check(self) -> None:
        """Assert that free + cached + in use = total, and that every page is where its owners think it is."""
        holders = np.zeros(self._pool.num_pages, dtype=np.int64)
        for table in [*(owned.pages for owned in self._owned.values()), *(table for _, table in self._parked)]:
            assert np.unique(table.view).size == len(table), "a page stands twice in one table"
            np.add.at(holders, table.view, 1)
        self._pool.check(holders.tolist())

    def _num_new_pages(self, request: Request, num_tokens_total: int, hit_pages: list[PageId]) -> NumPages:
        num_owned = self.num_owned_pages(request.request_id) + len(hit_pages)
        return NumPages(max(0, pages_for(num_tokens_total, self.page_size) - num_owned))

    def _chain(self, request: Request) -> PrefixHashChain:
        chain = self._chains.get(request)
        if chain is None:
            assert self._identity is not None
            # One rank holds whole pages, so a hash covers exactly one page.
            chain = PrefixHashChain(self._identity.root(request.cache_salt), HashBlockSize(self.page_size))
            self._chains[request] = chain
        return chain

    def _count(self, request: Request, hit: PrefixHit) -> None:
        if self._identity is not None and request.num_preemptions == 0:
            self.stats.queries += request.num_tokens
            self.stats.hits += hit.num_tokens

    def _block_tokens(self, request: Request, block: int) -> TokenIds:
        return request.token_ids[block * self.page_size : (block + 1) * self.page_size]

    def _compare_token_ids(self, request: Request, block: int, page: PageId) -> None:
        if self._published_tokens is None:
            return
        if not np.array_equal(self._published_tokens[page], self._block_tokens(request, block)):
            raise LongfillError(
                f"request {request.request_id}, block {block}: page {page} has the same prefix hash but holds other "
                "tokens; the hash chain or its bookkeeping is broken"
            )
