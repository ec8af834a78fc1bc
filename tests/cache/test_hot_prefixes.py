"""PFX-08 and PFX-05: what is hit again outlives what is read once, and drafts cost a hit nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.cache.pool import HOT_SHARE, BlockPool
from longfill.cache.prefix import BlockHash
from longfill.request import Request, SamplingParams
from longfill.scheduler import Scheduler, SchedulerConfig
from longfill.units import NumPages, PageSize

IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})


class Cache:
    """A pool of 4-token pages and requests that are computed one after the other."""

    def __init__(self, usable: int) -> None:
        self.manager = KVCacheManager(NumPages(usable + 1), PageSize(4), identity=IDENTITY)
        self.usable = usable

    def serve(self, *parts: tuple[int, int], preempted: bool = False) -> int:
        """Compute a prompt of `parts` (a token, so many pages of it) and one token; returns how much was found."""
        tokens = np.repeat([token for token, _ in parts] + [-1], [4 * pages for _, pages in parts] + [1])
        request = Request("r", tokens, SamplingParams())
        request.num_preemptions = int(preempted)
        hit = self.manager.lookup(request)
        assert self.manager.allocate(request, request.num_tokens, hit)
        self.manager.publish(request, request.num_tokens)
        self.manager.free("r")
        self.manager.check()
        return hit.num_tokens

    def found(self, *parts: tuple[int, int]) -> int:
        tokens = np.repeat([token for token, _ in parts] + [-1], [4 * pages for _, pages in parts] + [1])
        return self.manager.lookup(Request("probe", tokens, SamplingParams())).num_tokens


def test_pfx_08_a_system_prompt_hit_each_turn_survives_a_hundred_one_shot_prompts() -> None:
    cache = Cache(24)
    cache.serve((1, 4), (2, 1))
    for turn in range(100):
        assert cache.serve((1, 4), (1000 + turn, 2)) == 16
        cache.serve((5000 + turn, 18))


def test_pfx_08_one_that_was_hit_once_survives_a_hundred_one_shot_prompts_without_another_hit() -> None:
    cache = Cache(24)
    cache.serve((1, 4))
    cache.serve((1, 4), (2, 1))
    for turn in range(100):
        cache.serve((5000 + turn, 18))
    assert cache.found((1, 4)) == 16


def test_pfx_08_one_that_was_never_hit_goes_with_the_first_that_needs_its_pages() -> None:
    cache = Cache(24)
    cache.serve((1, 4))
    cache.serve((5000, 23))
    assert cache.found((1, 4)) == 0


def test_pfx_08_a_one_shot_prompt_of_500k_tokens_leaves_the_hot_share_alone() -> None:
    """A pool of 12,000 pages of which hot prefixes fill 11,000: the prompt takes those beyond the share, no more."""
    usable, page = 12_000, 64
    manager = KVCacheManager(NumPages(usable + 1), PageSize(page), identity=IDENTITY)

    def serve(name: str, tokens: np.ndarray) -> None:
        request = Request(name, tokens, SamplingParams())
        assert manager.allocate(request, request.num_tokens, manager.lookup(request))
        manager.publish(request, request.num_tokens)
        manager.free(name)

    def found(i: int) -> int:
        return manager.lookup(Request("probe", np.full(100 * page + 1, i), SamplingParams())).num_tokens // page

    for _ in range(2):
        for i in range(110):
            serve(f"hot-{i}", np.full(100 * page + 1, i))
    assert sum(found(i) for i in range(110)) == 11_000
    evictable = usable - int(HOT_SHARE * usable)
    serve("one-shot", np.full(evictable * page, 10**6))
    assert sum(found(i) for i in range(110)) == HOT_SHARE * usable
    for i in range(20):
        serve(f"again-{i}", np.full(evictable * page, 10**6 + 1 + i))
    assert sum(found(i) for i in range(110)) == HOT_SHARE * usable, "one-shot prompts reuse each other's pages"
    serve("500K", np.full(500_000, 10**7))
    lost = int(HOT_SHARE * usable) - sum(found(i) for i in range(110))
    assert lost == -(-500_000 // page) - evictable, "of the hot share only what it cannot do without"
    assert found(109) == 100, "and that from those that were used longest ago"


@given(
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40),
    usable=st.integers(12, 20),
)
def test_pfx_08_a_leaf_goes_before_its_ancestors(turns: list[tuple[int, int, int]], usable: int) -> None:
    cache = Cache(usable)
    tree = set()
    for family, depth, leaf in turns:
        parts = [(family, 3), (10 * family + depth, 2), (100 + leaf, depth)]
        cache.serve(*parts)
        tree.add(tuple(parts))
    pool = cache.manager._pool
    # A page whose ancestor is gone cannot be found through the manager, only in the pool.
    for parts in tree:
        tokens = np.repeat([token for token, _ in parts] + [-1], [4 * pages for _, pages in parts] + [1])
        request = Request("probe", tokens, SamplingParams())
        chain = cache.manager._chain(request)
        held = [pool.find(chain.block(i, request.token_ids)) is not None for i in range((tokens.size - 1) // 4)]
        assert held == sorted(held, reverse=True)


def test_pfx_08_a_resumed_request_does_not_make_its_own_pages_hot() -> None:
    cache = Cache(24)
    cache.serve((1, 4))
    assert cache.serve((1, 4), preempted=True) == 16
    cache.serve((5000, 23))
    assert cache.found((1, 4)) == 0


def test_a_page_is_cold_again_when_its_content_is_gone() -> None:
    cache = Cache(8)
    cache.serve((1, 4))
    cache.serve((1, 4))
    cache.serve((2, 7))  # takes all, hot ones too
    cache.serve((3, 4))
    cache.serve((4, 4))
    assert cache.found((2, 7)) == 0, "pages that held a hot prefix are not hot for ever"


def test_resetting_forgets_what_was_hot_too() -> None:
    cache = Cache(12)
    cache.serve((1, 4))
    cache.serve((1, 4))
    assert cache.manager.reset_prefix_cache()
    cache.manager.check()
    assert cache.found((1, 4)) == 0
    cache.serve((2, 4))
    assert cache.found((2, 4)) == 16


def test_resetting_waits_for_steps_in_flight_that_hold_pages() -> None:
    cache = Cache(12).manager
    request = Request("r", np.arange(9), SamplingParams())
    assert cache.allocate(request, 9, cache.lookup(request))
    cache.publish(request, 8)
    cache.free("r", busy_until=3)
    assert not cache.reset_prefix_cache()
    assert cache.lookup(request).num_tokens == 8
    cache.settle(4)
    assert cache.reset_prefix_cache()
    assert cache.lookup(request).num_tokens == 0


@pytest.mark.parametrize("usable", [1, 2, 3, 4, 5, 100])
def test_no_more_than_the_share_of_the_free_pages_is_hot(usable: int) -> None:
    pool = BlockPool(NumPages(usable + 1))
    pages = pool.take(NumPages(usable))
    for page in pages:
        pool.publish(page, BlockHash(bytes([page % 256]) * 32))
    pool.release(pages)
    for page in pages:
        pool.hold([page])
        pool.release([page])
        pool.check([0] * (usable + 1))
    cold = usable - int(HOT_SHARE * usable)
    assert pool.take(NumPages(cold)) == pages[:cold], "the longest unused are cold again, and the first to be reused"


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pfx_05_a_repeated_prompt_of_eight_and_a_half_blocks_hits_eight(drafts: int, page_size: int) -> None:
    cache = KVCacheManager(NumPages(41), PageSize(page_size), identity=IDENTITY)
    config = SchedulerConfig(
        max_model_len=20 * page_size, max_num_batched_tokens=4096, max_num_seqs=4, num_speculative_tokens=drafts
    )
    scheduler = Scheduler(cache, config)
    for name in ("cold", "warm"):
        request = Request(name, np.arange(17 * page_size // 2), SamplingParams(max_tokens=6))
        scheduler.add_request(request)
        while scheduler.requests:
            schedule = scheduler.schedule()
            scheduler.update(schedule, {s.request_id: (7,) for s in schedule.requests if s.samples})
        assert request.num_cached_tokens == (8 * page_size if name == "warm" else 0)
