"""`--scheduling-policy priority`: lower goes first, takes seats and pages where it must, and nothing for nothing."""

import numpy as np
import pytest
from paged_model import Engine, request_of, undisturbed
from virtual_time import VirtualTime, prompt

from longfill.request import Request, RequestStatus
from longfill.scheduler import Schedule
from longfill.scheduler.queue import WaitingQueue

POLICIES = pytest.mark.parametrize("policy", ["ordered", "fair"])


def wanting(name: str, length: int, priority: int, *, at: float = 0.0, max_tokens: int = 8) -> Request:
    request = request_of(name, np.full(length, ord(name[0])), max_tokens=max_tokens)
    request.priority, request.arrival_time = priority, at
    return request


def engine_of(policy: str = "ordered", **knobs: object) -> Engine:
    return Engine(scheduling_policy="priority", prefill_policy=policy, **knobs)


def names(schedule: Schedule) -> list[str]:
    return [s.request_id for s in schedule.requests]


def assert_undisturbed(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids.tolist() == undisturbed(request, 1000), request.request_id


@POLICIES
@pytest.mark.parametrize("budget", [4, 5, 64, 200])
def test_it_starts_in_the_next_step_with_full_seats(policy: str, budget: int) -> None:
    engine = engine_of(policy, max_num_seqs=4, budget=budget)
    low = [wanting(name, 1, 5, at=i, max_tokens=20) for i, name in enumerate("abcd")]
    engine.add(*low)
    for _ in range(3):
        engine.step()
    engine.add(high := wanting("high", 3, 1, at=10))
    schedule = engine.step()
    assert "high" in names(schedule)
    assert schedule.preempted == ("d",), "the last of the lowest, and it alone"
    engine.drain()
    assert_undisturbed([*low, high])


@POLICIES
@pytest.mark.parametrize("whole", [True, False])
def test_it_starts_in_the_next_step_with_a_full_pool(policy: str, whole: bool) -> None:
    engine = engine_of(policy, usable_pages=20, budget=64, scheduler_reserve_full_isl=whole)
    low = [wanting(name, 15, 5, at=i, max_tokens=10) for i, name in enumerate("abcd")]
    engine.add(*low)
    for _ in range(4):
        engine.step()
    assert engine.cache.num_free_pages == 0
    engine.add(high := wanting("high", 30, 1, at=10))
    schedule = engine.step()
    assert "high" in names(schedule)
    assert schedule.preempted == ("d", "c"), "8 pages: the first victim has 5"
    assert engine.scheduler.requests["c"].status is RequestStatus.PREEMPTED
    engine.drain()
    assert_undisturbed([*low, high])


@POLICIES
def test_with_steps_in_flight_it_starts_once_they_are_booked_and_nobody_else_gives_way(policy: str) -> None:
    engine = engine_of(policy, usable_pages=20, budget=64)
    low = [wanting(name, 13, 5, at=i, max_tokens=10) for i, name in enumerate("abcd")]
    engine.add(*low)
    engine.begin(), engine.begin()
    engine.add(high := wanting("high", 30, 1, at=10))
    first = engine.begin()
    assert (first.preempted, "high" in names(first)) == (("d",), False), "8 pages: 4 are free"
    assert engine.begin().preempted == ()
    engine.book_all()
    assert "high" in names(engine.begin())
    engine.drain()
    assert_undisturbed([*low, high])


@POLICIES
def test_victims_that_share_the_newcomers_prefix_are_counted_right(policy: str) -> None:
    """Pages that both hold are not won by a preemption: they were not needed before it, and are afterwards."""
    for shared in range(0, 40, 4):
        engine = engine_of(policy, usable_pages=20, budget=200)
        low = wanting("low", 40, 5, max_tokens=4)
        other = wanting("other", 20, 0, max_tokens=4)
        engine.add(low, other)
        engine.step()
        tokens = np.full(60, ord("h"))
        tokens[:shared] = ord("l")
        engine.add(high := request_of("high", tokens, max_tokens=4))
        engine.step()
        if high.status is not RequestStatus.RUNNING:
            assert low.num_preemptions == 0, "a victim for nothing"
        engine.drain()
        assert_undisturbed([low, other, high])


@POLICIES
def test_no_seat_is_taken_for_one_that_finds_no_pages_even_so(policy: str) -> None:
    engine = engine_of(policy, usable_pages=20, budget=64, max_num_seqs=2)
    main, low = wanting("main", 50, 0, max_tokens=10), wanting("low", 10, 5, max_tokens=10)
    engine.add(main, low)
    engine.step()
    engine.add(high := wanting("high", 40, 1))
    for _ in range(4):
        assert names(engine.step()) == ["main", "low"]
    assert low.num_preemptions == 0
    engine.drain()
    assert_undisturbed([main, low, high])


@POLICIES
def test_one_of_lower_priority_does_not_take_the_pages_a_higher_one_waits_for(policy: str) -> None:
    engine = engine_of(policy, usable_pages=20, budget=64)
    engine.add(wanting("running", 36, 0, max_tokens=20))
    engine.step()
    engine.add(high := wanting("high", 60, 1), *(wanting(f"{i}-low", 4, 5) for i in range(5)))
    order = []
    while engine.scheduler.requests:
        order += [name for name in names(engine.step()) if name not in order]
    assert order[:2] == ["running", "high"]
    assert high.num_preemptions == 0


@POLICIES
def test_equal_priorities_are_first_come_first_served_and_never_preempt_each_other(policy: str) -> None:
    engine = engine_of(policy, max_num_seqs=2, budget=64)
    requests = [wanting(name, 5, 3, at=i, max_tokens=6) for i, name in enumerate("abcd")]
    engine.add(*requests)
    order = []
    while engine.scheduler.requests:
        engine.clock += 1
        order += [name for name in names(engine.step()) if name not in order]
    assert order == ["a", "b", "c", "d"]
    assert not any(r.num_preemptions for r in requests)


def test_preempted_requests_come_back_in_their_order() -> None:
    engine = engine_of(max_num_seqs=3, budget=64)
    low = [wanting(name, 5, 5, at=i, max_tokens=12) for i, name in enumerate("abc")]
    engine.add(*low, wanting("waiting", 5, 5, at=3))
    engine.step()
    engine.add(*(wanting(f"{i}-high", 5, 1, at=9, max_tokens=2) for i in range(3)))
    assert engine.step().preempted == ("c", "b", "a")
    order = []
    while engine.scheduler.requests:
        order += [name for name in names(engine.step()) if name not in order]
    assert [name for name in order if "high" not in name] == ["a", "b", "c", "waiting"]


@POLICIES
def test_with_fcfs_priorities_mean_nothing(policy: str) -> None:
    engine = Engine(max_num_seqs=1, prefill_policy=policy)
    engine.add(wanting("first", 3, 9), wanting("second", 3, 0))
    engine.step()
    assert names(engine.step()) == ["first"]
    engine.drain()


@POLICIES
def test_prompts_are_computed_by_priority_and_decodes_go_on_beside_them(policy: str) -> None:
    requests = [
        prompt("decode", 10, max_tokens=100, priority=9),
        prompt("low", 100_000, at=0.1, priority=5),
        prompt("high", 100_000, at=1.0, priority=1),
    ]
    run = VirtualTime(requests, scheduling_policy="priority", prefill_policy=policy).run()
    assert run["high"].steps_to_start == 1
    assert run["high"].ttft < run["low"].ttft
    between = range(run["high"].first_step, run["high"].token_steps[0])
    assert not set(between) & set(run["low"].prompt_steps), "the low one pauses"
    assert np.diff(run["decode"].token_steps).max() == 1


@POLICIES
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_of_low_ones_never_holds_a_high_one_up(policy: str, depth: int) -> None:
    low = [prompt(f"low-{i}", 3000, at=0.01 * i, max_tokens=50, priority=5) for i in range(300)]
    high = [prompt(f"high-{i}", 3000, at=1.0 + i, max_tokens=5, priority=1) for i in range(5)]
    run = VirtualTime(
        low + high, scheduling_policy="priority", prefill_policy=policy, depth=depth, usable_pages=700, max_num_seqs=8
    ).run()
    # With steps in flight a victim's pages come when those are booked.
    assert max(run[r.request_id].steps_to_start for r in high) <= depth
    assert not any(r.num_preemptions for r in high)
    assert sum(r.num_preemptions for r in low) <= 3 * len(high), "each takes one seat, and the pages of two at most"


def test_a_priority_that_nobody_waits_with_is_forgotten() -> None:
    queue = WaitingQueue(by_priority=True)
    requests = [wanting(f"r{i}", 1, priority=i) for i in range(5)]
    for request in requests:
        queue.add(request)
    assert queue.levels == [0, 1, 2, 3, 4]
    for request in requests[1:]:
        queue.remove(request)
    queue.remove(requests[1])
    assert (queue.levels, len(queue._levels)) == ([0], 1)
