"""Requests get pages all or nothing, find what is computed and theirs to share, and leave nothing behind."""

from dataclasses import replace

import numpy as np
import pytest

from longfill.cache import KVCacheManager, PrefixHit, PrefixIdentity
from longfill.errors import ConfigError, LongfillError
from longfill.request import Request, SamplingParams
from longfill.units import NumPages, PageSize

IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})


def manager_of(
    usable: int, page_size: int = 4, identity: PrefixIdentity | None = IDENTITY, *, check_token_ids: bool = True
) -> KVCacheManager:
    return KVCacheManager(NumPages(usable + 1), PageSize(page_size), identity=identity, check_token_ids=check_token_ids)


def request_of(name: str, tokens: list[int] | np.ndarray, salt: str = "") -> Request:
    return Request(name, tokens, SamplingParams(), cache_salt=salt)


def compute(cache: KVCacheManager, request: Request) -> PrefixHit:
    """Admit a request and compute all its tokens."""
    hit = cache.lookup(request)
    assert cache.allocate(request, request.num_tokens, hit)
    cache.publish(request, request.num_tokens)
    return hit


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (31, 28), (32, 28), (33, 32), (35, 32)])
def test_a_repeated_prompt_hits_whole_pages_but_never_its_last_token(length: int, hit: int) -> None:
    cache = manager_of(20)
    first = request_of("a", np.arange(length))
    assert compute(cache, first) == PrefixHit([], 0)
    found = cache.lookup(request_of("b", np.arange(length)))
    assert found.num_tokens == hit
    assert found.pages == cache.page_table("a")[: hit // 4].tolist()


@pytest.mark.parametrize(("common", "hit"), [(149, 144), (150, 144), (159, 144), (160, 160), (161, 160)])
def test_a_hit_never_reaches_past_the_common_prefix(common: int, hit: int) -> None:
    cache = manager_of(40, 16)
    compute(cache, request_of("a", np.arange(200)))
    other = np.arange(200)
    other[common:] = 7
    assert cache.lookup(request_of("b", other)).num_tokens == hit


def test_pages_are_found_only_once_computed() -> None:
    cache = manager_of(8)
    a, b = request_of("a", np.arange(12)), request_of("b", np.arange(12))
    assert cache.allocate(a, 12, cache.lookup(a))
    assert cache.lookup(b).num_tokens == 0
    cache.publish(a, 7)
    assert cache.lookup(b).num_tokens == 4
    cache.publish(a, 8)
    assert cache.lookup(b).num_tokens == 8


def test_allocation_is_all_or_nothing() -> None:
    cache = manager_of(4)
    a = request_of("a", np.arange(40))
    assert not cache.can_allocate(a, 17)
    assert not cache.allocate(a, 17)
    assert cache.num_free_pages == 4
    assert cache.allocate(a, 16)
    assert cache.allocate(a, 13)
    assert len(cache.page_table("a")) == 4
    assert cache.usage == 1.0
    cache.check()


def test_a_free_hit_page_counts_as_needed_and_a_held_one_does_not() -> None:
    cache = manager_of(5)
    a = request_of("a", np.arange(13))
    compute(cache, a)
    b = request_of("b", np.arange(13))
    assert cache.can_allocate(b, 13, cache.lookup(b)), "three pages are shared, one is free"
    cache.free("a")
    blocker = request_of("x", [99] * 8)
    assert cache.allocate(blocker, 8)
    assert not cache.can_allocate(b, 13, cache.lookup(b)), "three hit pages are free, the fourth is not there"
    assert not cache.allocate(b, 13, cache.lookup(b))
    assert cache.allocate(b, 12, cache.lookup(b))
    cache.check()


def test_admission_never_evicts_its_own_hit() -> None:
    cache = manager_of(4)
    compute(cache, request_of("a", np.arange(9)))
    cache.free("a")
    b = request_of("b", np.arange(16))
    hit = cache.lookup(b)
    assert cache.allocate(b, 16, hit)
    assert cache.page_table("b")[:2].tolist() == hit.pages
    cache.check()


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    cache = manager_of(4)
    compute(cache, request_of("a", np.arange(16)))
    cache.free("a")
    for taken, left in [(1, 12), (2, 8), (3, 4), (4, 0)]:
        assert cache.allocate(request_of("x", [99] * 16), 4 * taken)
        assert cache.lookup(request_of("b", np.arange(17))).num_tokens == left


def test_a_prefix_hit_every_turn_survives_a_hundred_one_shot_prompts() -> None:
    cache = manager_of(12)
    system = list(range(16))
    compute(cache, request_of("start", system))
    cache.free("start")
    for turn in range(100):
        one_shot = request_of("one-shot", [1000 + turn] * 20)
        compute(cache, one_shot)
        cache.free("one-shot")
        chat = request_of("chat", [*system, 5000 + turn])
        assert compute(cache, chat).num_tokens == 16
        cache.free("chat")


def test_a_page_table_view_stays_right_while_the_table_grows() -> None:
    cache = manager_of(100, 1)
    a = request_of("a", np.arange(100))
    cache.allocate(a, 3)
    early = cache.page_table("a")
    kept = early.tolist()
    cache.allocate(a, 100)
    assert early.tolist() == kept == cache.page_table("a")[:3].tolist()
    assert early.dtype == np.int64


def test_freeing_a_request_that_owns_nothing_is_fine() -> None:
    cache = manager_of(4)
    cache.free("nobody")
    cache.check()


def test_a_hit_is_refused_by_a_request_that_owns_pages() -> None:
    cache = manager_of(8)
    a = request_of("a", np.arange(9))
    compute(cache, a)
    with pytest.raises(LongfillError, match="owns pages already"):
        cache.allocate(a, 9, cache.lookup(a))


def test_an_id_used_again_is_hashed_by_its_new_tokens() -> None:
    cache = manager_of(8)
    compute(cache, request_of("same", np.arange(9)))
    cache.free("same")
    assert compute(cache, request_of("same", np.arange(9) + 50)).num_tokens == 0


def test_without_an_identity_nothing_is_ever_found() -> None:
    cache = manager_of(8, identity=None)
    compute(cache, request_of("a", np.arange(9)))
    cache.free("a")
    assert cache.lookup(request_of("b", np.arange(9))) == PrefixHit([], 0)
    assert (cache.stats.queries, cache.stats.hits) == (0, 0)


def test_reset_waits_for_running_requests() -> None:
    cache = manager_of(8)
    compute(cache, request_of("a", np.arange(9)))
    assert not cache.reset_prefix_cache()
    cache.free("a")
    assert cache.reset_prefix_cache()
    assert cache.lookup(request_of("b", np.arange(9))).num_tokens == 0
    cache.check()


def test_statistics_count_first_admissions_only() -> None:
    cache = manager_of(8)
    a = request_of("a", np.arange(9))
    compute(cache, a)
    cache.free("a")
    a.num_preemptions += 1
    assert compute(cache, a).num_tokens == 8
    assert (cache.stats.queries, cache.stats.hits) == (9, 0)
    compute(cache, request_of("b", np.arange(11)))
    assert (cache.stats.queries, cache.stats.hits) == (20, 8)


def test_a_refused_admission_is_not_counted() -> None:
    cache = manager_of(2)
    a = request_of("a", np.arange(9))
    assert not cache.allocate(a, 9, cache.lookup(a))
    assert (cache.stats.queries, cache.stats.hits) == (0, 0)


def test_pfx_02_two_salts_never_share_a_page() -> None:
    cache = manager_of(12)
    compute(cache, request_of("a", np.arange(9), salt="x"))
    cache.free("a")
    assert cache.lookup(request_of("b", np.arange(9), salt="y")).num_tokens == 0
    assert cache.lookup(request_of("c", np.arange(9))).num_tokens == 0
    assert cache.lookup(request_of("d", np.arange(9), salt="x")).num_tokens == 8


def test_pfx_02_the_servers_salt_decides_for_all_its_requests() -> None:
    cache = manager_of(12, identity=replace(IDENTITY, salt="server"))
    compute(cache, request_of("a", np.arange(9), salt="x"))
    assert cache.lookup(request_of("b", np.arange(9), salt="y")).num_tokens == 8


def test_pfx_02_debug_mode_compares_the_token_ids_of_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longfill.cache.prefix.block_hash", lambda *_: b"collides".ljust(32))
    cache = manager_of(12, check_token_ids=True)
    compute(cache, request_of("a", np.arange(4)))
    assert cache.lookup(request_of("b", np.arange(5))).num_tokens == 4, "the same tokens are a hit"
    with pytest.raises(LongfillError, match="same prefix hash but holds other tokens"):
        cache.lookup(request_of("c", [9, 1, 2, 3, 4]))


def test_a_page_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        manager_of(4, 0)
