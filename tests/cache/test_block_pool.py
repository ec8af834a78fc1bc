"""The pool hands each page to one owner, reuses worthless pages first, and the oldest prefixes after them."""

import pytest

from longfill.cache.pool import BlockPool
from longfill.cache.prefix import BlockHash
from longfill.errors import CapacityError, ConfigError, LongfillError
from longfill.units import NumPages


def name(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(32, b"."))


def pool_of(usable: int) -> BlockPool:
    return BlockPool(NumPages(usable + 1))


def test_the_null_page_is_never_given_out() -> None:
    pool = pool_of(3)
    assert sorted(pool.take(NumPages(3))) == [1, 2, 3]
    assert pool.num_free_pages == 0
    pool.check([0, 1, 1, 1])


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_usable_page_is_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(NumPages(num_pages))


def test_taking_one_page_too_many_changes_nothing() -> None:
    pool = pool_of(3)
    with pytest.raises(CapacityError, match="4 pages asked for, 3 of 3"):
        pool.take(NumPages(4))
    pool.check([0, 0, 0, 0])
    assert len(pool.take(NumPages(3))) == 3


def test_pages_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = pool_of(4)
    a, b, c, d = pool.take(NumPages(4))
    pool.publish(a, name("a"))
    pool.publish(b, name("b"))
    pool.release([a, c, b, d])
    assert set(pool.take(NumPages(2))) == {c, d}
    assert pool.find(name("a")) == a
    assert pool.take(NumPages(1)) == [a]
    assert pool.find(name("a")) is None
    assert pool.find(name("b")) == b


def test_a_prefix_that_is_used_again_outlives_older_ones() -> None:
    pool = pool_of(3)
    pages = pool.take(NumPages(3))
    for page, text in zip(pages, "abc", strict=True):
        pool.publish(page, name(text))
    pool.release(pages)
    pool.hold([pages[0]])
    pool.release([pages[0]])
    assert pool.take(NumPages(2)) == pages[1:]
    assert pool.find(name("a")) == pages[0]


def test_a_shared_page_stays_until_its_last_owner_lets_go() -> None:
    pool = pool_of(2)
    (page,) = pool.take(NumPages(1))
    pool.publish(page, name("a"))
    pool.hold([page])
    pool.release([page])
    pool.check([0, 1, 0])
    pool.release([page])
    assert pool.num_free_pages == 2
    assert pool.find(name("a")) == page


def test_duplicates_of_a_block_are_kept_and_outlive_each_other() -> None:
    pool = pool_of(2)
    a, b = pool.take(NumPages(2))
    pool.publish(a, name("same"))
    pool.publish(b, name("same"))
    pool.release([a, b])
    assert pool.find(name("same")) == a
    assert pool.take(NumPages(1)) == [a]
    assert pool.find(name("same")) == b


def test_releasing_a_page_twice_is_an_error_not_a_second_owner() -> None:
    pool = pool_of(2)
    (page,) = pool.take(NumPages(1))
    pool.release([page])
    with pytest.raises(LongfillError, match=f"page {page}"):
        pool.release([page])
    pool.check([0, 0, 0])


def test_hashes_are_forgotten_only_while_nobody_holds_a_page() -> None:
    pool = pool_of(2)
    (page,) = pool.take(NumPages(1))
    pool.publish(page, name("a"))
    assert not pool.forget_hashes()
    assert pool.find(name("a")) == page
    pool.release([page])
    assert pool.forget_hashes()
    assert pool.find(name("a")) is None
    pool.check([0, 0, 0])
