"""One ledger: chunks, prefix hits and outputs are strides of the same chase, first come first served."""

import time

import numpy as np
import pytest
from paged_model import Engine, request_of, undisturbed

from longfill.cache import KVCacheManager
from longfill.errors import ConfigError, RequestError
from longfill.request import FinishReason, RequestStatus
from longfill.scheduler import UNKNOWN, Schedule, Scheduler, SchedulerConfig
from longfill.units import NumPages, PageSize


def strides(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(s.request_id, s.start, s.num_tokens, s.samples) for s in schedule.requests]


@pytest.mark.parametrize(("prompt", "steps", "last"), [(1_048_576, 64, 16_384), (1_048_575, 64, 16_383)])
def test_a_million_token_prompt_takes_64_steps_and_samples_in_the_last(prompt: int, steps: int, last: int) -> None:
    pages = NumPages(16_385 + 1)
    cache = KVCacheManager(pages, PageSize(64), identity=None)
    config = SchedulerConfig(max_model_len=prompt + 1, max_num_batched_tokens=16_384, max_num_seqs=4)
    scheduler = Scheduler(cache, config)
    request = request_of("long", np.zeros(prompt, dtype=np.int64))
    scheduler.add_request(request)
    for step in range(steps):
        schedule = scheduler.schedule()
        assert schedule.step == step
        (chunk,) = schedule.requests
        assert chunk.start == step * 16_384
        assert chunk.num_tokens == (last if step == steps - 1 else 16_384)
        assert chunk.samples == (step == steps - 1)
        assert chunk.page_table.size == -(-(chunk.start + chunk.num_tokens) // 64)
        advanced = scheduler.update(schedule, {"long": (5,)})
        assert [(a.request, a.num_tokens) for a in advanced] == ([(request, 1)] if chunk.samples else [])
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids.tolist() == [5]


@pytest.mark.parametrize("a_tail", [2_815, 2_816, 2_817])
def test_sch_08_a_tail_chunk_shares_its_step_with_the_next_prompt(a_tail: int) -> None:
    engine = Engine(usable_pages=1024, page_size=64, max_model_len=50_000, budget=16_384, identity=None)
    engine.add(
        request_of("a", np.zeros(16_384 + a_tail, dtype=np.int64)), request_of("b", np.ones(40_000, dtype=np.int64))
    )
    assert strides(engine.scheduler.schedule()) == [("a", 0, 16_384, False)]
    assert strides(engine.scheduler.schedule()) == [("a", 16_384, a_tail, True), ("b", 0, 16_384 - a_tail, False)]


@pytest.mark.parametrize(("a", "second"), [(15, ("b", 1, 15)), (16, ("b", 0, 15)), (17, ("a", 16, 1))])
def test_sch_08_the_boundary_between_two_prompts_crossed_by_one(a: int, second: tuple[str, int, int]) -> None:
    engine = Engine(budget=16)
    engine.add(request_of("a", range(a)), request_of("b", range(100, 130)))
    first = engine.step()
    assert first.num_tokens == 16
    schedule = engine.step()
    assert schedule.num_tokens == 16
    want = next(s for s in schedule.requests if s.request_id == second[0])
    assert (want.request_id, want.start, want.num_tokens) == second


def test_running_requests_come_first_and_new_ones_in_order() -> None:
    engine = Engine(budget=10)
    engine.add(request_of("a", range(3)), request_of("b", range(50, 53)), request_of("c", range(90, 99)))
    assert strides(engine.step()) == [("a", 0, 3, True), ("b", 0, 3, True), ("c", 0, 4, False)]
    assert strides(engine.step()) == [("a", 3, 1, True), ("b", 3, 1, True), ("c", 4, 5, True)]


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    engine = Engine(usable_pages=4)
    engine.add(request_of("a", range(8)), request_of("big", range(50, 62)), request_of("small", [1]))
    assert [s.request_id for s in engine.step().requests] == ["a"]
    assert engine.scheduler.num_waiting == 2


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_no_more_than_max_num_seqs_run_at_once(seats: int) -> None:
    engine = Engine(max_num_seqs=seats)
    engine.add(*(request_of(str(i), [i]) for i in range(5)))
    assert len(engine.step().requests) == seats
    engine.drain()


def test_a_prompt_is_admitted_only_if_all_of_it_fits_now() -> None:
    engine = Engine(usable_pages=8, budget=4)
    engine.add(request_of("a", range(12)), request_of("b", range(100, 124)))
    for _ in range(3):
        assert [s.request_id for s in engine.step().requests] == ["a"]
    assert engine.scheduler.num_waiting == 1, "b's first chunk would fit, b would not"
    engine.drain()


def test_nothing_to_do_is_an_empty_schedule() -> None:
    engine = Engine()
    schedule = engine.step()
    assert (schedule.requests, schedule.preempted, schedule.num_tokens) == ((), (), 0)


def test_a_second_schedule_before_the_result_takes_the_token_as_sampled() -> None:
    engine = Engine(budget=16)
    engine.add(request := request_of("a", range(20), max_tokens=2))
    assert strides(engine.begin()) == [("a", 0, 16, False)]
    assert strides(engine.begin()) == [("a", 16, 4, True)]
    third = engine.begin()
    assert strides(third) == [("a", 20, 1, True)]
    assert third.requests[0].token_ids.tolist() == [UNKNOWN]
    assert engine.begin().requests == (), "the two outputs that it may have are both in flight"
    assert [engine.book() for _ in range(3)] == [[], [request], [request]]
    engine.drain()
    assert request.output_token_ids.tolist() == undisturbed(request, 1000)


def test_pages_of_a_step_in_flight_are_not_found_before_its_result_is_in() -> None:
    engine = Engine(budget=8)
    engine.add(request_of("a", range(20)))
    engine.begin(), engine.begin()
    probe = request_of("probe", range(20))
    for found in (8, 16):
        engine.book()
        assert engine.cache.lookup(probe).num_tokens == found
    engine.drain()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_tokens_do_not_depend_on_the_chunk_size(length: int, budget: int) -> None:
    engine = Engine(budget=budget)
    request = request_of("a", np.arange(length) % 7, max_tokens=9)
    engine.add(request)
    engine.drain()
    assert request.output_token_ids.tolist() == undisturbed(request, 1000)


class TestPfx06APrefixHitIsAStart:
    """After a hit of n tokens the first position computed is n, and the tokens are those of a cold run."""

    @pytest.mark.parametrize(("length", "start"), [(4, 0), (5, 4), (31, 28), (32, 28), (33, 32)])
    def test_pfx_06_a_repeated_prompt_starts_behind_its_hit(self, length: int, start: int) -> None:
        engine = Engine(budget=64)
        prompt = np.arange(length) % 11
        cold, warm = request_of("cold", prompt), request_of("warm", prompt)
        engine.add(cold)
        engine.drain()
        engine.add(warm)
        (chunk,) = engine.step().requests
        assert (chunk.start, chunk.num_tokens, chunk.samples) == (start, length - start, True)
        assert chunk.token_ids.tolist() == prompt[start:].tolist()
        engine.drain()
        assert warm.num_cached_tokens == start
        assert cold.num_cached_tokens == 0
        assert warm.output_token_ids.tolist() == cold.output_token_ids.tolist() == undisturbed(cold, 1000)

    def test_pfx_06_outputs_are_part_of_the_prefix_of_the_next_turn(self) -> None:
        engine = Engine(budget=64)
        first = request_of("turn-1", range(10), max_tokens=7)
        engine.add(first)
        engine.drain()
        second = request_of("turn-2", [*first.token_ids.tolist(), 1, 2, 3])
        engine.add(second)
        engine.drain()
        assert second.num_cached_tokens == 16, "17 tokens, of which the last was never computed: 4 pages"
        assert second.output_token_ids.tolist() == undisturbed(second, 1000)

    def test_pfx_06_a_page_computed_in_this_very_step_is_not_a_hit(self) -> None:
        engine = Engine(budget=64)
        twins = [request_of(name, range(12)) for name in "ab"]
        engine.add(*twins)
        assert [s.start for s in engine.step().requests] == [0, 0]
        engine.drain()
        assert twins[0].output_token_ids.tolist() == twins[1].output_token_ids.tolist() == undisturbed(twins[0], 1000)


class TestTheEndOfARequest:
    def one(self, engine: Engine, **params: object):
        request = request_of("a", range(5), **params)
        engine.add(request)
        engine.drain()
        assert request.status is RequestStatus.FINISHED
        return request

    def test_max_tokens_ends_it_by_length(self) -> None:
        for count in (1, 2, 3):
            request = self.one(Engine(), max_tokens=count)
            assert (request.num_output_tokens, request.finish_reason) == (count, FinishReason.LENGTH)

    @pytest.mark.parametrize("max_tokens", [None, 4, 5, 6])
    def test_the_models_limit_ends_it_by_length(self, max_tokens: int | None) -> None:
        request = self.one(Engine(max_model_len=10), max_tokens=max_tokens)
        assert (request.num_output_tokens, request.finish_reason) == (min(5, max_tokens or 5), FinishReason.LENGTH)

    def test_an_end_of_text_token_stops_it_unless_ignored(self) -> None:
        free = self.one(Engine(), max_tokens=8).output_token_ids.tolist()
        eos, at = free[3], free.index(free[3]) + 1
        request = self.one(Engine(eos_token_ids=[eos]), max_tokens=8)
        assert request.output_token_ids.tolist() == free[:at]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
        assert self.one(Engine(eos_token_ids=[eos]), max_tokens=8, ignore_eos=True).num_output_tokens == 8

    def test_a_stop_token_stops_it_and_is_named(self) -> None:
        free = self.one(Engine(), max_tokens=8).output_token_ids.tolist()
        stop, at = free[3], free.index(free[3]) + 1
        request = self.one(Engine(), max_tokens=8, stop_token_ids=[VOID, stop])
        assert request.output_token_ids.tolist() == free[:at]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)

    def test_a_stop_token_at_the_last_allowed_place_is_a_stop(self) -> None:
        free = self.one(Engine(), max_tokens=1).output_token_ids.tolist()
        request = self.one(Engine(), max_tokens=1, stop_token_ids=free)
        assert request.finish_reason is FinishReason.STOP

    def test_the_caller_may_end_it_with_a_stop_string(self) -> None:
        engine = Engine()
        request = request_of("a", range(5))
        engine.add(request)
        engine.step()
        assert engine.scheduler.finish("a", FinishReason.STOP, "</s>") is request
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "</s>")
        assert engine.scheduler.finish("a", FinishReason.ERROR) is None
        assert request.finish_reason is FinishReason.STOP
        engine.drain()

    def test_update_returns_those_that_got_a_token_in_the_steps_order(self) -> None:
        engine = Engine(budget=10)
        a, b, c = request_of("a", [1], max_tokens=1), request_of("b", range(12)), request_of("c", [2])
        engine.add(a, b, c)
        engine.begin(), engine.begin()
        assert engine.book() == [a]
        assert set(engine.book()) == {b, c}


