"""`longfill run`: where the prompt comes from, what goes to stdout, and the JSON object."""

from __future__ import annotations

import json

import pytest

from longfill.request import SamplingParams

RUN_KEYS = {
    "model", "text", "token_ids", "prompt_tokens", "cached_tokens", "steps", "ttft_s", "prefill_tokens_per_s",
    "peak_rss_bytes", "digest", "stats", "finish_reason", "memory", "kernel_paths", "outputs",
}  # fmt: skip


@pytest.mark.usefixtures("engines")
def test_plain_output_is_the_completion_alone(longfill):
    ran = longfill("run", "--prompt", "two words")
    assert ran.code == 0
    assert ran.out == "an answer\n"
    assert "prompt tokens" in ran.err


@pytest.mark.usefixtures("engines")
def test_json_is_one_object_with_the_promised_keys(longfill):
    ran = longfill("run", "--prompt", "two words", "--json")
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    values = json.loads(ran.out)
    assert values.keys() == RUN_KEYS
    assert values["model"] == "needle"
    assert values["text"] == "an answer"
    assert values["finish_reason"] == "stop"
    own = {"index": 0, "text": "an answer", "token_ids": [7] * 128, "finish_reason": "stop", "stop_reason": None}
    assert values["outputs"] == [own]
    assert values["prompt_tokens"] == 3
    assert values["cached_tokens"] == 2
    assert values["steps"] == 3
    assert values["ttft_s"] == pytest.approx(0.5)
    assert values["prefill_tokens_per_s"] == pytest.approx(2.0)
    assert values["peak_rss_bytes"] > 1_000_000
    assert values["digest"] is None
    assert {"indexer_chunks", "scored_pairs", "gathered_rows", "seconds"} <= values["stats"].keys()
    assert values["memory"]["reserved"] == sum(row["bytes"] for row in values["memory"]["rows"]) == 643_000
    assert values["memory"]["budget"] == 1_000_000


@pytest.mark.usefixtures("engines")
def test_digest_is_printed_when_asked_for(longfill):
    assert json.loads(longfill("run", "--prompt", "x", "--digest", "--json").out)["digest"] == "ab" * 32


@pytest.mark.usefixtures("engines")
def test_logprobs_come_in_json_most_likely_first_and_minus_infinity_as_null(longfill):
    values = json.loads(longfill("run", "--prompt", "x", "--logprobs", "2", "--max-tokens", "1", "--json").out)
    assert values["logprobs"] == [
        [
            {"token_id": 7, "logprob": -0.1, "rank": 1, "token": "x"},
            {"token_id": 8, "logprob": None, "rank": 2, "token": None},
        ]
    ]


def test_sampling_flags_reach_the_engine(longfill, engines):
    numbers = ["--max-tokens=5", "--temperature=0.5", "--top-p=0.9", "--top-k=3", "--min-p=0.1"]
    counts = ["--logprobs=2", "--prompt-logprobs=3"]
    assert longfill("run", "--prompt=x", *numbers, *counts, "--ignore-eos", "--stop=a", "--stop=b c").code == 0
    assert engines.last.params == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, logprobs=2, prompt_logprobs=3, ignore_eos=True,
        stop=["a", "b c"],
    )  # fmt: skip


