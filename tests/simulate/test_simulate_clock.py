"""When things happen on the virtual clock: arrivals, aborts, ends, overlapping steps, drafts."""

from __future__ import annotations

import json

import pytest
from traces import run, scheduled

from longfill.scheduler import Schedule, Scheduler
from longfill.simulate import StepCost


def request(name: str, tokens: int = 10, **fields: object) -> dict[str, object]:
    return {"id": name, "prompt_tokens": tokens, "max_tokens": 4} | fields


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (StepCost(step_seconds=1, token_seconds=0, pair_seconds=0), [1, 1, 1, 1, 1]),
        (StepCost(step_seconds=0, token_seconds=1, pair_seconds=0), [4, 4, 2, 1, 1]),
        (StepCost(step_seconds=0, token_seconds=0, pair_seconds=1), [10, 26, 19, 11, 12]),
        (StepCost(step_seconds=100, token_seconds=10, pair_seconds=1), [150, 166, 139, 121, 122]),
    ],
)
def test_a_step_costs_itself_its_rows_and_what_they_see(cost, seconds):
    done = run(request("a", max_tokens=3), cost=cost, max_num_batched_tokens=4)
    assert [step.seconds for step in done.steps] == seconds
    assert [step.time_s for step in done.steps] == [sum(seconds[:i]) for i in range(5)]
    record = done.requests["a"]
    assert (record.first_token_s, record.finished_s) == (sum(seconds[:3]), sum(seconds))
    assert record.token_times == [sum(seconds[: i + 1]) for i in (2, 3, 4)]


@pytest.mark.parametrize("policy", ["ordered", "fair"])
def test_steps_may_take_no_time_at_all(policy):
    cost = StepCost(step_seconds=0, token_seconds=0, pair_seconds=0)
    many = [request(f"r{i}", tokens=9 + i) for i in range(9)]
    done = run(*many, cost=cost, prefill_policy=policy, max_num_batched_tokens=8, max_num_seqs=4)
    assert {record.finish_reason for record in done.requests.values()} == {"length"}


def test_the_defaults_let_a_long_prompt_less_than_double_a_decode_step():
    cost = StepCost()
    assert cost.of(2048 + 1, 2048 * 500_000) < 2 * cost.of(1, 500_000)


def test_a_request_can_be_in_the_first_step_that_begins_at_or_behind_its_arrival():
    done = run(request("a", max_tokens=9), request("b", arrival_s=3.0), request("c", arrival_s=3.001))
    assert done.requests["b"].first_scheduled_step == 3
    assert done.requests["c"].first_scheduled_step == 4
    assert done.requests["c"].ttft_s == pytest.approx(5 - 3.001)


def test_a_request_is_visible_to_the_step_that_it_names():
    done = run(request("a", max_tokens=9), request("b", at_step=3), request("c", at_step=0))
    assert [done.requests[name].first_scheduled_step for name in "abc"] == [0, 3, 0]
    assert done.requests["b"].arrival_s == 3.0
    assert done.steps[3].new == ["b"]


def test_idle_time_is_skipped_and_idle_steps_are_counted():
    done = run(request("a"), request("b", at_step=100), request("c", arrival_s=50.0))
    assert [step.step for step in done.steps] == [*range(4), *range(100, 104), *range(104, 108)]
    assert [step.time_s for step in done.steps] == [*range(8), *range(50, 54)]
    assert done.requests["b"].first_scheduled_s == 4.0


def test_an_abort_by_step_ends_a_request_before_that_step():
    done = run(request("a", max_tokens=9, at_step=0, abort_at_step=3), request("b", max_tokens=9))
    record = done.requests["a"]
    assert (record.finish_reason, record.finished_step, record.finished_s) == ("abort", 3, 3.0)
    assert record.output_token_ids == [1000, 1001, 1002]
    assert done.steps[3].finished == ["a"]
    assert "a" not in done.steps[3].scheduled


@pytest.mark.parametrize(("at", "outputs"), [(2.0, [1000, 1001]), (2.5, [1000, 1001, 1002])])
def test_an_abort_by_time_ends_a_request_once_the_step_in_flight_is_booked(at, outputs):
    done = run(request("a", max_tokens=9, abort_at_s=at), request("b", max_tokens=9))
    assert done.requests["a"].finish_reason == "abort"
    assert done.requests["a"].output_token_ids == outputs


def test_an_abort_of_the_last_request_belongs_to_no_step():
    done = run(request("a", max_tokens=9, abort_at_s=2.0))
    assert (done.requests["a"].finish_reason, done.requests["a"].finished_step) == ("abort", None)


def test_an_abort_behind_the_end_changes_nothing():
    plain = run(request("a"), request("b", arrival_s=90.0))
    late = run(request("a", abort_at_s=50.0), request("b", arrival_s=90.0, abort_at_s=1e6))
    assert json.dumps(late.to_json()) == json.dumps(plain.to_json())


def test_a_request_that_never_fits_is_refused_and_the_others_run():
    done = run(request("a"), request("b", tokens=500), num_pages=5, block_size=64)
    refused = done.requests["b"]
    assert (refused.finish_reason, refused.first_scheduled_step) == ("refused", None)
    assert refused.message is not None
    assert "500" in refused.message
    assert done.requests["a"].finish_reason == "length"
    assert done.summary()["finish_reasons"] == {"length": 1, "refused": 1}


def test_num_pages_counts_the_null_page():
    exact = run(request("a", tokens=60), num_pages=2)
    assert (exact.num_pages, exact.steps[-1].free_pages, exact.steps[0].pages_in_use) == (1, 1, 1)


