"""Random arrivals, aborts, preemptions and ends: pages add up, budgets hold, and every token is the right one."""

import math
from typing import Any

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
from paged_model import VOCAB, Engine, request_of, undisturbed

from longfill.errors import RequestError
from longfill.request import FinishReason, Request, RequestStatus

EOS = (3, 50)
MAX_MODEL_LEN = 120
MAX_DEPTH = 3


class RandomTraffic(RuleBasedStateMachine):
    """Scheduler, cache and paged model under everything that may happen at once.

    Held after every rule: the invariants below, and those of `Engine.check` after every schedule and every booking
    (budgets of a step, seats, one grant a request, computed <= known + placeholders, in flight <= computed). Held at
    the end: everybody ends without the watchdog's help, all pages are free, and each request's tokens are those of an
    undisturbed run, up to where it was cut off. The model refuses a row whose page is the null page, a bound on the
    first row that is none, and a chunk in the middle of a prompt without the token behind it.
    """

    steps = 0
    """Steps checked so far, over all runs."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        usable=st.integers(2, 30),
        budget=st.sampled_from([1, 5, 16, 200]),
        seats=st.integers(1, 5),
        drafts=st.sampled_from([0, 0, 1, 3]),
        policies=st.fixed_dictionaries(
            {
                "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
                "prefill_policy": st.sampled_from(["ordered", "fair"]),
                "long_prefill_token_threshold": st.sampled_from([0, 3, 20]),
                "long_prefill_token_threshold_adaptive": st.booleans(),
                "prefill_schedule_interval": st.sampled_from([1, 1, 2, 4]),
                "watermark": st.sampled_from([0.0, 0.0, 0.1]),
                "scheduler_reserve_full_isl": st.booleans(),
                "ttft_target": st.sampled_from([None, 3.0]),
                "decode_share": st.sampled_from([0.0, 0.5, 0.9]),
                "draft_slots": st.sampled_from([0, 0, 1]),
                "max_num_active_seqs": st.sampled_from([None, 1, 3]),
            }
        ),
    )
    def start(
        self, page_size: int, usable: int, budget: int, seats: int, drafts: int, policies: dict[str, Any]
    ) -> None:
        self.engine = Engine(
            usable_pages=usable,
            page_size=page_size,
            max_model_len=MAX_MODEL_LEN,
            budget=budget + policies["draft_slots"],
            max_num_seqs=seats,
            eos_token_ids=EOS,
            num_speculative_tokens=drafts,
            progress_timeout=math.inf,
            **policies,
        )
        self.scheduler = self.engine.scheduler
        self.drafts = drafts
        self.served: list[Request] = []
        self.cut: dict[Request, int] = {}  # ended from outside -> tokens it had then
        self.count = 0

    @rule(
        family=st.integers(0, 2),
        common=st.integers(0, 40),
        rest=st.integers(1, 50),
        max_tokens=st.sampled_from([1, 2, 7, 30, None]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "x", "y"]),
    )
    def arrive(
        self, family: int, common: int, rest: int, max_tokens: int | None, ignore_eos: bool, priority: int, tenant: str
    ) -> None:
        self.count += 1
        tokens = np.concatenate([np.full(common, family), np.arange(rest) * self.count % VOCAB])
        request = request_of(f"r{self.count}", tokens, max_tokens=max_tokens, ignore_eos=ignore_eos)
        request.priority, request.tenant, request.arrival_time = priority, tenant, self.engine.clock
        try:
            self.scheduler.add_request(request)
        except RequestError:
            total = MAX_MODEL_LEN if max_tokens is None else min(tokens.size + max_tokens + self.drafts, MAX_MODEL_LEN)
            assert total > self.engine.cache.num_usable_pages * self.engine.cache.page_size
        else:
            self.served.append(request)

    @precondition(lambda self: len(self.engine.in_flight) < MAX_DEPTH)
    @rule()
    def begin(self) -> None:
        self.engine.begin()

    @precondition(lambda self: self.engine.in_flight)
    @rule(seconds=st.sampled_from([None, 0.01, 1.0]))
    def book(self, seconds: float | None) -> None:
        before = {r: r.num_tokens for r in self.served}
        advanced = self.engine.book(seconds=seconds)
        for request, tokens in before.items():
            assert (request.num_tokens > tokens) == (request in advanced)

    @precondition(lambda self: self.engine.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The oldest step in flight finds that some of its requests cannot go on."""
        schedule, sampled = self.engine.in_flight.popleft()
        doomed = data.draw(st.lists(st.sampled_from([s.request_id for s in schedule.requests]), unique=True))
        live = {s.request_id for s in schedule.requests if self.scheduler.admission(s.request_id) == s.admission}
        for advance in self.scheduler.update(schedule, sampled, dict.fromkeys(doomed, "it failed")):
            if advance.num_tokens == 0:
                assert advance.request.finish_reason is FinishReason.ERROR
                self.cut[advance.request] = advance.request.num_tokens
        assert {r.request_id for r in self.cut if r.error == "it failed"} >= live & set(doomed)

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def crash(self) -> None:
        """The oldest step in flight raises: it and all behind it are taken back."""
        self.engine.in_flight.clear()
        self.scheduler.start_over()

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.1, 5.0]))
    def run_steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.engine.clock += seconds
            self.engine.step()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        request = self.scheduler.requests[data.draw(st.sampled_from(sorted(self.scheduler.requests)))]
        self.scheduler.finish(request.request_id, reason)
        self.cut[request] = request.num_tokens

    @precondition(lambda self: self.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = [r.request_id for r in self.served if r.status is RequestStatus.RUNNING]
        self.scheduler.preempt(data.draw(st.sampled_from(running)))

    @precondition(lambda self: not self.scheduler.requests)
    @rule()
    def forget_prefixes(self) -> None:
        assert self.engine.cache.reset_prefix_cache() == (not self.engine.in_flight), "steps in flight hold pages"

    @invariant()
    def free_cached_and_held_pages_add_up_and_are_where_their_owners_think(self) -> None:
        RandomTraffic.steps += 1
        self.engine.cache.check()

    @invariant()
    def a_request_is_known_until_it_ends_and_then_no_more(self) -> None:
        for request in self.served:
            assert request.is_finished != (request.request_id in self.scheduler.requests)

    @invariant()
    def booked_tokens_never_pass_the_known_ones(self) -> None:
        for request in self.scheduler.requests.values():
            assert 0 <= request.num_booked_tokens <= request.num_tokens <= MAX_MODEL_LEN
            assert request.num_output_placeholders >= 0 <= request.num_draft_tokens <= self.drafts

    @invariant()
    def who_waits_holds_nothing(self) -> None:
        for request in self.scheduler.waiting:
            assert self.engine.cache.num_owned_pages(request.request_id) == 0
            assert request.num_computed_tokens == request.num_output_placeholders == request.num_in_flight_tokens == 0

    @invariant()
    def with_nothing_running_or_in_flight_all_pages_are_free(self) -> None:
        if not (self.scheduler.num_running or self.engine.in_flight):
            assert self.engine.cache.usage == 0.0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.book_all()
        self.engine.drain(20_000)
        for request in self.served:
            want = undisturbed(request, MAX_MODEL_LEN, EOS)
            got = request.output_token_ids.tolist()
            if request in self.cut:
                assert request.num_tokens == self.cut[request]
                want = want[: len(got)]
            assert got == want


def run(examples: int, steps: int) -> None:
    checks = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(RandomTraffic, settings=checks)


def test_random_traffic_keeps_pages_budgets_and_tokens_right() -> None:
    run(examples=150, steps=40)


@pytest.mark.slow
def test_random_traffic_for_long() -> None:
    RandomTraffic.steps = 0
    while RandomTraffic.steps < 100_000:
        run(examples=200, steps=100)
