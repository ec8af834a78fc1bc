"""What is sent and what is made of the answers: reproducible loads, exact figures, checks that speak up."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.bench.serve_checks import (
    check_cache,
    check_client,
    check_load,
    check_outputs,
    check_prompt_lengths,
    failures,
)
from longfill.bench.serve_metrics import Answer, Wanted, concurrency, summarize
from longfill.bench.serve_plan import Job, PromptClass, Workload, arrivals, parse_mix
from longfill.bench.serve_prompts import CANDIDATES, TokenIds, Words, ask_for_words, make_prompt
from longfill.errors import ConfigError

LONG, SHORT = PromptClass(1000, 4), PromptClass(10, 20, weight=9)


def workload(**changes: Any) -> Workload:
    return Workload(**({"classes": (LONG, SHORT), "num_prompts": 50, "seed": 3} | changes))


def test_classes_come_by_weight_mixed_and_the_same_for_a_seed():
    jobs = workload().jobs()
    kinds = [job.kind for job in jobs]
    assert (kinds.count(0), kinds.count(1)) == (5, 45)
    assert kinds != sorted(kinds)
    assert jobs == workload().jobs() != workload(seed=4).jobs()
    assert {(job.input_len, job.output_len) for job in jobs} == {(1000, 4), (10, 20)}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(100, 200))
def test_every_class_gets_its_share_to_within_one(weights, count):
    classes = tuple(PromptClass(n + 1, 1, weight) for n, weight in enumerate(weights))
    kinds = [job.kind for job in workload(classes=classes, num_prompts=count).jobs()]
    for kind, weight in enumerate(weights):
        assert abs(kinds.count(kind) - count * weight / sum(weights)) < 1


def test_a_class_that_no_request_is_left_for_is_a_mistake():
    with pytest.raises(ConfigError, match=r"--num-prompts 4 leaves none for prompts of 1000:4; ask for at least 10"):
        workload(num_prompts=4).jobs()


def test_lengths_are_drawn_within_the_ratio_after_the_prefix():
    jobs = workload(range_ratio=0.5, prefix_len=7, num_prompts=400).jobs()
    long = [job.input_len - 7 for job in jobs if job.kind == 0]
    outputs = {job.output_len for job in jobs if job.kind == 1}
    assert min(long) >= 500
    assert max(long) <= 1500
    assert len(set(long)) > 20
    assert (min(outputs), max(outputs)) == (10, 30)
    assert workload(range_ratio=0.5, prefix_len=7).most_tokens(LONG) == 7 + 1500 + 6


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_the_rate_and_the_burstiness(burstiness):
    due = arrivals(np.random.default_rng(0), 20_000, 5.0, burstiness)
    gaps = np.diff(due)
    assert due[0] == 0.0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    # The spread of gamma-distributed gaps over their mean.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)
    assert not arrivals(np.random.default_rng(0), 5, math.inf, burstiness).any()


def test_mixes_are_read():
    assert parse_mix(["131072:16:1", "512:128:2.5"]) == (PromptClass(131072, 16, 1.0), PromptClass(512, 128, 2.5))
    assert parse_mix(["8:4"]) == (PromptClass(8, 4, 1.0),)


@pytest.mark.parametrize("spec", ["", "8", "8:x", "8:4:1:1", "0:4", "8:0", "8:4:0", "8:4:-1", "8:4:inf", "8:4:nan"])
def test_mixes_that_mean_nothing_are_mistakes(spec):
    with pytest.raises(ConfigError, match="expected PROMPT:OUTPUT:WEIGHT"):
        parse_mix([spec])


def test_a_class_given_twice_is_a_mistake():
    with pytest.raises(ConfigError, match="8:4 is given twice"):
        parse_mix(["8:4:1", "8:4:2"])


MAKERS = [TokenIds(1000), Words(CANDIDATES, 3)]


@pytest.mark.parametrize("maker", MAKERS, ids=["ids", "words"])
def test_prompts_have_their_length_and_share_the_prefix_alone(maker):
    prompts = [make_prompt(maker, Job(number, 0, 40, 1, 0.0), 10, seed=5) for number in range(30)]
    parts = [prompt.split() if isinstance(prompt, str) else prompt for prompt in prompts]
    assert {len(part) for part in parts} == {40}
    assert all(part[:10] == parts[0][:10] for part in parts)
    # Ids and words are few: two prompts may agree in a place by chance, but not in many.
    assert len({tuple(part[10:14]) for part in parts}) == 30
    assert make_prompt(maker, Job(0, 0, 40, 1, 0.0), 10, seed=6) != prompts[0]
    assert make_prompt(maker, Job(0, 0, 40, 1, 0.0), 10, seed=5) == prompts[0]


@pytest.mark.parametrize("bad", [[], ["river"], CANDIDATES[10:60], CANDIDATES[:-20]], ids=len)
def test_words_of_several_tokens_are_found_and_left_out(bad):
    asked = 0

    async def count(prompt: str) -> int:
        nonlocal asked
        asked += 1
        return 7 + sum(1 + (word in bad) for word in prompt.split())

    words = asyncio.run(ask_for_words(count))
    assert words.added == 7
    assert sorted(words.words) == sorted(set(CANDIDATES) - set(bad))
    assert asked <= 2 + 2 * len(bad) * math.ceil(math.log2(len(CANDIDATES)))


def test_a_server_without_whole_words_cannot_be_sent_text_of_a_known_length():
    async def bytes_of(prompt: str) -> int:
        return len(prompt)

    with pytest.raises(ConfigError, match=r"only \d+ common words are one token .*--vocab-size"):
        asyncio.run(ask_for_words(bytes_of))


def answer(**changes: Any) -> Answer:
    """Sent at 1 s, tokens at 3, 4 and 6 s, done at 7 s."""
    job = Job(
        0, changes.pop("kind", 0), changes.pop("input_len", 10), changes.pop("output_len", 3), changes.pop("due", 1.0)
    )
    times = changes.pop("times", [3.0, 4.0, 6.0])
    fields = {
        "sent": 1.0, "ended": 7.0, "token_times": times, "first": times[0] if times else None, "prompt_tokens": 10,
        "cached_tokens": 0, "completion_tokens": len(times),
    }  # fmt: skip
    return Answer(job, **(fields | changes))


WANTED = Wanted(("ttft", "tpot", "itl", "e2el", "client_queue_time"), (50.0, 99.9))


def test_figures_are_those_of_the_definitions():
    answers = [
        answer(due=0.5),
        answer(sent=2.0, ended=11.0, times=[7.0], kind=1),
        answer(kind=1, failure="rejected", ended=1.5, times=[]),
    ]
    values = summarize(answers, (LONG, SHORT), WANTED)
    overall, (long, short) = values["overall"], values["classes"]
    assert values["duration"] == 10.0
    assert (overall["completed"], overall["failed"]) == (2, 1)
    assert (overall["total_input_tokens"], overall["total_output_tokens"]) == (20, 4)
    assert (overall["request_throughput"], overall["output_throughput"]) == (0.2, 0.4)
    assert overall["total_token_throughput"] == 2.4
    assert (overall["max_concurrent_requests"], overall["mean_concurrent_requests"]) == (2, 1.55)
    assert overall["mean_ttft_ms"] == 3500.0
    assert overall["p50_ttft_ms"] == overall["median_ttft_ms"] == 3500.0
    assert overall["p99.9_ttft_ms"] == pytest.approx(4997.0)
    assert overall["mean_tpot_ms"] == overall["mean_itl_ms"] == 1500.0
    assert overall["std_itl_ms"] == 500.0
    assert overall["mean_e2el_ms"] == 7500.0
    assert (long["mean_client_queue_time_ms"], short["mean_client_queue_time_ms"]) == (500.0, 1000.0)
    assert (long["name"], short["name"], short["failed"], short["mean_itl_ms"]) == ("1000:4", "10:20", 1, None)
    assert long["curves"]["itl"][0] == 1000.0
    assert long["curves"]["itl"][-1] == 2000.0
    assert short["curves"]["itl"] == []
    assert overall["request_goodput"] is None


def test_goodput_counts_requests_that_meet_every_objective():
    answers = [answer(), answer(sent=2.0, ended=11.0, times=[7.0])]
    for objectives, good in (
        ({"ttft": 2000.0}, 1),
        ({"ttft": 5000.0}, 2),
        ({"ttft": 5000.0, "tpot": 1400.0}, 1),
        ({"ttft": 5000.0, "e2el": 5000.0}, 0),
    ):
        values = summarize(answers, (LONG,), Wanted(("ttft",), (99.0,), objectives))
        assert values["overall"]["request_goodput"] == pytest.approx(good / 10)


def test_tpot_counts_tokens_and_itl_chunks():
    several = answer(completion_tokens=7)
    assert (several.tpot, several.itls) == (0.5, [1.0, 2.0])
    assert answer(completion_tokens=None).tpot == 1.5
    assert answer(completion_tokens=None).output_tokens == 3


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1))
def test_the_most_in_flight_is_the_most_at_any_moment(spans):
    answers = [answer(sent=float(start), ended=float(start + length)) for start, length in spans]
    moments = [sum(start <= t < start + length for start, length in spans) for t in range(101)]
    most, mean = concurrency(answers, 100.0)
    assert (most, mean) == (max(moments), pytest.approx(sum(moments) / 100))


@pytest.mark.parametrize(
    ("counts", "added", "level", "said"),
    [
        ([10, 10], 0, "ok", "as asked for"),
        ([14, 14], 4, "ok", "+4 tokens each"),
        ([14, 10], 4, "ok", "+0 to +4"),
        ([15, 14], 4, "error", "1 of 2 prompts had other lengths than asked for (+4 to +5 tokens)"),
        ([9, 9], 4, "error", "2 of 2"),
        ([11, 10], 0, "error", "1 of 2"),
        ([10, None], 0, "warning", "where 1 answers say it"),
        ([None, None], 0, "warning", "no usage"),
    ],
)
def test_plan_05_lengths_that_the_server_did_not_count_are_an_error(counts, added, level, said):
    check = check_prompt_lengths([answer(prompt_tokens=count) for count in counts], added)
    assert check.level == level
    assert said in check.message


@pytest.mark.parametrize(
    ("cached", "shared", "level", "said"),
    [
        ([0, 0], 0, "ok", "0.0% of prompt tokens"),
        ([500, 0], 0, "warning", "25.0% OF PROMPT TOKENS WERE CACHED, 500 more tokens"),
        ([500, 500], 500, "ok", "50.0% of prompt tokens"),
        ([600, 500], 500, "warning", "100 more tokens"),
        ([None, None], 0, "warning", "does not say"),
    ],
)
def test_plan_05_prompts_found_in_the_cache_are_warned_about(cached, shared, level, said):
    check = check_cache([answer(prompt_tokens=1000, cached_tokens=count) for count in cached], shared)
    assert check.level == level
    assert said in check.message


def test_outputs_of_other_lengths_are_an_error_where_the_end_was_to_be_ignored():
    short = [answer(output_len=20), answer()]
    assert [check.level for check in check_outputs(short, ignore_eos=True)] == ["error"]
    assert [check.level for check in check_outputs(short, ignore_eos=False)] == ["warning"]
    assert check_outputs([answer()], ignore_eos=True)[0].message == "as asked for"
    (check,) = check_outputs([answer(output_len=3)] * 40 + [answer(output_len=4)], ignore_eos=False)
    assert (check.level, check.message) == ("ok", "123 of 124 tokens asked for; 1 of 41 outputs had another length")


def test_chunks_of_several_tokens_are_said():
    lengths, chunks = check_outputs([answer(completion_tokens=9, output_len=9)], ignore_eos=True)
    assert (lengths.level, chunks.level) == ("ok", "warning")
    assert "3.0 tokens" in chunks.message


@pytest.mark.parametrize(
    ("lag", "cpu", "level"), [(0.001, 0.2, "ok"), (0.05, 0.2, "ok"), (0.2, 0.2, "warning"), (0.001, 0.95, "warning")]
)
def test_a_client_that_is_late_or_busy_says_so(lag, cpu, level):
    # Gaps of the answer are 1 and 2 s, its first token came after 2 s: a tenth of the gap is 0.15 s.
    assert check_client([answer()], [lag] * 50, cpu).level == level


def test_requests_that_were_sent_late_are_warned_about():
    late = [answer(due=0.2), answer(due=0.99)]
    assert check_load(late, paced=True).level == "warning"
    assert "by up to 0.8 s" in check_load(late, paced=True).message
    assert check_load(late, paced=False).level == check_load([answer()] * 2, paced=True).level == "ok"


def test_failures_are_counted_by_kind_with_the_first_message():
    answers = [answer(failure=kind, message=f"{kind} {n}") for n, kind in enumerate(["a", "b", "b"])]
    assert failures([*answers, answer()]) == [
        {"kind": "b", "count": 2, "message": "b 1"},
        {"kind": "a", "count": 1, "message": "a 0"},
    ]
