"""`--prefill-policy fair` beyond the traces: arithmetic of shares and pace, ageing, tenants, targets, scarce pages."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import Engine, request_of
from virtual_time import StepCost, VirtualTime, prompt

from longfill.request import Request
from longfill.scheduler.pace import MOST_PAUSES, PROBE_STEPS, QUANTUM, Pace
from longfill.scheduler.shares import LATE_PART, Claim, FairShares, water_fill

DEAR = StepCost(row_s=1e-3)
"""A step of 64 prompt tokens takes more than three times a decode step."""


@given(
    budget=st.integers(0, 5000), wanted=st.dictionaries(st.tuples(st.just("request"), st.text()), st.integers(0, 3000))
)
def test_water_fill_is_even_and_leaves_nothing_over(budget: int, wanted: dict[tuple[str, str], int]) -> None:
    given = water_fill(budget, wanted)
    assert list(given) == list(wanted)
    assert sum(given.values()) == min(budget, sum(wanted.values()))
    most = max(given.values(), default=0)
    for share, tokens in given.items():
        assert tokens == wanted[share] or most - tokens <= 1, "one that could take more has as much as any other"


claims = st.lists(
    st.builds(
        lambda tenant, tokens, urgency, late: (tenant, tokens, urgency, late),
        st.sampled_from(["", "", "x", "y"]), st.integers(1, 3000), st.floats(0, 100), st.booleans(),
    ), max_size=80,
)  # fmt: skip


@given(budget=st.integers(1, 5000), claims=claims)
def test_a_step_is_divided_without_loss_and_nobody_gets_more_than_it_wants(
    budget: int, claims: list[tuple[str, int, float, bool]]
) -> None:
    wanted = {
        f"r{i}": Claim(request_of(f"r{i}", [1]), tokens, urgency, late)
        for i, (_, tokens, urgency, late) in enumerate(claims)
    }
    for claim, (tenant, *_) in zip(wanted.values(), claims, strict=True):
        claim.request.tenant = tenant
    given = FairShares().split(budget, list(wanted.values()))
    assert len({claim.request for claim in given}) == len(given)
    assert all(0 < claim.tokens <= wanted[claim.request.request_id].tokens for claim in given)
    assert sum(claim.tokens for claim in given) == min(budget, sum(claim.tokens for claim in wanted.values()))
    late = sum(c.tokens for c in given if wanted[c.request.request_id].is_late)
    others = sum(c.tokens for c in wanted.values() if not c.is_late)
    assert late <= max(LATE_PART * budget, budget - others)


@given(shares=st.integers(1, 12), newcomers=st.booleans())
def test_where_a_step_is_too_small_for_all_they_take_turns_whatever_newcomers_there_are(
    shares: int, newcomers: bool
) -> None:
    fair, turns = FairShares(), [[0] for _ in range(shares)]
    old = [Claim(request_of(f"old{i}", [1]), 10_000) for i in range(shares)]
    for turn in range(1, 20 * shares):
        new = [Claim(request_of(f"new{turn}", [1]), QUANTUM)] if newcomers else []
        for claim in fair.split(QUANTUM, old + new):
            fair.was_served(claim.request)
            if claim.request.request_id.startswith("old"):
                turns[int(claim.request.request_id[3:])].append(turn)
    for served in turns:
        assert len(served) > 5
        assert np.diff(served).max() <= 2 * shares + 1, "no longer without a part than two rounds"
        if not newcomers:
            assert set(np.diff(served[-5:])) == {shares}


@pytest.mark.parametrize("shares", [1, 2, 7])
def test_a_newcomer_is_served_in_the_second_split_at_the_latest(shares: int) -> None:
    fair, old = FairShares(), [Claim(request_of(f"old{i}", [1]), 10_000) for i in range(shares)]

    def split(*more: Claim) -> set[str]:
        given = fair.split(QUANTUM, [*old, *more])
        for claim in given:
            fair.was_served(claim.request)
        return {claim.request.request_id for claim in given}

    for _ in range(2 * shares):
        split()
    for count in range(6):
        new = Claim(request_of(f"new{count}", [1]), 10)
        assert f"new{count}" in split(new) | split(new)


def test_a_tenant_that_comes_back_waits_for_its_turn() -> None:
    """One whose short requests come one by one is no newcomer each time."""
    fair, old = FairShares(), [Claim(request_of(f"old{i}", [1]), 10_000) for i in range(3)]
    counts = {"x": 0}
    for turn in range(60):
        request = Request(f"short{turn}", [1], request_of("p", [1]).params, tenant="x")
        for claim in fair.split(QUANTUM, [*old, Claim(request, QUANTUM)] if turn % 2 else old):
            fair.was_served(claim.request)
            key = claim.request.tenant or claim.request.request_id
            counts[key] = counts.get(key, 0) + 1
    assert 1 <= counts["x"] <= min(counts[f"old{i}"] for i in range(3)) + 1


class TestPace:
    @settings(deadline=None, max_examples=60)
    @given(
        share=st.floats(0.05, 0.95),
        decode_s=st.floats(1e-3, 1.0),
        token_s=st.floats(1e-6, 1e-2),
        noise=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=7),
    )
    def test_decodes_keep_their_share_of_the_time_and_prompts_never_stop_for_long(
        self, share: float, decode_s: float, token_s: float, noise: list[float]
    ) -> None:
        pace, steps, pauses, longest = Pace(share), 2000, 0, 0
        pace.observe(decode_s + 100 * token_s, decodes=0, prompt_tokens=100)
        pace.observe(decode_s, decodes=1, prompt_tokens=0)
        total = overshoot = 0.0
        for step in range(steps):
            allowed, target = pace.allowance(), pace.target_s
            assert allowed == 0 or allowed >= QUANTUM
            tokens = int(min(allowed, 2048))
            seconds = (decode_s + tokens * token_s) * (noise[step % len(noise)] if tokens else 1.0)
            pace.observe(seconds, decodes=1, prompt_tokens=tokens, target_s=target)
            total += seconds
            overshoot = max(overshoot, seconds)
            pauses = 0 if tokens else pauses + 1
            longest = max(longest, pauses)
        assert longest <= MOST_PAUSES + 1
        if QUANTUM * token_s * 1.25 <= MOST_PAUSES * (decode_s / share - decode_s):
            assert total * share <= 1.02 * steps * decode_s + overshoot

    def test_a_token_is_not_judged_by_chunks_of_a_few(self) -> None:
        pace = Pace(0.5)
        pace.observe(0.025, decodes=1, prompt_tokens=0)
        pace.observe(0.025 + 2048e-5, decodes=1, prompt_tokens=2048)
        for _ in range(3):
            pace.observe(0.025 + 0.001, decodes=1, prompt_tokens=2)  # 50 times as much a token
        assert pace.token_s == pytest.approx(1e-5, rel=0.5)

    def test_nothing_is_held_back_before_anything_is_known(self) -> None:
        pace = Pace(0.5)
        assert {pace.allowance() for _ in range(2 * PROBE_STEPS)} == {math.inf}
        assert pace.target_s is None

    def test_a_decode_only_step_is_measured_at_once_and_then_now_and_then(self) -> None:
        pace = Pace(0.5)
        pace.observe(0.1, decodes=0, prompt_tokens=1000)
        probes = []
        for step in range(3 * PROBE_STEPS):
            tokens, target = pace.allowance(), pace.target_s
            probes += [step] if tokens == 0 else []
            seconds = 0.05 + min(tokens, 100) * 1e-4 if tokens else 0.05
            pace.observe(seconds, decodes=1, prompt_tokens=int(min(tokens, 100)), target_s=target)
        assert probes == [0, PROBE_STEPS + 1, 2 * (PROBE_STEPS + 1)]

    def test_a_share_of_zero_is_no_guard(self) -> None:
        pace = Pace(0.0)
        pace.observe(0.025, decodes=1, prompt_tokens=0)
        pace.observe(10.0, decodes=1, prompt_tokens=10)
        assert (pace.allowance(), pace.target_s) == (math.inf, None)

    def test_what_fits_a_given_time_does_not_depend_on_what_is_owed(self) -> None:
        pace = Pace(0.5)
        pace.observe(0.02, decodes=1, prompt_tokens=0)
        pace.observe(1.02, decodes=1, prompt_tokens=1000, target_s=0.04)
        assert pace.allowance() == 0
        assert pace.tokens_within(0.5) == pytest.approx(480)
        assert pace.tokens_within(0.03) == QUANTUM


class TestTenants:
    def test_a_tenant_with_one_prompt_gets_as_much_as_one_with_ten(self) -> None:
        crowd = [prompt(f"x{i}", 50_000, tenant="x") for i in range(10)]
        run = VirtualTime([*crowd, prompt("y", 50_000, tenant="y")], prefill_policy="fair").run()
        for step in range(run["y"].token_steps[0]):
            parts = {s.request_id: s.num_tokens for s in run.steps[step].requests if not s.is_one_row}
            assert parts.pop("y", 0) >= 1024
            assert sum(parts.values()) <= 1024

    def test_within_a_tenant_the_shortest_remaining_goes_first(self) -> None:
        requests = [prompt("long", 60_000, tenant="x"), prompt("short", 6_000, at=0.02, tenant="x")]
        run = VirtualTime(requests, prefill_policy="fair").run()
        assert run["short"].token_steps[0] < 8
        assert run["short"].ttft < 0.3 * run["long"].ttft

    def test_within_a_tenant_a_long_prompt_ages_past_a_stream_of_short_ones(self) -> None:
        shorts = [
            prompt(f"short-{i}", 2048, at=0.042 * i, tenant="x") for i in range(400)
        ]  # all that there is time for
        run = VirtualTime([prompt("long", 40_000, tenant="x"), *shorts], prefill_policy="fair").run()
        alone = VirtualTime([prompt("long", 40_000)]).run()["long"].ttft
        assert run["long"].ttft < 6 * alone
        assert run["long"].ttft < 0.5 * run.clock, "shorts were still coming"


class TestNobodyStarves:
    def test_a_long_prompt_progresses_where_decodes_leave_64_tokens_a_step_and_shorts_take_as_many(self) -> None:
        shorts = [prompt(f"short-{i}", 64, at=0.5 + 0.05 * i) for i in range(400)]
        requests = [prompt("decode", 10, max_tokens=4000), prompt("long", 3000, at=0.4), *shorts]
        run = VirtualTime(requests, cost=DEAR, prefill_policy="fair").run()
        assert np.diff(run["long"].prompt_steps).max() <= 20
        assert run["long"].ttft < 25

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_large_prompt_that_waits_for_pages_is_overtaken_for_a_while_only(self, depth: int) -> None:
        # The large one needs 800 of 1,000 pages; small ones that come all the time would hold 400 of them for ever.
        smalls = [prompt(f"small-{i}", 640, at=0.02 * i, max_tokens=20) for i in range(1500)]
        requests = [prompt("large", 51_000, at=3.0), *smalls]
        run = VirtualTime(requests, usable_pages=1000, prefill_policy="fair", depth=depth).run()
        needs = 51_000 * (CHEAP_TOKEN_S) + 0.025
        overtaken = [
            r for r in smalls if r.arrival_time > 3.0 and run[r.request_id].first_step < run["large"].first_step
        ]
        assert overtaken, "small ones go on while the large one is fresh"
        began = run.lives["large"].token_times[0]
        assert began < 3.0 + 12 * needs + 3.0
        assert run["large"].request.num_preemptions <= 1

    def test_planning_looks_at_a_bounded_number_of_those_that_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(usable_pages=20, budget=256, max_num_seqs=300, max_model_len=60, prefill_policy="fair")
        engine.add(request_of("running", np.full(50, 5), max_tokens=3))
        engine.step()
        for i in range(3000):
            engine.scheduler.add_request(request_of(f"r{i}", np.arange(50) + i, max_tokens=1))
        counted = []
        lookup = engine.cache.lookup
        monkeypatch.setattr(engine.cache, "lookup", lambda request: counted.append(request) or lookup(request))
        engine.scheduler.schedule()
        assert 0 < len(counted) <= 2 * (256 // QUANTUM) + 2


CHEAP_TOKEN_S = StepCost().row_s


class TestTtftTarget:
    def mixed(self, target: float | None) -> VirtualTime:
        """Eight long prompts and decodes on a slow machine; then a prompt of 2,000 tokens, 2 s of work."""
        longs = [prompt(f"long-{i}", 20_000) for i in range(8)]
        decodes = [prompt(f"decode-{i}", 8, max_tokens=900) for i in range(3)]
        requests = [*decodes, *longs, prompt("late", 2000, at=5.0)]
        run = VirtualTime(requests, cost=DEAR, prefill_policy="fair", ttft_target=target)
        with pytest.raises(AssertionError, match="not done"):
            run.run(max_steps=800)
        return run

    def test_a_prompt_about_to_miss_it_goes_first_and_decodes_wait_no_longer_than_it(self) -> None:
        without, run = self.mixed(None), self.mixed(8.0)
        assert not without["late"].token_times or without["late"].ttft > 12.0
        assert run["late"].ttft <= 8.0 + 0.5
        assert np.diff(run["decode-0"].token_times).max() <= 8.0 + 0.5

    def test_one_that_cannot_make_it_does_not_push(self) -> None:
        run = self.mixed(1.0)
        assert not run["late"].token_times or run["late"].ttft > 8.0

    def test_only_late_ones_make_a_step_longer(self) -> None:
        run = self.mixed(8.0)
        steps = [s for s in run.steps if s.step > 100]
        parts = [{s.request_id: s.num_tokens for s in step.requests if not s.is_one_row} for step in steps]
        others = [sum(tokens for name, tokens in part.items() if name != "late") for part in parts]
        assert max(others) <= 600
        assert max(part.get("late", 0) for part in parts) > 600

    def test_late_ones_leave_the_others_a_part(self) -> None:
        shorts = [prompt(f"s{i}", 2000, at=0.05 * i) for i in range(200)]
        run = VirtualTime(
            [prompt("long", 100_000), *shorts], prefill_policy="fair", ttft_target=0.2, max_num_seqs=300
        ).run()
        rows = [s.num_tokens for step in run.steps for s in step.requests if s.request_id == "long"]
        assert np.diff(run["long"].prompt_steps).max() <= 2
        assert np.mean(rows) > 100
