"""`longfill demo` and `longfill eval needle`: exact prompt lengths, strict scoring, honest verdicts."""

from __future__ import annotations

import json
import re

import pytest
from fake_engine import MODEL_LIMIT

from longfill.cli import needle_eval
from longfill.cli.needle_task import ANSWER_TOKENS, is_exact
from longfill.needle.haystack import Fact
from longfill.request import CompletionOutput, RequestOutput


def right_answer(prompt: str) -> str:
    """Reads the text and answers its question."""
    name = re.findall(r"access code of (\w+ \w+)\?", prompt)[-1]
    [code] = {
        code
        for pattern in (rf"{name} is (\d{{5}})\.", rf"{name} has the access code (\d{{5}})\.",
                        rf"{name} must use the access code (\d{{5}})\.")
        for code in re.findall(pattern, prompt)
    }  # fmt: skip
    return code


@pytest.fixture
def knowing(engines):
    engines.answer = right_answer
    return engines


def test_demo_asks_a_prompt_of_exactly_the_context_and_finds_the_answer_right(longfill, knowing):
    ran = longfill("demo", "--context", "1500", "--json")
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values["correct"] is True
    assert values["prompt_tokens"] == values["context"] == 1500
    assert values["text"] == values["expected"]
    assert values["seed"] == 0
    assert 0 <= values["depth"] <= 1
    assert knowing.last.args.max_model_len == 1500 + ANSWER_TOKENS


@pytest.mark.usefixtures("knowing")
def test_demo_shows_question_expected_answer_and_verdict(longfill):
    ran = longfill("demo", "--context", "1500")
    values = json.loads(longfill("demo", "--context", "1500", "--json").out)
    assert ran.code == 0
    assert values["question"] in ran.out
    assert ran.out.count(values["expected"]) == 2
    assert "RIGHT" in ran.out


@pytest.mark.usefixtures("engines")
def test_demo_with_a_wrong_answer_is_exit_code_1(longfill):
    ran = longfill("demo", "--context", "1500")
    assert ran.code == 1
    assert "WRONG" in ran.out
    assert "RIGHT" not in ran.out
    values = json.loads(longfill("demo", "--context", "1500", "--json").out)
    assert values["correct"] is False


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.usefixtures("knowing")
def test_demo_states_the_fact_at_the_depth_given(longfill, depth):
    values = json.loads(longfill("demo", "--context", "4000", "--depth", str(depth), "--json").out)
    assert values["depth"] == pytest.approx(depth, abs=0.03)


@pytest.mark.usefixtures("knowing")
def test_demo_seed_changes_the_text_and_repeats_it(longfill):
    first, again, other = (
        json.loads(longfill("demo", "--context", "1500", "--seed", seed, "--json").out)["expected"]
        for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.usefixtures("engines")
def test_a_context_too_small_for_its_facts_is_refused(longfill):
    ran = longfill("demo", "--context", "50", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "at least" in ran.err.splitlines()[-1]


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("more", [[], ["--max-model-len", "1600"]], ids=["model", "flag"])
def test_a_context_beyond_the_limit_is_refused_before_loading(longfill, engines, more):
    context = 1601 if more else MODEL_LIMIT + 1
    ran = longfill("demo", "--context", str(context), *more, "--json")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert f"{context:,}" in ran.err
    assert engines.made == []


def test_a_context_at_the_limit_keeps_room_for_the_answer(longfill, knowing):
    for context in (MODEL_LIMIT, MODEL_LIMIT - ANSWER_TOKENS, MODEL_LIMIT - ANSWER_TOKENS - 1):
        values = json.loads(longfill("demo", "--context", str(context), "--json").out)
        assert values["correct"] is True
        assert values["context"] == context
        assert values["prompt_tokens"] == min(context, MODEL_LIMIT - ANSWER_TOKENS)
        assert knowing.last.args.max_model_len == min(context + ANSWER_TOKENS, MODEL_LIMIT)


def test_max_model_len_given_is_kept(longfill, knowing):
    longfill("demo", "--context", "1500", "--max-model-len", "9000")
    assert knowing.last.args.max_model_len == 9000


@pytest.mark.parametrize(
    ("text", "reason", "exact"),
    [
        ("48213", "stop", True),
        (" 48213", "stop", True),
        ("48213", "length", False),
        ("48213.", "stop", False),
        ("482130", "stop", False),
        ("4821", "stop", False),
        ("48214", "stop", False),
        ("4 8 2 1 3", "stop", False),
        ("The code is 48213", "stop", False),
        ("", "stop", False),
    ],
)
def test_scoring_is_the_exact_digits_then_the_end(text, reason, exact):
    output = RequestOutput("0", None, [], [CompletionOutput(0, text, [], reason)], finished=True)
    assert is_exact(output, Fact("amber Kestrel", "48213", 0.5)) is exact


def test_eval_prints_a_list_with_every_trial_counted(longfill, knowing):
    ran = longfill("eval", "needle", "--contexts", "1500,3000", "--trials", "7", "--questions-per-text", "3", "--json")
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    short, long = json.loads(ran.out)
    assert (short["context"], short["trials"], short["exact"], short["texts"]) == (1500, 7, 7, 3)
    assert (long["context"], long["trials"], long["exact"], long["texts"]) == (3000, 7, 7, 3)
    assert sum(band["trials"] for band in long["by_depth"]) == 7
    assert sum(band["exact"] for band in long["by_depth"]) == 7
    assert long["wrong"] == []
    assert long["prompt_tokens"] == 7 * 3000
    assert len(knowing.made) == 1
    assert knowing.last.args.max_model_len == 3000 + ANSWER_TOKENS


def test_eval_counts_only_exact_answers_and_lists_the_wrong_ones(longfill, engines):
    asked = []

    def every_third_wrong(prompt: str) -> str:
        asked.append(prompt)
        return right_answer(prompt) + ("." if len(asked) % 3 == 0 else "")

    engines.answer = every_third_wrong
    [result] = json.loads(longfill("eval", "needle", "--contexts", "2000", "--trials", "9", "--json").out)
    assert (result["trials"], result["exact"]) == (9, 6)
    assert sum(band["exact"] for band in result["by_depth"]) == 6
    assert len(result["wrong"]) == 3
    for wrong in result["wrong"]:
        assert wrong["answer"] == wrong["expected"] + "."


def test_eval_questions_over_one_text_share_it_and_never_repeat(longfill, knowing):
    longfill("eval", "needle", "--contexts", "2000", "--trials", "8", "--questions-per-text", "4")
    asked = knowing.last.asked
    assert len(set(asked)) == 8
    texts = [prompt[: prompt.rindex("What is") - 60] for prompt in asked]
    assert len({text[:500] for text in texts}) == 2


def test_eval_facts_sets_the_number_of_facts(longfill, knowing):
    longfill("eval", "needle", "--contexts", "2000", "--trials", "1", "--facts", "20")
    assert len(re.findall(r"\b\d{5}\.", knowing.last.asked[0])) >= 20


@pytest.mark.usefixtures("knowing")
def test_eval_plain_output_is_a_table_on_stdout(longfill):
    ran = longfill("eval", "needle", "--contexts", "1500", "--trials", "2")
    assert ran.code == 0
    assert "2/2" in ran.out
    assert "1,500" in ran.out


def test_questions_spread_from_the_first_fact_to_the_last():
    facts = tuple(Fact(f"n{i}", f"{i:05d}", i / 99) for i in range(100))
    depths = [fact.depth for fact in needle_eval.spread_over_depths(facts, 10)]
    assert depths == sorted(depths)
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    assert len(needle_eval.spread_over_depths(facts[:3], 10)) == 3
