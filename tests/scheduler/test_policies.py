"""Budgets, cadence and admission gates: each knob at its boundary, crossed by one."""

import numpy as np
import pytest
from paged_model import Engine, request_of, undisturbed

from longfill.errors import ConfigError
from longfill.request import Request
from longfill.scheduler import Schedule, SchedulerConfig
from longfill.scheduler.step import Step


def tokens(schedule: Schedule) -> dict[str, int]:
    return {s.request_id: s.num_tokens for s in schedule.requests}


def prompt(name: str, length: int, **params: object) -> Request:
    return request_of(name, np.full(length, ord(name[0])), **params)


class TestBudgets:
    @pytest.mark.parametrize(("scheduled", "first"), [(None, 16), (16, 16), (15, 15), (1, 1)])
    def test_a_step_holds_max_num_scheduled_tokens(self, scheduled: int | None, first: int) -> None:
        engine = Engine(budget=16, max_num_scheduled_tokens=scheduled)
        engine.add(prompt("a", 40))
        assert tokens(engine.step()) == {"a": first}
        engine.drain()

    def test_more_than_the_rows_of_a_step_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match="--max-num-scheduled-tokens: 17 is more than --max-num-batched-tokens 16"
        ):
            Engine(budget=16, max_num_scheduled_tokens=17)

    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    @pytest.mark.parametrize(
        ("slots", "scheduled", "want"),
        [
            (0, 12, {"a": 3, "b": 3, "c": 3, "d": 3}),
            (1, 12, {"a": 3, "b": 3, "c": 3}),  # 3 x (3 + 1) of 12 rows: the fourth finds none
            (1, 8, {"a": 3, "b": 3, "c": 2}),  # 8 tokens, and 11 of 12 rows
            (2, 12, {"a": 3, "b": 3}),  # 10 rows, and the third would pay two for none
            (3, 12, {"a": 3, "b": 3}),
            (11, 12, {"a": 1}),
        ],
    )
    def test_each_request_of_a_step_pays_its_draft_slots_from_the_rows(
        self, slots: int, scheduled: int, want: dict[str, int], policy: str
    ) -> None:
        engine = Engine(budget=12, draft_slots=slots, max_num_scheduled_tokens=scheduled, prefill_policy=policy)
        engine.add(*(prompt(name, 3) for name in "abcd"))
        first = tokens(engine.step())
        if policy == "ordered":
            assert first == want
        assert sum(first.values()) <= scheduled
        assert sum(first.values()) + slots * len(first) <= 12
        engine.drain()

    def test_draft_slots_that_leave_no_row_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="12 leaves no row beside the 12 draft slots"):
            Engine(budget=12, draft_slots=12)

    @pytest.mark.parametrize(("budget", "rows"), [(4, [1, 1, 1, 1]), (5, [2, 1, 1, 1]), (16, [4, 4, 4, 4])])
    def test_drafts_take_no_row_from_another_decode(self, budget: int, rows: list[int]) -> None:
        engine = Engine(budget=budget, num_speculative_tokens=3, max_num_seqs=4)
        requests = [request_of(name, [ord(name)], max_tokens=30) for name in "abcd"]
        engine.add(*requests)
        engine.step()
        assert list(tokens(engine.step()).values()) == rows
        engine.drain()
        for request in requests:
            assert request.output_token_ids.tolist() == undisturbed(request, 1000)

    @pytest.mark.parametrize(
        ("knobs", "seats"), [({}, 3), ({"max_num_scheduled_tokens": 2}, 2), ({"draft_slots": 1}, 1)]
    )
    def test_no_more_run_than_find_a_row_in_every_step(self, knobs: dict, seats: int) -> None:
        engine = Engine(budget=3, max_num_seqs=8, **knobs)
        engine.add(*(request_of(str(i), [i], max_tokens=10) for i in range(8)))
        for _ in range(5):
            assert len(engine.step().requests) == seats
        engine.drain()

    @pytest.mark.parametrize(("active", "running"), [(None, 4), (4, 4), (3, 3), (1, 1)])
    def test_no_more_run_than_max_num_active_seqs(self, active: int | None, running: int) -> None:
        engine = Engine(max_num_seqs=4, max_num_active_seqs=active)
        engine.add(*(request_of(str(i), [i]) for i in range(6)))
        assert len(engine.step().requests) == running
        engine.drain()

    @pytest.mark.parametrize(("length", "computed"), [(1, 0), (9, 8), (20, 0), (20, 16)])
    def test_a_grant_that_is_taken_back_leaves_no_trace_in_the_budgets(self, length: int, computed: int) -> None:
        engine = Engine(draft_slots=2)
        engine.add(request := prompt("a", length))
        assert engine.cache.allocate(request, length, engine.cache.lookup(request))
        step = Step(tokens=30, rows=40, draft_slots=2)
        request.num_computed_tokens = computed
        before = vars(step).copy() | {"_grants": {}}
        step.grant(request, min(length - computed, 12), 0, 0, engine.cache)
        assert vars(step) != before
        step.take_back("a")
        assert vars(step) == before
        step.take_back("nobody")
        assert vars(step) == before