def test_flags_that_change_logits_reach_the_engine(longfill, engines):
    numbers = ["--presence-penalty=0.5", "--frequency-penalty=-2", "--repetition-penalty=1.25", "--min-tokens=3"]
    bias = ["--logit-bias", '{"7": -100, "12": 2.5}']
    assert longfill("run", "--prompt=x", "--n=2", "--temperature=1", "--max-tokens=9", *numbers, *bias).code == 0
    assert engines.last.params == SamplingParams(
        n=2, temperature=1, max_tokens=9, presence_penalty=0.5, frequency_penalty=-2.0, repetition_penalty=1.25,
        min_tokens=3, logit_bias={7: -100.0, 12: 2.5},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--logit-bias", "[1]"], "--logit-bias: expected a JSON object"),
        (["--logit-bias", "{"], "--logit-bias: expected a JSON object"),
        (["--logit-bias", "null"], "--logit-bias: expected a JSON object"),
        (["--logit-bias", '{"x": 1}'], "--logit-bias: expected a JSON object"),
        (["--logit-bias", '{"7": "a"}'], "logit_bias must be"),
        (["--logit-bias", '{"7": 101}'], "logit_bias must be"),
        (["--n", "2"], "n must be 1 with temperature 0"),
        (["--min-tokens", "129"], "min_tokens must be at most max_tokens 128"),
        (["--presence-penalty", "2.1"], "presence_penalty must be in [-2, 2]"),
    ],
)
def test_sampling_flags_out_of_range_are_refused_before_the_model_is_loaded(longfill, engines, flags, named):
    ran = longfill("run", "--prompt", "x", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err
    assert engines.made == []


@pytest.mark.usefixtures("engines")
def test_prompt_logprobs_come_in_json_with_the_prompts_token_first(longfill):
    values = json.loads(longfill("run", "--prompt", "x", "--prompt-logprobs", "1", "--json").out)
    assert values.keys() == RUN_KEYS | {"prompt_logprobs"}
    assert values["prompt_logprobs"] == [
        None,
        [
            {"token_id": 2 + ord("x"), "logprob": -3.0, "rank": 9, "token": "p"},
            {"token_id": 7, "logprob": -0.5, "rank": 1, "token": None},
        ],
    ]


@pytest.mark.usefixtures("engines")
def test_several_completions_are_printed_under_a_line_each_and_all_stand_in_json(longfill):
    flags = ["--prompt=x", "--n=2", "--temperature=1", "--max-tokens=2", "--logprobs=1"]
    ran = longfill("run", *flags)
    assert ran.out == "--- 0 (stop) ---\nan answer\n--- 1 (stop) ---\nan answer\n"
    assert "4 generated (stop)" in ran.err
    values = json.loads(longfill("run", *flags, "--json").out)
    assert [each["index"] for each in values["outputs"]] == [0, 1]
    assert [len(each["logprobs"]) for each in values["outputs"]] == [2, 2]


def test_one_failed_completion_does_not_hide_the_others(longfill, engines):
    engines.last_finish = "error"
    ran = longfill("run", "--prompt=x", "--n=3", "--temperature=1")
    assert ran.code == 2
    assert ran.out.count("an answer") == 3
    assert "completion 2 failed: logits are not numbers" in ran.err
    assert "(stop, error)" in ran.err
    engines.finish = "error"
    ran = longfill("run", "--prompt=x", "--n=3", "--temperature=1")
    assert (ran.code, ran.out) == (2, "")
    assert "request 0 failed: logits are not numbers" in ran.err


def test_prompt_file_is_read_whole(longfill, engines, tmp_path):
    (tmp_path / "p.txt").write_text("zwölf\nlines\n", encoding="utf-8")
    assert longfill("run", "--prompt-file", str(tmp_path / "p.txt")).code == 0
    assert engines.last.asked == ["zwölf\nlines\n"]


@pytest.mark.parametrize("flags", [[], ["--prompt-file", "-"]], ids=["no flag", "dash"])
def test_a_pipe_is_the_prompt(longfill, engines, stdin, flags):
    stdin(b"from a pipe")
    assert longfill("run", *flags).code == 0
    assert engines.last.asked == ["from a pipe"]


@pytest.mark.parametrize(
    ("data", "named"),
    [(None, "no prompt"), (b"", "empty"), (b"ab\xff", "byte 2")],
    ids=["terminal", "empty", "latin-1"],
)
def test_a_terminal_an_empty_pipe_and_binary_are_refused(longfill, engines, stdin, data, named):
    stdin(data)
    ran = longfill("run")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert named in ran.err
    assert engines.made == []


@pytest.mark.usefixtures("engines")
def test_a_file_that_is_not_utf8_is_refused(longfill, tmp_path):
    (tmp_path / "p.bin").write_bytes(b"\x80abc")
    ran = longfill("run", "--prompt-file", str(tmp_path / "p.bin"))
    assert ran.code == 2
    assert "not UTF-8" in ran.err


def test_chat_renders_the_template_and_adds_no_second_bos(longfill, engines):
    assert longfill("run", "--chat", "--prompt", "hello").code == 0
    tokenizer = engines.last.tokenizer
    expected = tokenizer.encode("<user>hello<assistant>", add_special_tokens=False).tolist()
    assert [prompt.tolist() for prompt in engines.last.asked] == [expected]


@pytest.mark.usefixtures("engines")
def test_text_without_a_tokenizer_is_refused(longfill):
    ran = longfill("run", "--prompt", "x", "--skip-tokenizer-init", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "--skip-tokenizer-init" in ran.err


@pytest.mark.usefixtures("engines")
def test_what_is_reserved_is_shown_with_sum_and_budget(longfill):
    err = longfill("run", "--prompt", "x").err
    for text in ("weights", "3,000", "3 tensors [bf16]", "640,000", "643,000", "1,000,000", "index_topk: reference"):
        assert text in err


def test_an_unprintable_character_does_not_end_the_command(longfill, engines):
    engines.answer = lambda _prompt: "lone surrogate \udc80"
    assert longfill("run", "--prompt", "x").code == 0
    assert json.loads(longfill("run", "--prompt", "x", "--json").out)["text"] == "lone surrogate \udc80"
