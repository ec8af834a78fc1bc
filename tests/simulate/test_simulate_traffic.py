"""Random traces under random policies: everything ends, adds up, and comes out the same again."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from traces import run

SECONDS = st.integers(0, 80).map(lambda n: n / 4)


PROMPTS = st.one_of(
    st.builds(lambda n: {"prompt_tokens": n}, st.integers(1, 90)),
    st.builds(lambda n: {"prompt_token_ids": list(range(n))}, st.integers(1, 90)),
)
ARRIVALS = st.one_of(
    st.builds(lambda at, stay: {"arrival_s": at, "abort_at_s": at + stay}, SECONDS, SECONDS),
    st.builds(lambda at: {"arrival_s": at}, SECONDS),
    st.builds(lambda at: {"at_step": at}, st.integers(0, 50)),
)
REST = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20), "priority": st.integers(0, 2), "tenant": st.sampled_from(["", "x"])}
)
REQUESTS = st.lists(st.tuples(PROMPTS, ARRIVALS, REST), min_size=1, max_size=6).map(
    lambda parts: [{"id": f"r{i}"} | prompt | arrival | rest for i, (prompt, arrival, rest) in enumerate(parts)]
)
KNOBS = st.fixed_dictionaries(
    {
        "num_pages": st.integers(4, 40),
        "block_size": st.sampled_from([1, 4, 16]),
        "max_num_batched_tokens": st.sampled_from([1, 7, 64]),
        "max_num_seqs": st.integers(1, 4),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "prefill_policy": st.sampled_from(["ordered", "fair"]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "scheduler_reserve_full_isl": st.booleans(),
        "async_scheduling": st.booleans(),
        "max_concurrent_batches": st.integers(1, 3),
        "enable_prefix_caching": st.booleans(),
        "speculative_config": st.sampled_from([None, {"method": "mtp", "num_speculative_tokens": 2}]),
    }
)


@settings(max_examples=120, deadline=None)
@given(trace=REQUESTS, knobs=KNOBS)
def test_everything_ends_adds_up_and_comes_out_the_same_again(trace: list[dict[str, Any]], knobs: dict[str, Any]):
    done = run(*trace, max_model_len=120, **knobs)
    budget = knobs["max_num_batched_tokens"]
    for step, following in zip(done.steps, done.steps[1:], strict=False):
        assert following.step > step.step
        assert following.time_s >= step.time_s + step.seconds
    for step in done.steps:
        assert 0 < sum(step.scheduled.values()) <= budget
        assert step.prefills.items() <= step.scheduled.items()
        assert not set(step.new) & set(step.resumed)
        assert {*step.new, *step.resumed} <= step.scheduled.keys()
        assert 0 <= step.free_pages <= done.num_pages
        assert 0 < step.pages_in_use <= done.num_pages
    given = {request["id"]: request for request in trace}
    for name, record in done.requests.items():
        wanted = given[name]["max_tokens"]
        assert record.output_token_ids == list(range(1000, 1000 + len(record.output_token_ids)))
        if record.finish_reason == "length":
            assert len(record.output_token_ids) == min(wanted, 120 - record.prompt_tokens)
        else:
            assert record.finish_reason in ("abort", "refused", "error")
            assert len(record.output_token_ids) < wanted
    if all(record.finish_reason == "length" for record in done.requests.values()) and done.steps:
        assert done.steps[-1].free_pages == done.num_pages
    ended = [name for step in done.steps for name in step.finished]
    assert len(ended) == len(set(ended))
    again = run(*trace, max_model_len=120, **knobs)
    assert json.dumps(again.to_json()) == json.dumps(done.to_json())
