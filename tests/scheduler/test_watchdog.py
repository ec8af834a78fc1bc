"""In simulated time: who makes no progress ends with an error, it alone, and nobody who only waits."""

import numpy as np
import pytest
from paged_model import Engine, request_of, undisturbed

from longfill.request import FinishReason, Request


def prompt(name: str, length: int, **params: object) -> Request:
    return request_of(name, np.full(length, ord(name[0])), **params)


def stall(engine: Engine, request: Request, *, every: float, until: float, steps: int = 1) -> list[Request]:
    """Preempt a request again and again, after `steps` steps each time, until it is ended or the time is over."""
    ended: list[Request] = []
    while engine.clock < until and not ended:
        for _ in range(steps):
            ended += engine.step().stalled
        engine.clock += every
        if engine.scheduler.is_running(request):
            engine.scheduler.preempt(request.request_id)
    return ended


@pytest.mark.parametrize(("timeout", "at"), [(60.0, 60.0), (10.0, 10.0)])
def test_sch_02_one_that_is_computed_again_and_again_ends_after_the_timeout(timeout: float, at: float) -> None:
    engine = Engine(budget=16, identity=None, progress_timeout=timeout)
    victim, other = prompt("victim", 100), prompt("other", 4, max_tokens=100)
    engine.add(other, victim)
    assert stall(engine, victim, every=1.0, until=2 * timeout) == [victim]
    assert at <= engine.clock <= at + 3
    assert victim.finish_reason is FinishReason.ERROR
    assert "request victim: no token and no newly computed token for" in victim.error
    assert "of 100 tokens computed at best" in victim.error
    engine.drain()
    assert other.output_token_ids.tolist() == undisturbed(other, 1000)


def test_sch_02_one_that_gets_further_each_time_goes_on() -> None:
    engine = Engine(budget=4, page_size=4, progress_timeout=60.0)  # found in the cache, so every time 4 tokens more
    request = prompt("slow", 60, max_tokens=3)
    engine.add(request)
    assert stall(engine, request, every=50.0, until=5000.0) == []
    assert request.num_preemptions > 10
    engine.drain()
    assert request.output_token_ids.tolist() == undisturbed(request, 1000)


def test_sch_02_a_token_now_and_then_is_progress() -> None:
    engine = Engine(budget=64, identity=None, progress_timeout=60.0)
    request = prompt("slow", 20, max_tokens=8)
    engine.add(request)
    assert stall(engine, request, every=50.0, until=5000.0) == []
    assert request.num_output_tokens == 8


def test_sch_02_one_whose_steps_never_come_to_an_end_is_noticed_too() -> None:
    """Preempted each time before the first of its steps is booked."""
    engine = Engine(budget=16, identity=None, progress_timeout=60.0)
    request = prompt("victim", 100)
    engine.add(request)
    ended: list[Request] = []
    for _ in range(100):
        ended += engine.begin().stalled
        engine.clock += 1.0
        if engine.scheduler.is_running(request):
            engine.scheduler.preempt("victim")
        engine.book_all()
    assert ended == [request]


@pytest.mark.parametrize("policy", ["ordered", "fair"])
def test_one_that_only_waits_for_others_is_not_stalled(policy: str) -> None:
    engine = Engine(max_num_seqs=1, progress_timeout=60.0, prefill_policy=policy)
    first, second = prompt("first", 4, max_tokens=50), prompt("second", 4)
    engine.add(first, second)
    while not first.is_finished:
        engine.clock += 30.0
        assert engine.step().stalled == ()
    engine.drain()
    assert second.output_token_ids.tolist() == undisturbed(second, 1000)


def test_the_first_in_a_queue_that_nothing_comes_of_ends_and_those_behind_it_go_on() -> None:
    engine = Engine(usable_pages=20, progress_timeout=60.0)
    assert engine.cache.allocate(prompt("lock", 1), 4 * 15)
    large, small = prompt("large", 40), prompt("small", 4)
    engine.add(large, small)
    for second in range(60):
        engine.clock = float(second)
        assert engine.step().stalled == ()
    engine.clock = 61.0
    ended = [*engine.step().stalled, *engine.step().stalled]
    assert ended == [large]
    assert large.error.startswith("request large: it waited 61 s while nothing ran")
    engine.step()
    engine.cache.free("lock")
    engine.drain()
    assert small.output_token_ids.tolist() == undisturbed(small, 1000)


def test_an_idle_hour_before_a_request_does_not_count_against_it() -> None:
    engine = Engine(progress_timeout=60.0)
    engine.add(prompt("before", 4, max_tokens=1))
    engine.step()
    engine.clock = 3600.0
    request = prompt("after", 4)
    engine.add(request)
    assert engine.step().stalled == ()
    engine.drain()
    assert request.output_token_ids.tolist() == undisturbed(request, 1000)


def test_each_first_in_the_queue_has_its_own_time() -> None:
    engine = Engine(usable_pages=20, progress_timeout=60.0)
    assert engine.cache.allocate(prompt("lock", 1), 4 * 15)
    engine.add(prompt("one", 40))
    engine.step()
    engine.clock = 50.0
    engine.step()
    engine.scheduler.abort("one")
    engine.add(prompt("two", 40))
    for engine.clock in (51.0, 100.0, 110.0):
        assert engine.step().stalled == ()
    engine.clock = 112.0
    assert [r.request_id for r in (*engine.step().stalled, *engine.step().stalled)] == ["two"]
