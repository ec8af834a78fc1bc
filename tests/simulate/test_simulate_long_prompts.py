"""The steps of long prompts, through the real scheduler and page bookkeeping."""

from __future__ import annotations

import pytest
from traces import run, scheduled, steps_with

MILLION = 1_048_576
ROOM = {"max_model_len": MILLION + 1024}


@pytest.mark.parametrize(("budget", "steps"), [(16_384, 64), (8_192, 128), (16_385, 64), (16_383, 65)])
def test_a_million_tokens_take_as_many_steps_as_the_budget_divides_them_into(budget, steps):
    done = run(synthetic=f"a=1x{MILLION} out 1", max_num_batched_tokens=budget, **ROOM)
    assert len(done.steps) == steps
    assert sum(step.scheduled["a"] for step in done.steps) == MILLION
    assert done.requests["a"].first_token_step == steps - 1
    assert done.steps[-1].pages_in_use == MILLION // 64


def test_the_threshold_caps_a_prompt_that_is_not_alone():
    done = run(
        synthetic=f"decode=1x10 out 600, a=1x{MILLION} out 1",
        max_num_batched_tokens=16_384,
        long_prefill_token_threshold=4096,
        **ROOM,
    )
    assert len(steps_with(done, "a")) == 256


def test_the_threshold_does_not_cap_the_only_request():
    done = run(
        synthetic=f"a=1x{MILLION} out 1", max_num_batched_tokens=16_384, long_prefill_token_threshold=4096, **ROOM
    )
    assert len(done.steps) == 64


@pytest.mark.parametrize(("page", "cached"), [(64, 99_968), (32, 100_000), (63, 99_981)])
def test_a_shared_prefix_is_computed_once_in_whole_pages(page, cached):
    done = run(synthetic="doc=2x100500 every 60s shared 100000 out 1", block_size=page, max_num_batched_tokens=16_384)
    first, second = done.requests.values()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert scheduled(done)[-1] == {"doc-1": 100_500 - cached}
    assert done.summary()["hit_tokens"] == cached


def test_without_prefix_caching_nothing_is_found():
    done = run(synthetic="doc=2x1000 every 60s shared 900 out 1", enable_prefix_caching=False)
    assert done.requests["doc-1"].num_cached_tokens == 0


def test_prompts_given_by_their_length_share_nothing():
    done = run({"id": "a", "prompt_tokens": 640}, {"id": "b", "prompt_tokens": 640, "arrival_s": 90}, block_size=1)
    assert done.requests["b"].num_cached_tokens == 0


def test_a_salt_keeps_equal_prompts_apart():
    prompt = list(range(200))
    done = run(
        {"id": "a", "prompt_token_ids": prompt, "cache_salt": "x"},
        {"id": "b", "prompt_token_ids": prompt, "arrival_s": 50, "cache_salt": "y"},
        {"id": "c", "prompt_token_ids": prompt, "arrival_s": 99, "cache_salt": "x"},
        block_size=16,
    )
    assert [record.num_cached_tokens for record in done.requests.values()] == [0, 0, 192]


def test_the_end_of_one_prompt_and_the_beginning_of_the_next_share_a_step():
    done = run(synthetic=f"a=1x{6 * 16_384 + 2_816} out 4, b=1x50000 out 1", max_num_batched_tokens=16_384)
    assert scheduled(done)[5] == {"a": 16_384}
    assert scheduled(done)[6] == {"a": 2_816, "b": 16_384 - 2_816}
    assert scheduled(done)[7] == {"a": 1, "b": 16_383}
    assert done.steps[6].new == ["b"]


def test_a_short_prompt_overtakes_a_long_one_only_with_fair_shares():
    def steps_waited(policy: str) -> int:
        done = run(
            {"id": "long", "prompt_tokens": 500_000},
            {"id": "short", "prompt_tokens": 200, "at_step": 10},
            prefill_policy=policy,
        )
        assert done.requests["long"].finish_reason == done.requests["short"].finish_reason == "length"
        step = done.requests["short"].first_token_step
        assert step is not None
        return step - 10

    assert steps_waited("fair") <= 1
    assert steps_waited("ordered") == 500_000 // 4096 - 10