VOID = 10**6
"""A token id that is never sampled."""


class TestSch02WhatNeverFits:
    """A request that could never be finished is refused with the numbers; one that can be is served."""

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(397, 4), (400, 1), (1, 400), (200, None)])
    def test_sch_02_one_page_too_many_is_refused_with_the_numbers(self, prompt: int, max_tokens: int | None) -> None:
        engine = Engine(usable_pages=100, max_model_len=402)
        request = request_of("a", np.zeros(prompt, dtype=np.int64), max_tokens=max_tokens)
        with pytest.raises(RequestError, match=r"request a: .* need 101 pages of 4 tokens.* has 100 \(400 tokens\)"):
            engine.add(request)
        assert not engine.scheduler.requests
        assert engine.step().requests == ()

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(396, 4), (399, 1), (1, 399), (200, None), (397, 3)])
    def test_sch_02_the_whole_pool_is_served_without_preemption(self, prompt: int, max_tokens: int | None) -> None:
        engine = Engine(usable_pages=100, max_model_len=400, budget=64)
        request = request_of("a", np.zeros(prompt, dtype=np.int64), max_tokens=max_tokens)
        engine.add(request)
        engine.drain()
        assert request.num_preemptions == 0
        assert request.output_token_ids.tolist() == undisturbed(request, 400)

    @pytest.mark.parametrize("prompt", [10, 11, 100])
    def test_sch_02_a_prompt_must_leave_room_for_one_output(self, prompt: int) -> None:
        engine = Engine(max_model_len=10)
        with pytest.raises(RequestError, match=rf"{prompt} tokens.* max_model_len 10 at most 9"):
            engine.add(request_of("a", range(prompt)))
        engine.add(request_of("a", range(9)))
        engine.drain()

    @pytest.mark.parametrize("identity", [None, "on"])
    def test_sch_02_two_that_fit_apart_but_not_together_both_finish(self, identity: str | None) -> None:
        engine = Engine(usable_pages=20, **({"identity": None} if identity is None else {}))
        a = request_of("a", range(40), max_tokens=40)
        b = request_of("b", range(100, 130), max_tokens=40)
        engine.add(a, b)
        engine.drain()
        assert a.num_preemptions == 0
        assert b.num_preemptions <= 1
        for request in (a, b):
            assert request.output_token_ids.tolist() == undisturbed(request, 1000)


