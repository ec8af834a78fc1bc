"""PFX-07: free + cached + in use = total at every step, and a hit is always the prefix that was asked for."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.request import Request, SamplingParams
from longfill.units import NumPages, PageSize, pages_for

IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})
PAGE_SIZES = (1, 16, 64, 256)


class PageAccounting(RuleBasedStateMachine):
    """Random admissions, chunks, publications, outputs, frees and resets, beside a model of what each page holds."""

    steps = 0
    """Steps checked so far, over all runs."""

    @initialize(page_size=st.sampled_from(PAGE_SIZES), usable=st.integers(1, 24))
    def start(self, page_size: int, usable: int) -> None:
        self.page_size, self.usable = page_size, usable
        self.cache = KVCacheManager(NumPages(usable + 1), PageSize(page_size), identity=IDENTITY, check_token_ids=True)
        self.live: dict[str, Request] = {}
        self.computed: dict[str, int] = {}
        self.content: dict[int, tuple[str, bytes]] = {}  # page -> salt and all tokens up to its end, once computed
        self.count = 0
        self.parked: list[int] = []  # steps in flight that hold pages of ended requests

    @rule(
        family=st.integers(0, 2),
        split=st.integers(0, 12),
        pages=st.integers(0, 12),
        rest=st.integers(0, 300),
        salt=st.sampled_from(["", "s"]),
        chunk=st.floats(0, 1),
    )
    def admit(self, family: int, split: int, pages: int, rest: int, salt: str, chunk: float) -> None:
        length = max(1, pages * self.page_size + rest % self.page_size)
        tokens = np.full(length, family)
        tokens[split * self.page_size :] = 1 + self.count % 3
        request = Request(f"r{self.count}", tokens, SamplingParams(), cache_salt=salt)
        self.count += 1
        before = self.cache.num_free_pages
        hit = self.cache.lookup(request)
        assert self.cache.num_free_pages == before, "a lookup must have no effect"
        assert hit.num_tokens == len(hit.pages) * self.page_size <= length - 1
        for i, page in enumerate(hit.pages):
            assert self.content[page] == (salt, tokens[: (i + 1) * self.page_size].tobytes())
        total = hit.num_tokens + max(1, int(chunk * (length - hit.num_tokens)))
        can = self.cache.can_allocate(request, total, hit)
        assert self.cache.allocate(request, total, hit) == can
        if not can:
            assert self.cache.num_free_pages == before
            return
        table = self.cache.page_table(request.request_id).tolist()
        assert table[: len(hit.pages)] == hit.pages
        assert len(table) == pages_for(total, PageSize(self.page_size))
        self._overwritten(table[len(hit.pages) :])
        self.live[request.request_id], self.computed[request.request_id] = request, hit.num_tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), outputs=st.integers(0, 3), chunk=st.floats(0, 1))
    def grow(self, data: st.DataObject, outputs: int, chunk: float) -> None:
        """Allocate for more tokens, compute some of those that have a page, and publish them."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[name]
        for token in range(outputs):
            request.append_output(token)
        had = self.cache.page_table(name).tolist()
        covered = min(len(had) * self.page_size, request.num_tokens)
        total = covered + int(chunk * (request.num_tokens - covered))
        if self.cache.allocate(request, total):
            assert self.cache.page_table(name)[: len(had)].tolist() == had
            self._overwritten(self.cache.page_table(name)[len(had) :].tolist())
        computed = self.computed[name] + int(chunk * (covered - self.computed[name]))
        self.cache.publish(request, computed)
        for block in range(self.computed[name] // self.page_size, computed // self.page_size):
            tokens = request.token_ids[: (block + 1) * self.page_size].tobytes()
            self.content[had[block]] = (request.cache_salt, tokens)
        self.computed[name] = max(computed, self.computed[name])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[name], self.computed[name]
        self.cache.free(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), step=st.integers(0, 3))
    def free_behind_a_step(self, data: st.DataObject, step: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[name], self.computed[name]
        before = self.cache.num_free_pages
        self.cache.free(name, busy_until=step)
        assert self.cache.num_free_pages == before
        self.parked.append(step)

    @rule(oldest=st.sampled_from([1, 2, 3, None]))
    def settle(self, oldest: int | None) -> None:
        self.cache.settle(oldest)
        self.parked = [step for step in self.parked if oldest is not None and step >= oldest]

    @rule()
    def reset(self) -> None:
        idle = not (self.live or self.parked)
        assert self.cache.reset_prefix_cache() == idle
        if idle:
            self.content.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        PageAccounting.steps += 1
        self.cache.check()
        in_use = {page for name in self.live for page in self.cache.page_table(name).tolist()}
        held = self.usable - self.cache.num_free_pages
        assert len(in_use) <= held if self.parked else len(in_use) == held
        some = Request("some", [1], SamplingParams())
        if self.live:
            gone = sorted(self.live)
            assert self.cache.num_pages_missing(some, 1, gone=gone) == 1 - self.usable, "all pages come back"

    def teardown(self) -> None:
        self.cache.settle(None)
        for name in self.live:
            self.cache.free(name)
        assert self.cache.num_free_pages == self.usable

    def _overwritten(self, pages: list[int]) -> None:
        for page in pages:
            self.content.pop(page, None)


def run(examples: int, steps: int) -> None:
    checks = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(PageAccounting, settings=checks)


def test_pfx_07_every_page_is_accounted_for_at_every_step() -> None:
    run(examples=150, steps=50)


@pytest.mark.slow
def test_pfx_07_every_page_is_accounted_for_over_a_hundred_thousand_steps() -> None:
    PageAccounting.steps = 0
    while PageAccounting.steps < 100_000:
        run(examples=200, steps=100)
