"""What a trace may say, and what is said about one that says something else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from traces import run, trace_of

from longfill.errors import ConfigError
from longfill.simulate import StepCost, read_trace, synthetic_trace

GOOD = '{"id": "a", "prompt_tokens": 5}'


def test_a_line_with_everything():
    [request] = read_trace(
        [
            json.dumps(
                {
                    "id": "a", "prompt_token_ids": [3, 1, 2], "max_tokens": 7, "at_step": 4, "abort_at_step": 9,
                    "priority": -2, "tenant": "t", "cache_salt": "s", "outputs": [8, 9], "ignore_eos": True,
                }
            )
        ],
        "test",
    )  # fmt: skip
    assert request.prompt.token_ids().tolist() == [3, 1, 2]
    assert (request.max_tokens, request.at_step, request.abort_at_step) == (7, 4, 9)
    assert (request.priority, request.tenant, request.cache_salt, request.ignore_eos) == (-2, "t", "s", True)
    assert [request.output(i) for i in range(4)] == [8, 9, 1002, 1003]


def test_what_a_line_leaves_out():
    a, b, c = read_trace(
        [
            "",
            GOOD,
            "  ",
            '{"id": 7, "prompt_tokens": 2, "outputs": [1, 2]}',
            '{"id": "c", "prompt_tokens": 1, "max_tokens": null}',
        ],
        "test",
    )
    assert (a.id, a.max_tokens, a.arrival_s, a.at_step, a.tenant) == ("a", 16, 0.0, None, "")
    assert (b.id, b.max_tokens) == ("7", 2)
    assert c.max_tokens is None


def test_prompts_given_by_length_share_no_token_with_any_other():
    trace = trace_of(
        {"id": "a", "prompt_tokens": 50},
        {"id": "b", "prompt_token_ids": [0, 2**31 - 1]},
        {"id": "c", "prompt_tokens": 50},
    )
    tokens = np.concatenate([request.prompt.token_ids() for request in trace])
    assert np.unique(tokens).size == tokens.size == 102
    assert trace[0].prompt.num_tokens == 50


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{oops", "JSON"),
        pytest.param("[" * 100_000, "JSON", id="too deep"),
        pytest.param('{"id": "b", "prompt_tokens": 1' + "0" * 5000 + "}", "JSON", id="too many digits"),
        ("[1]", "expected an object"),
        ('{"prompt_tokens": 5}', "no id"),
        ('{"id": "b"}', "prompt_token_ids or prompt_tokens"),
        ('{"id": "", "prompt_tokens": 5}', "id must be"),
        ('{"id": 1.5, "prompt_tokens": 5}', "id must be"),
        ('{"id": "b", "prompt_tokens": 0}', "prompt_tokens must be"),
        ('{"id": "b", "prompt_tokens": 100000001}', "prompt_tokens must be"),
        ('{"id": "b", "prompt_tokens": true}', "prompt_tokens must be"),
        ('{"id": "b", "prompt_token_ids": []}', "prompt_token_ids must be"),
        ('{"id": "b", "prompt_token_ids": [1, -1]}', "prompt_token_ids must be"),
        ('{"id": "b", "prompt_token_ids": [2147483648]}', "prompt_token_ids must be"),
        ('{"id": "b", "prompt_token_ids": [1], "prompt_tokens": 1}', "both given"),
        ('{"id": "b", "prompt_tokens": 5, "max_tokens": 0}', "max_tokens must be"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": -1}', "arrival_s must be"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": NaN}', "arrival_s must be"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": Infinity}', "arrival_s must be"),
        ('{"id": "b", "prompt_tokens": 5, "at_step": 1.0}', "at_step must be"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": 1, "at_step": 1}', "both given"),
        ('{"id": "b", "prompt_tokens": 5, "abort_at_s": 1, "abort_at_step": 1}', "both given"),
        ('{"id": "b", "prompt_tokens": 5, "at_step": 1, "abort_at_s": 1}', "both given"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": 1, "abort_at_step": 1}', "both given"),
        ('{"id": "b", "prompt_tokens": 5, "arrival_s": 2, "abort_at_s": 1.5}', "before its arrival_s"),
        ('{"id": "b", "prompt_tokens": 5, "at_step": 2, "abort_at_step": 1}', "before its at_step"),
        ('{"id": "b", "prompt_tokens": 5, "priority": "high"}', "priority must be"),
        ('{"id": "b", "prompt_tokens": 5, "tenant": 3}', "tenant must be"),
        ('{"id": "b", "prompt_tokens": 5, "outputs": 3}', "outputs must be"),
        ('{"id": "b", "prompt_tokens": 5, "ignore_eos": 1}', "ignore_eos must be"),
        ('{"id": "b", "prompt_tokens": 5, "temperature": 1}', "'temperature' is not known"),
        ('{"id": "a", "prompt_tokens": 5}', "that of line 1"),
    ],
)
def test_a_mistake_names_file_line_and_field(line, named):
    with pytest.raises(ConfigError) as error:
        read_trace([GOOD, line], "some.jsonl")
    assert str(error.value).startswith("some.jsonl, line 2: ")
    assert named in str(error.value)


def test_an_empty_trace_is_a_mistake():
    with pytest.raises(ConfigError, match=r"some\.jsonl: there is no request"):
        read_trace(["\n"], "some.jsonl")


def test_groups_become_requests():
    trace = synthetic_trace("long=1x500, short=3x20 at 1s every 0.5s out 4 tenant t priority -1", 0)
    assert [(r.id, r.prompt.num_tokens, r.arrival_s, r.max_tokens, r.tenant, r.priority) for r in trace] == [
        ("long", 500, 0.0, 16, "", 0),
        ("short-0", 20, 1.0, 4, "t", -1),
        ("short-1", 20, 1.5, 4, "t", -1),
        ("short-2", 20, 2.0, 4, "t", -1),
    ]


def test_a_group_may_share_a_beginning_and_nothing_else():
    a, b, other = (r.prompt.token_ids() for r in synthetic_trace("doc=2x30 shared 20, other=1x30", 0))
    assert (a[:20] == b[:20]).all()
    assert not np.isin(a[20:], b).any()
    assert not np.isin(other, np.concatenate([a, b])).any()


def test_random_arrivals_follow_the_seed_and_have_the_mean_that_is_asked_for():
    def arrivals(seed: int) -> list[float]:
        return [request.arrival_s for request in synthetic_trace("a=2000x1 at 2s every ~0.5s", seed)]

    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert arrivals(1)[0] == 2.0
    assert np.mean(np.diff(arrivals(1))) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "cannot read ''"),
        ("a=1x5,", "cannot read ''"),
        ("a=5", "a=5"),
        ("a=1x5 at", "a=1x5 at"),
        ("a=0x5", "got 0 of 5"),
        ("a=1x0", "got 1 of 0"),
        ("a=1000001x5", "got 1,000,001"),
        ("a=1x5 at 2", "at takes"),
        ("a=1x5 at 2s at 3s", "at takes"),
        ("a=1x5 every -1s", "every takes"),
        pytest.param("a=2x5 every 1" + "0" * 400 + "s", "never arrive", id="at infinity"),
        ("a=1x5 out x", "out takes"),
        ("a=1x5 out 0", "out must be"),
        ("a=1x5 shared 6", "shared 6"),
        ("a=1x5 when 2s", "'when' is not known"),
        ("a=1x5, a=1x6", "'a'"),
        ("a=2x5, a-1=1x6", "'a-1'"),
    ],
)
def test_a_mistake_in_a_group_is_named(text, named):
    with pytest.raises(ConfigError) as error:
        synthetic_trace(text, 0)
    assert str(error.value).startswith("--synthetic: ")
    assert named in str(error.value)


@pytest.mark.parametrize("knob", ["step_seconds", "token_seconds", "pair_seconds"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_a_cost_is_a_finite_time(knob, value):
    with pytest.raises(ConfigError, match="--" + knob.replace("_", "-")):
        StepCost(**{knob: value})


def test_a_request_without_an_end_needs_a_longest_sequence():
    endless = {"id": "a", "prompt_tokens": 5, "max_tokens": None}
    with pytest.raises(ConfigError, match="--max-model-len: request a"):
        run(endless)
    assert run(endless, max_model_len=12).requests["a"].output_token_ids == list(range(1000, 1007))