def test_an_id_is_taken_until_its_request_ends() -> None:
    engine = Engine()
    engine.add(request_of("a", [1]))
    with pytest.raises(RequestError, match="another request with this id"):
        engine.add(request_of("a", [2]))
    engine.scheduler.abort("a")
    engine.add(request_of("a", [2]))
    engine.drain()


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"budget": 0}, "--max-num-batched-tokens"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_model_len": 1}, "--max-model-len"),
    ],
)
def test_limits_that_allow_nothing_are_refused(change: dict, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Engine(**change)


def test_a_step_costs_the_same_however_long_the_queue_is() -> None:
    cache = KVCacheManager(NumPages(65), PageSize(4), identity=None)
    scheduler = Scheduler(cache, SchedulerConfig(max_model_len=100, max_num_batched_tokens=64, max_num_seqs=2))
    for i in range(50_000):
        scheduler.add_request(request_of(str(i), [1], max_tokens=50))
    start = time.process_time()
    for i in range(1_000):
        schedule = scheduler.schedule()
        scheduler.update(schedule, {s.request_id: (3,) for s in schedule.requests})
        scheduler.abort(str(49_999 - i))
    assert time.process_time() - start < 1.0, "1,000 steps beside 50,000 waiting requests"
    assert scheduler.num_waiting == 50_000 - 1_000 - 2 - 2 * (1_000 // 50 - 1)
