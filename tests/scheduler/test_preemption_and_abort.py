"""Whatever is taken away in the middle: no token is lost, repeated or delivered late, and no page leaks."""

from collections.abc import Callable

import numpy as np
import pytest
from paged_model import Engine, request_of, undisturbed

from longfill.errors import RequestError
from longfill.request import FinishReason, Request, RequestStatus

MAX_MODEL_LEN = 1000


def crowd(count: int = 20) -> list[Request]:
    """Prompts of many lengths, some with a common beginning, one of exactly whole pages."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 90, 12)
    requests = []
    for i in range(count):
        own = rng.integers(0, 90, [4, 1, 9, 20, 33][i % 5])
        tokens = np.concatenate([shared, own]) if i % 2 else own
        requests.append(request_of(f"r{i}", tokens, max_tokens=6 + 3 * (i % 6)))
    return requests


def assert_undisturbed(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids.tolist() == undisturbed(request, MAX_MODEL_LEN), request.request_id


class TestSch05Preemption:
    """Outputs do not depend on whether, when or how often a request is preempted."""

    @pytest.mark.parametrize("victims", ["first", "last", "all"])
    @pytest.mark.parametrize(("in_flight", "depth"), [(0, 1), (1, 1), (0, 2), (1, 2), (2, 3)])
    @pytest.mark.parametrize("drafts", [0, 1, 3])
    def test_sch_05_preemption_at_every_step_leaves_the_tokens_alone(
        self, victims: str, in_flight: int, depth: int, drafts: int
    ) -> None:
        for at in range(31):
            engine = Engine(usable_pages=90, budget=24, depth=depth, num_speculative_tokens=drafts)
            requests = crowd()
            engine.add(*requests)
            for _ in range(at):
                engine.step()
            if not engine.scheduler.requests:
                assert drafts, "it ended before the last of the steps that are tried"
                break
            for _ in range(in_flight):
                engine.begin()
            running = [r.request_id for r in requests if r.status is RequestStatus.RUNNING]
            assert running or (at == 0 and not in_flight), f"nothing runs in step {at}: this test proves nothing"
            chosen = {"first": running[:1], "last": running[-1:], "all": running}[victims]
            for name in chosen:
                engine.scheduler.preempt(name)
            assert not {r.request_id for r in engine.book_all()} & set(chosen), "a preempted request got a token"
            engine.drain()
            assert_undisturbed(requests)

    @pytest.mark.parametrize("usable", [15, 18, 25])
    @pytest.mark.parametrize("budget", [3, 16, 64])
    def test_sch_05_a_pool_too_small_for_the_crowd_gives_the_same_tokens(self, usable: int, budget: int) -> None:
        engine, requests = Engine(usable_pages=usable, budget=budget), crowd()
        engine.add(*requests)
        engine.drain()
        assert_undisturbed(requests)

    def test_sch_05_the_small_pools_above_do_preempt(self) -> None:
        engine, requests = Engine(usable_pages=15, budget=16), crowd()
        engine.add(*requests)
        engine.drain()
        assert sum(r.num_preemptions for r in requests) > 0

    def test_sch_05_a_result_from_before_the_preemption_is_stale_even_after_resuming(self) -> None:
        engine = Engine(budget=64)
        request = request_of("a", range(6))
        engine.add(request)
        engine.step()
        engine.begin()
        engine.scheduler.preempt("a")
        engine.begin()
        assert engine.book() == []
        assert engine.book() == [request]
        engine.drain()
        assert_undisturbed([request])

    def test_the_victim_is_the_last_and_goes_to_the_front_of_the_queue(self) -> None:
        engine = Engine(usable_pages=4, max_num_seqs=2)
        a, b = request_of("a", range(8), max_tokens=6), request_of("b", range(50, 58), max_tokens=6)
        c = request_of("c", [1])
        engine.add(a, b, c)
        engine.step()
        schedule = engine.step()
        assert schedule.preempted == ("b",)
        assert [s.request_id for s in schedule.requests] == ["a"], "nobody is admitted in a step that preempts"
        assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
        order = []
        while engine.scheduler.requests:
            order += [s.request_id for s in engine.step().requests if s.request_id not in order]
        assert order == ["a", "b", "c"]
        assert_undisturbed([a, b, c])

    def test_a_request_may_have_to_preempt_itself(self) -> None:
        engine = Engine(usable_pages=5)
        a, b = request_of("a", range(12), max_tokens=3), request_of("b", range(50, 58), max_tokens=8)
        engine.add(a, b)
        engine.step()
        schedule = engine.step()
        assert schedule.preempted == ("b",)
        engine.drain()
        assert_undisturbed([a, b])

    def test_a_resumed_request_finds_its_own_pages_and_still_counts_as_uncached(self) -> None:
        engine = Engine(budget=64)
        request = request_of("a", range(30), max_tokens=6)
        engine.add(request)
        for _ in range(3):
            engine.step()
        engine.scheduler.preempt("a")
        (chunk,) = engine.step().requests
        assert (chunk.start, chunk.num_tokens) == (32, 1), "33 tokens so far, 8 whole pages computed"
        assert request.num_cached_tokens == 0
        assert engine.cache.stats.hits == 0
        engine.drain()
        assert_undisturbed([request])

    def test_only_running_requests_can_be_preempted(self) -> None:
        engine = Engine()
        engine.add(request_of("a", [1]))
        for name in ("a", "nobody"):
            with pytest.raises(RequestError, match="not running"):
                engine.scheduler.preempt(name)
        engine.drain()


def before(_: Engine) -> None:
    """Abort while it waits in the queue."""


def between_chunks(engine: Engine) -> None:
    engine.step()


def while_decoding(engine: Engine) -> None:
    for _ in range(5):
        engine.step()


def after_preemption(engine: Engine) -> None:
    engine.step()
    engine.scheduler.preempt("victim")


class TestSch06Abort:
    """An abort at any moment ends that request at once and touches nothing else."""

    @pytest.mark.parametrize("reach", [before, between_chunks, while_decoding, after_preemption])
    def test_sch_06_abort_in_every_phase(self, reach: Callable[[Engine], None]) -> None:
        engine, other = Engine(budget=16), request_of("other", range(70, 73), max_tokens=12)
        victim = request_of("victim", range(40), max_tokens=12)
        engine.add(other, victim)
        reach(engine)
        got = victim.num_output_tokens
        assert engine.scheduler.abort("victim") is victim
        assert (victim.status, victim.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
        engine.drain()
        assert victim.num_output_tokens == got
        assert_undisturbed([other])

    @pytest.mark.parametrize(("in_flight", "depth"), [(0, 1), (1, 1), (0, 2), (1, 2), (2, 3)])
    @pytest.mark.parametrize("drafts", [0, 3])
    def test_sch_06_abort_at_every_step_leaks_no_page_and_delivers_no_token(
        self, in_flight: int, depth: int, drafts: int
    ) -> None:
        for at in range(25):
            engine = Engine(usable_pages=30, budget=24, depth=depth, num_speculative_tokens=drafts)
            requests = crowd(8)
            engine.add(*requests)
            for _ in range(at):
                engine.step()
            for _ in range(in_flight):
                engine.begin()
            live = list(engine.scheduler.requests.values())
            aborted = live[:: 1 + at % 3]
            counts = [engine.scheduler.abort(r.request_id).num_tokens for r in aborted]
            assert not set(engine.book_all()) & set(aborted)
            engine.drain()
            assert [r.num_tokens for r in aborted] == counts
            assert_undisturbed([r for r in requests if r not in aborted])

    def test_sch_06_the_id_may_be_used_again_while_the_old_result_is_pending(self) -> None:
        engine = Engine(budget=64)
        old, new = request_of("same", range(6)), request_of("same", range(40, 49))
        engine.add(old)
        engine.begin()
        engine.scheduler.abort("same")
        engine.add(new)
        engine.begin()
        assert engine.book() == []
        assert engine.book() == [new]
        engine.drain()
        assert old.num_output_tokens == 0
        assert_undisturbed([new])

    def test_sch_06_aborting_what_has_ended_or_never_was_is_fine(self) -> None:
        engine = Engine()
        engine.add(request_of("a", [1], max_tokens=1))
        engine.drain()
        assert engine.scheduler.abort("a") is None
        assert engine.scheduler.abort("nobody") is None


class TestMem03AFullPool:
    """With every page locked a request is parked, not crashed, and resumes with the same tokens."""

    @pytest.mark.parametrize("left", [0, 1, 5])
    def test_mem_03_a_request_in_mid_prefill_is_parked_until_pages_free(self, left: int) -> None:
        engine = Engine(usable_pages=64, budget=16)
        request = request_of("a", np.arange(100) % 13, max_tokens=5)
        engine.add(request)
        engine.step()
        engine.step()
        lock = request_of("lock", [0])
        assert engine.cache.allocate(lock, 4 * (engine.cache.num_free_pages - left))
        for _ in range(1000):
            assert engine.step().num_tokens == 0 or left >= 4
        assert request.num_output_tokens == 0
        assert request.num_preemptions == 1
        engine.cache.free("lock")
        engine.drain()
        assert_undisturbed([request])

    def test_mem_03_running_requests_go_on_while_a_prompt_is_parked(self) -> None:
        engine = Engine(usable_pages=64, budget=16)
        locks = [request_of(f"lock{i}", np.full(40, i), max_tokens=40) for i in range(3)]
        parked = request_of("parked", np.arange(70) % 13, max_tokens=5)
        engine.add(*locks, parked)
        empty = 0
        for _ in range(1000):
            empty += bool(engine.scheduler.requests) and engine.step().num_tokens == 0
        assert not engine.scheduler.requests
        assert empty == 0
        assert_undisturbed([*locks, parked])

    @pytest.mark.parametrize(("missing", "runs"), [(0, True), (1, False)])
    def test_mem_03_a_waiting_prompt_is_admitted_exactly_when_it_fits(self, missing: int, runs: bool) -> None:
        engine = Engine(usable_pages=64, budget=16)
        assert engine.cache.allocate(request_of("lock", [0]), 4 * (64 - 25 + missing))
        request = request_of("a", np.arange(97) % 13, max_tokens=3)
        engine.add(request)
        for _ in range(1000):
            engine.step()
        assert request.is_finished == runs
        engine.cache.free("lock")
        engine.drain()
        assert_undisturbed([request])