def test_by_default_the_pool_holds_the_largest_requests_that_run_at_once():
    done = run(*(request(str(i), tokens=60 + i, max_tokens=4) for i in range(9)), max_num_seqs=3, block_size=64)
    assert done.num_pages == 3 * 2
    assert done.summary()["preemptions"] == 0


def test_who_is_preempted_comes_back_and_gets_all_its_outputs():
    done = run(request("a", max_tokens=60), request("b", max_tokens=60), num_pages=8, block_size=16)
    [index] = [i for i, step in enumerate(done.steps) if step.preempted]
    assert done.steps[index].preempted == ["b"]
    [back] = [step for step in done.steps if step.resumed]
    assert back.resumed == ["b"]
    assert back.step > index
    assert done.requests["b"].num_preemptions == 1
    assert done.requests["b"].output_token_ids == list(range(1000, 1060))
    assert done.steps[-1].free_pages == done.num_pages == 7


def test_outputs_are_as_given_and_count_up_behind():
    done = run(request("a", outputs=[7, 7], max_tokens=4), request("b", outputs=[5, 6, 5]) | {"max_tokens": 3})
    assert done.requests["a"].output_token_ids == [7, 7, 1002, 1003]
    assert done.requests["b"].output_token_ids == [5, 6, 5]


def test_an_end_of_text_ends_a_request_unless_it_ignores_it():
    done = run(request("a"), request("b", ignore_eos=True), request("c", outputs=[1002]), eos_token_ids=(1002,))
    assert [record.finish_reason for record in done.requests.values()] == ["stop", "length", "stop"]
    assert [len(record.output_token_ids) for record in done.requests.values()] == [3, 4, 1]


def test_overlapping_steps_are_computed_one_after_the_other_with_the_same_outputs():
    requests = [request("a", tokens=50, max_tokens=20), request("b", arrival_s=3.5), request("c", at_step=7)]
    apart = run(*requests, max_num_batched_tokens=16)
    together = run(*requests, max_num_batched_tokens=16, async_scheduling=True, max_concurrent_batches=3)
    for step, following in zip(together.steps, together.steps[1:], strict=False):
        assert following.time_s >= step.time_s + step.seconds
    for name, record in apart.requests.items():
        assert together.requests[name].output_token_ids == record.output_token_ids
    assert together.steps[-1].free_pages == together.num_pages


@pytest.mark.parametrize(("depth", "step"), [(1, 3), (2, 4), (4, 6)])
def test_steps_in_flight_make_a_new_request_wait_for_those_that_are_planned(depth, step):
    done = run(
        request("a", max_tokens=30),
        request("b", arrival_s=2.5),
        async_scheduling=depth > 1,
        max_concurrent_batches=depth,
    )
    assert done.requests["b"].first_scheduled_step == step


def test_a_step_that_nobody_could_fill_is_planned_when_someone_comes():
    done = run(
        request("a", max_tokens=1), request("b", arrival_s=0.5), request("c", arrival_s=0.75), async_scheduling=True
    )
    # The second of the two steps in flight is planned for b alone, before c is there.
    assert scheduled(done)[:3] == [{"a": 10}, {"b": 10}, {"b": 1, "c": 10}]
    assert done.steps[1].time_s == 1.0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("acceptance", "steps"), [(1.0, 5), (0.0, 17)])
def test_drafts_that_are_right_save_steps(acceptance, steps, depth):
    done = run(
        request("a", max_tokens=17),
        draft_acceptance=acceptance,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        async_scheduling=depth > 1,
    )
    record = done.requests["a"]
    assert record.output_token_ids == list(range(1000, 1017))
    assert len(record.token_times) == steps
    assert done.accepted_drafts >= 17 - steps
    assert (done.accepted_drafts == done.drafts) == (acceptance == 1.0)


def test_which_drafts_are_right_does_not_depend_on_the_policy():
    def accepted(**knobs: object) -> list[int]:
        done = run(
            *(request(str(i), tokens=100 + 30 * i, max_tokens=40, arrival_s=i) for i in range(4)),
            draft_acceptance=0.5,
            speculative_config={"method": "mtp", "num_speculative_tokens": 2},
            **knobs,
        )
        return [len(record.token_times) for record in done.requests.values()]

    assert accepted() == accepted(prefill_policy="fair", max_num_batched_tokens=33)
    assert accepted(seed=1) != accepted(seed=2)


def test_a_request_that_makes_no_progress_ends_with_an_error():
    # Others of higher priority take its pages each time before it has computed more than ever before.
    done = run(
        request("low", tokens=100, priority=1),
        *(request(f"high-{i}", tokens=100, arrival_s=3.0 + 12 * i) for i in range(5)),
        num_pages=8,
        block_size=16,
        max_num_batched_tokens=16,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
        progress_timeout=20.0,
    )
    low = done.requests["low"]
    assert (low.finish_reason, low.num_preemptions, low.output_token_ids) == ("error", 3, [])
    assert low.message is not None
    assert "preempted" in low.message
    ended_in = next(step for step in done.steps if "low" in step.finished)
    assert ended_in.step == low.finished_step
    assert done.summary()["finish_reasons"] == {"error": 1, "length": 5}


def test_a_scheduler_that_plans_nothing_for_those_who_wait_is_a_fault(monkeypatch):
    nothing = Schedule(0, (), (), (), ())
    monkeypatch.setattr(Scheduler, "schedule", lambda _self: nothing)
    with pytest.raises(RuntimeError, match="1 requests wait"):
        run(request("a"))