class TestThreshold:
    @pytest.mark.parametrize(("length", "first"), [(9, 9), (10, 10), (11, 10), (40, 10)])
    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    def test_it_caps_what_is_still_wanted_in_a_step_of_running_and_waiting_prompts(
        self, length: int, first: int, policy: str
    ) -> None:
        engine = Engine(budget=64, long_prefill_token_threshold=10, prefill_policy=policy)
        engine.add(prompt("a", length), request_of("other", [1], max_tokens=40))
        assert tokens(engine.step())["a"] == first
        if length > first:
            assert tokens(engine.step())["a"] == min(10, length - first)
        engine.drain()

    def test_one_longer_than_any_sequence_is_refused(self) -> None:
        Engine(max_model_len=50, long_prefill_token_threshold=50)
        with pytest.raises(ConfigError, match="--long-prefill-token-threshold: 51"):
            Engine(max_model_len=50, long_prefill_token_threshold=51)


class TestCadence:
    """`prefill_schedule_interval`: vLLM's text, step by step."""

    def prompt_steps(self, engine: Engine, steps: int) -> list[int]:
        """Steps, from 0, that computed prompt tokens."""
        return [i for i in range(steps) if any(not s.is_one_row for s in engine.step().requests)]

    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    @pytest.mark.parametrize("interval", [1, 2, 3, 5])
    def test_prompts_in_every_nth_step_while_something_decodes(self, interval: int, policy: str) -> None:
        engine = Engine(budget=8, prefill_schedule_interval=interval, prefill_policy=policy, decode_share=0.0)
        engine.add(request_of("decode", [1, 2], max_tokens=100))
        engine.step()
        engine.add(prompt("long", 48, max_tokens=1))
        got = self.prompt_steps(engine, 7 * interval)
        assert got == list(range(interval - 1, 7 * interval, interval)), "48 tokens beside a decode, 7 in a step"

    def test_nothing_is_held_while_nothing_decodes(self) -> None:
        engine = Engine(budget=8, prefill_schedule_interval=5)
        engine.add(prompt("a", 30))
        assert [tokens(engine.step()) for _ in range(4)] == [{"a": 8}] * 3 + [{"a": 6}]

    def test_a_step_without_tokens_is_no_step(self) -> None:
        engine = Engine(budget=8, prefill_schedule_interval=3)
        engine.add(request_of("decode", [1, 2], max_tokens=3))
        engine.drain()
        for _ in range(5):
            assert engine.step().requests == ()
        engine.add(request_of("decode", [1, 2], max_tokens=30), prompt("long", 20))
        assert self.prompt_steps(engine, 7) == [0, 3, 6]

    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    def test_a_request_with_one_token_left_is_let_in_while_prompts_are_held(self, policy: str) -> None:
        engine = Engine(budget=8, prefill_schedule_interval=4, prefill_policy=policy)
        engine.add(request_of("decode", [1, 2], max_tokens=100))
        engine.step()
        engine.add(request_of("one", [7]), prompt("two", 2))
        assert tokens(engine.step()) == {"decode": 1, "one": 1}
        assert [tokens(engine.step()).get("two", 0) for _ in range(3)] == [0, 0, 2]
        engine.drain()

    def test_a_backlog_lifts_the_interval_until_a_step_leaves_nobody_waiting(self) -> None:
        engine = Engine(budget=8, max_num_seqs=3, prefill_schedule_interval=4)
        engine.add(request_of("decode", [1, 2], max_tokens=100))
        engine.step()  # computes a prompt, and leaves nobody
        engine.add(*(prompt(name, 6, max_tokens=1) for name in "abcdef"))
        got = [sorted(tokens(engine.step()).keys() - {"decode"}) for _ in range(9)]
        assert got[:3] == [[], [], []]
        assert got[3] == ["a", "b"], "the others are left without a seat, so the interval does not count any more"
        assert all(got[3:8])
        assert any("f" in names for names in got)
        engine.add(prompt("late", 20))
        held = [not (tokens(engine.step()).keys() - {"decode"}) for _ in range(5)]
        assert held.count(True) >= 3, "nobody was left waiting, and the interval counts again"

    def test_a_step_that_preempts_says_nothing_about_the_backlog(self) -> None:
        engine = Engine(usable_pages=8, budget=64, max_num_seqs=2, prefill_schedule_interval=3)
        a, b = request_of("a", range(8), max_tokens=12), request_of("b", range(50, 58), max_tokens=12)
        engine.add(a, b, prompt("c", 4))
        while not engine.step().preempted:
            pass
        engine.drain()
        assert a.num_output_tokens == b.num_output_tokens == 12


