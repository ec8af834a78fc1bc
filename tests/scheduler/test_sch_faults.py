"""The traces of known scheduler faults in virtual time: who waits how long for whom."""

import logging

import numpy as np
import pytest
from paged_model import Engine, request_of
from virtual_time import StepCost, VirtualTime, prompt

from longfill.request import RequestStatus

LONG = 500_000
CHEAP, DEAR = StepCost(), StepCost(row_s=8e-5)
"""A step of 2,048 prompt tokens takes less than twice, and seven times, a decode step."""


def beside_shorts(max_tokens: int, *, seconds: int = 12, cost: StepCost = CHEAP, **knobs: object) -> VirtualTime:
    """A 500K prompt, and a 200-token one each second."""
    shorts = [prompt(f"short-{i}", 200, at=0.5 + i, max_tokens=max_tokens) for i in range(seconds)]
    return VirtualTime([prompt("long", LONG), *shorts], cost=cost, **knobs).run()


class TestSch01OneLongPromptAndManyShortOnes:
    def alone(self) -> tuple[float, int]:
        run = VirtualTime([prompt("long", LONG)], prefill_policy="fair").run()
        assert len(run.steps) == -(-LONG // 2048), "alone it has the whole budget"
        return run["long"].ttft, len(run.steps)

    @pytest.mark.parametrize("max_tokens", [1, 4, 16, 64])
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_sch_01_shorts_start_within_two_steps_and_the_long_one_takes_15_percent_longer_at_most(
        self, max_tokens: int, depth: int
    ) -> None:
        seconds, steps = self.alone()
        run = beside_shorts(max_tokens, depth=depth, prefill_policy="fair")
        shorts = [run[f"short-{i}"] for i in range(12)]
        assert max(short.steps_to_start for short in shorts) <= 2
        assert all(short.prompt_steps == [short.first_step] for short in shorts), "200 tokens take one step"
        assert run["long"].ttft <= 1.15 * seconds
        assert run["long"].token_steps[0] + 1 <= 1.15 * steps

    def test_sch_01_in_plain_order_the_shorts_wait_for_the_long_one(self) -> None:
        run = beside_shorts(4)
        assert run["short-0"].steps_to_start > 200
        assert run["short-0"].ttft > 0.9 * run["long"].ttft

    def test_sch_01_a_cap_lets_the_shorts_in_under_plain_order(self) -> None:
        run = beside_shorts(4, long_prefill_token_threshold=1024)
        assert max(run[f"short-{i}"].steps_to_start for i in range(12)) <= 2

    @pytest.mark.parametrize("tenants", [("", ""), ("x", "y"), ("x", "")])
    def test_sch_01_two_long_prompts_progress_side_by_side(self, tenants: tuple[str, str]) -> None:
        a, b = prompt("a", LONG, tenant=tenants[0]), prompt("b", LONG, at=1.0, tenant=tenants[1])
        run = VirtualTime([a, b], prefill_policy="fair").run()
        assert run["b"].steps_to_start <= 2
        both = range(run["b"].first_step, min(run["a"].token_steps[0], run["b"].token_steps[0]))
        for step in both:
            parts = {s.request_id: s.num_tokens for s in run.steps[step].requests}
            assert parts == {"a": 1024, "b": 1024}

    def test_sch_01_in_plain_order_the_second_long_prompt_waits_for_the_first(self) -> None:
        run = VirtualTime([prompt("a", LONG), prompt("b", LONG)]).run()
        assert run["b"].first_step >= run["a"].token_steps[0]

    @pytest.mark.parametrize("max_tokens", [4, 64])
    def test_sch_01_shorts_start_soon_where_prefill_is_dear_too(self, max_tokens: int) -> None:
        run = beside_shorts(max_tokens, cost=DEAR, prefill_policy="fair", seconds=40)
        waits = sorted(run[f"short-{i}"].steps_to_start for i in range(40))
        assert waits[-2] <= 2, "decode-only steps that measure or pay hold them up, rarely"
        assert waits[-1] <= 8


class TestSch09DecodesBesideALongPrompt:
    """A decode keeps half of its undisturbed rate while a 200K prompt is computed."""

    def beside(self, **knobs: object) -> tuple[float, float]:
        """The decode's rate over its undisturbed one while the prompt is computed, in seconds and in steps."""
        solo = VirtualTime([prompt("decode", 2000, max_tokens=300)], cost=knobs.get("cost")).run()["decode"].rate()
        requests = [prompt("decode", 2000, max_tokens=3000), prompt("long", 200_000, at=2.0)]
        run = VirtualTime(requests, **knobs).run()
        long = run["long"]
        during = [
            i for i, step in enumerate(run["decode"].token_steps) if long.first_step <= step <= long.token_steps[0]
        ]
        times, steps = run["decode"].token_times, run["decode"].token_steps
        count = len(during) - 1
        seconds = times[during[-1]] - times[during[0]]
        return count / seconds / solo[0], count / (steps[during[-1]] - steps[during[0]]) / solo[1]

    @pytest.mark.parametrize("cost", [CHEAP, DEAR, StepCost(row_s=1e-3)], ids=["cheap", "dear", "very dear"])
    @pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_sch_09_a_decode_keeps_its_share(self, cost: StepCost, share: float, depth: int) -> None:
        in_seconds, in_steps = self.beside(cost=cost, prefill_policy="fair", decode_share=share, depth=depth)
        assert in_seconds >= 0.97 * share
        assert in_steps == 1.0, "a row in every step"

    def test_sch_09_without_the_guard_it_would_not_where_prefill_is_dear(self) -> None:
        assert self.beside(cost=DEAR)[0] < 0.2
        assert self.beside(cost=DEAR, prefill_policy="fair", decode_share=0.0)[0] < 0.2

    @pytest.mark.parametrize("cost", [DEAR, StepCost(row_s=1e-3)], ids=["dear", "very dear"])
    @pytest.mark.parametrize("share", [0.5, 0.9])
    def test_sch_09_the_prompt_gets_what_the_decodes_leave(self, cost: StepCost, share: float) -> None:
        alone = VirtualTime([prompt("long", 20_000)], cost=cost).run()["long"].ttft
        requests = [prompt("decode", 100, max_tokens=60_000), prompt("long", 20_000, at=2.0)]
        run = VirtualTime(requests, cost=cost, prefill_policy="fair", decode_share=share)
        with pytest.raises(AssertionError, match="not done"):
            run.run(max_steps=int(1.2 * alone / (1 - share) / cost.step_s))
        assert run["long"].ttft <= 1.15 * alone / (1 - share)

    def test_sch_09_a_step_that_took_an_hour_is_forgiven(self) -> None:
        requests = [prompt("decode", 100, max_tokens=3000), prompt("long", 200_000, at=2.0)]
        run = VirtualTime(requests, prefill_policy="fair", cost=lambda s: 3600.0 if s.step == 100 else CHEAP(s)).run()
        pauses = np.diff(run["long"].prompt_steps)
        assert pauses.max() >= 32, "the step was not slow enough for this test to say anything"
        assert pauses.max() <= 66, "64 steps pay for it, and one may measure"


class TestSch02WhatFitsOnlyAlone:
    """A pool of 100 pages of 4 tokens; what needs 101 is refused (test_ledger)."""

    @pytest.mark.parametrize("policies", [{}, {"prefill_policy": "fair"}, {"scheduling_policy": "priority"}])
    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_sch_02_it_waits_completes_and_is_preempted_once_at_most(
        self, policies: dict, whole: bool, depth: int
    ) -> None:
        engine = Engine(
            usable_pages=100, budget=64, depth=depth, scheduler_reserve_full_isl=whole, watermark=0.05, **policies
        )
        others = [request_of(f"other-{i}", np.full(30, i), max_tokens=20) for i in range(6)]
        alone = request_of("alone", np.arange(390) % 89, max_tokens=10)
        engine.add(*others[:3], alone, *others[3:])
        engine.drain()
        assert alone.num_output_tokens == 10
        assert alone.num_preemptions <= 1

    def test_sch_02_a_preempted_request_as_large_as_the_pool_is_admitted_again(self) -> None:
        engine = Engine(usable_pages=100, budget=64, scheduler_reserve_full_isl=False, watermark=0.1)
        request = request_of("alone", np.arange(390) % 89, max_tokens=10)
        engine.add(request)
        for _ in range(5):
            engine.step()
        engine.scheduler.preempt("alone")
        engine.drain()
        assert request.num_preemptions == 1


class TestSch03ACapThatOnlyCountsWhoCanRun:
    def test_sch_03_alone_the_whole_budget_and_the_cap_from_the_step_after_a_second_one_comes(self) -> None:
        engine = Engine(usable_pages=2000, page_size=64, max_model_len=200_000, budget=4096, identity=None,
                        long_prefill_token_threshold=1000)  # fmt: skip
        engine.add(request_of("long", np.zeros(100_000, dtype=np.int64)))
        for _ in range(3):
            assert [s.num_tokens for s in engine.scheduler.schedule().requests] == [4096]
        engine.add(request_of("short", np.zeros(300, dtype=np.int64)))
        schedule = engine.scheduler.schedule()
        assert [(s.request_id, s.num_tokens) for s in schedule.requests] == [("long", 1000), ("short", 300)]
        engine.scheduler.abort("short")
        assert [s.num_tokens for s in engine.scheduler.schedule().requests] == [4096]

    @pytest.mark.parametrize(
        ("second", "knobs", "steps"),
        [
            ("none", {}, 64),
            ("runs", {}, 256),
            ("waits for pages", {}, 64),
            ("waits for a seat", {"max_num_seqs": 1}, 64),
            ("waits for a seat", {"max_num_active_seqs": 1}, 64),
            ("runs", {"long_prefill_token_threshold_adaptive": True}, 128),
            ("waits for pages", {"long_prefill_token_threshold_adaptive": True}, 64),
            ("waits for a seat", {"max_num_seqs": 1, "long_prefill_token_threshold_adaptive": True}, 64),
        ],
    )
    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    def test_sch_03_a_million_tokens_at_16384_with_a_threshold_of_4096(
        self, second: str, knobs: dict, steps: int, policy: str
    ) -> None:
        # Budget and threshold one larger than the shares, for the row of the decode that runs beside.
        beside = 1 if second == "runs" else 0
        requests = [prompt("long", 1 << 20, at=1.0 if second == "runs" else 0.0)]
        requests += {
            "none": [],
            "runs": [prompt("other", 10, max_tokens=5000)],
            "waits for pages": [prompt("other", 1 << 20, at=0.01)],
            "waits for a seat": [prompt("other", 10, at=0.01)],
        }[second]
        knobs = {"long_prefill_token_threshold": 4096, "max_num_seqs": 8, "decode_share": 0.0} | knobs
        usable = (1 << 14) + 100
        run = VirtualTime(requests, usable_pages=usable, budget=16_384 + 2 * beside, prefill_policy=policy, **knobs)
        run.run()
        assert len(run["long"].prompt_steps) == steps

    @pytest.mark.parametrize(("others", "cap"), [(1, 512), (2, 341), (3, 256), (4, 204), (5, 200), (9, 200)])
    def test_sch_03_an_adaptive_cap_is_the_budget_over_those_that_can_run(self, others: int, cap: int) -> None:
        engine = Engine(usable_pages=1000, page_size=4, max_num_seqs=20, budget=1024, max_model_len=3000,
                        long_prefill_token_threshold=200, long_prefill_token_threshold_adaptive=True)  # fmt: skip
        engine.add(*(request_of(f"o{i}", [i], max_tokens=50) for i in range(others)))
        engine.step()
        engine.add(request_of("long", np.arange(2000) % 97))
        (chunk,) = [s for s in engine.step().requests if s.request_id == "long"]
        assert chunk.num_tokens == cap


class TestSch04FreesThatStepsInFlightDelay:
    def full(self, depth: int) -> Engine:
        """Four decodes that hold every page, with `depth` steps in flight, at the edge of their last pages."""
        engine = Engine(usable_pages=16, page_size=4, budget=64, depth=depth)
        engine.add(*(request_of(name, np.full(15, ord(name)), max_tokens=40) for name in "abcd"))
        for _ in range(2):
            engine.begin()
        assert engine.cache.num_free_pages == 0
        return engine

    def test_sch_04_one_victim_for_what_is_missing_however_long_its_pages_take_to_come(self) -> None:
        engine = self.full(depth=4)
        schedule = engine.begin()
        assert schedule.preempted == ("d",), "four pages come from it, three are missing"
        assert schedule.requests == (), "they are not there yet: steps in flight may write them"
        for _ in range(3):
            again = engine.begin()
            assert (again.preempted, again.requests, again.admitted) == ((), (), ())
        engine.book()
        assert engine.begin().preempted == (), "one of the two steps that may write them is still in flight"
        engine.book()
        assert {s.request_id for s in engine.begin().requests} == {"a", "b", "c"}
        engine.drain()

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_sch_04_every_victim_but_the_last_was_not_enough(self, depth: int) -> None:
        engine = Engine(usable_pages=40, page_size=4, budget=64, depth=depth, identity=None)
        engine.add(*(request_of(str(i), np.full(5 + 3 * i, i), max_tokens=40) for i in range(8)))
        preempted = []
        while engine.scheduler.requests:
            schedule = engine.step()
            preempted += schedule.preempted
            assert len(schedule.preempted) <= 2, "each decode lacks one page at a time, each victim has two or more"
        assert preempted, "the pool is too large for this test to say anything"

    def test_sch_04_a_preemption_is_logged_with_what_it_costs(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = Engine(budget=16)
        engine.add(request := request_of("a", range(30)))
        engine.step()
        with caplog.at_level(logging.INFO, logger="longfill.scheduler"):
            engine.scheduler.preempt("a")
        assert "preempted request a: 16 computed tokens dropped, preemption 1 of it" in caplog.text
        assert request.status is RequestStatus.PREEMPTED