class TestAdmissionGates:
    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    @pytest.mark.parametrize(
        ("watermark", "free", "let_in"), [(0.0, 3, True), (0.1, 3, False), (0.1, 4, False), (0.1, 5, True)]
    )
    def test_the_watermark_stays_free_beside_running_requests(
        self, watermark: float, free: int, let_in: bool, policy: str
    ) -> None:
        engine = Engine(usable_pages=20, budget=64, watermark=watermark, prefill_policy=policy, decode_share=0.0)
        engine.add(prompt("running", 8, max_tokens=4))
        engine.step()
        assert engine.cache.allocate(prompt("lock", 1), 4 * (engine.cache.num_free_pages - free - 1))
        engine.add(prompt("new", 12, max_tokens=1))
        # The running one takes a page for its output; 10 % of the pool are 2 pages, and the new one needs 3.
        assert ("new" in tokens(engine.step())) == let_in
        engine.cache.free("lock")
        engine.drain()

    def test_the_watermark_does_not_keep_a_request_out_of_an_empty_machine(self) -> None:
        engine = Engine(usable_pages=20, watermark=0.5, budget=64)
        engine.add(prompt("whole pool", 76, max_tokens=4))
        engine.drain()

    @pytest.mark.parametrize("policy", ["ordered", "fair"])
    @pytest.mark.parametrize(("whole", "together"), [(True, False), (False, True)])
    def test_with_the_gate_a_prompt_waits_until_all_of_it_fits_beside_what_others_will_need(
        self, whole: bool, together: bool, policy: str
    ) -> None:
        engine = Engine(usable_pages=12, budget=8, scheduler_reserve_full_isl=whole, prefill_policy=policy)
        a, b = prompt("a", 30, max_tokens=1), prompt("b", 30, max_tokens=1)
        engine.add(a, b)
        engine.step(), engine.step()
        assert (engine.scheduler.num_running == 2) == (together and policy == "fair")
        engine.drain()
        if whole:
            assert a.num_preemptions == b.num_preemptions == 0

    def test_a_shared_prefix_that_is_held_needs_no_pages_of_its_own(self) -> None:
        engine = Engine(usable_pages=12, budget=64)
        engine.add(request_of("a", range(32), max_tokens=8))
        engine.step()
        engine.add(request_of("b", [*range(32), 1, 2], max_tokens=2))
        schedule = engine.step()
        assert [(s.request_id, s.start) for s in schedule.requests] == [("a", 32), ("b", 32)]
        engine.drain()


def test_pages_of_a_hit_are_looked_up_again_when_others_have_taken_some() -> None:
    """Two prompts admitted in one step: the first may be given the pages that the second was to find."""
    engine = Engine(usable_pages=24, budget=64, prefill_policy="fair")
    for name, tokens in (("old", range(16)), ("newer", np.full(60, 80))):
        engine.add(request_of(name, tokens, max_tokens=1))
        engine.drain()
    # Of 24 pages 5 hold nothing; the next to be reused is the last of `old`.
    fresh, again = request_of("fresh", np.arange(24) % 7 + 70), request_of("again", [*range(16), *range(40, 70)])
    fresh.arrival_time, again.arrival_time = 0.0, 1.0
    engine.clock = 5.0
    engine.add(fresh, again)
    assert [(s.request_id, s.start) for s in engine.step().requests] == [("fresh", 0), ("again", 12)]
    engine.drain()
    for request in (fresh, again):
        assert request.output_token_ids.tolist() == undisturbed(request, 1000)


def test_a_share_that_leaves_prompts_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--decode-share: 1\.0 leaves prompts no time"):
        SchedulerConfig(max_model_len=10, max_num_batched_tokens=10, max_num_seqs=1, decode_share=1.0)


def test_a_waiting_prompt_is_not_looked_up_while_all_seats_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in ("ordered", "fair"):
        engine = Engine(max_num_seqs=1, prefill_policy=policy, long_prefill_token_threshold=5)
        engine.add(prompt("running", 3, max_tokens=20))
        engine.step()
        monkeypatch.setattr(engine.cache, "lookup", lambda request: pytest.fail(f"{request.request_id} has no seat"))
        engine.add(prompt("waiting", 100))
        for _ in range(5):
            assert list(tokens(engine.step())) == ["running"]
