"""API-18: what is certain is passed on at once, hostile text costs linear time, and formats are found by name."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from recorded_glm import TOOLS

from longfill.server.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ContentText,
    MalformedToolCall,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    formats_for,
    make_parser,
    starts_in_reasoning,
)


def parser(tool_format: str, in_reasoning: bool = False) -> OutputParser:
    return make_parser(tool_format=tool_format, reasoning_format="glm45", tools=TOOLS, starts_in_reasoning=in_reasoning)


class TestEarly:
    def test_content_and_reasoning_come_word_by_word(self):
        reader = parser("glm47", in_reasoning=True)
        assert reader.feed("Hm, ") == [ReasoningText("Hm, ")]
        assert reader.feed("1 < 2 <") == [ReasoningText("1 < 2 ")]
        assert reader.feed("/think>It") == [ContentText("It")]
        assert reader.feed(" is.") == [ContentText(" is.")]
        assert reader.feed("\n") == []  # perhaps the line break before a call
        assert reader.feed("So") == [ContentText("\nSo")]

    def test_a_beginning_of_a_tag_waits_only_until_it_is_none(self):
        reader = parser("glm47")
        assert reader.feed("a <tool") == [ContentText("a")]
        assert reader.feed("s") == [ContentText(" <tools")]

    @pytest.mark.parametrize(
        ("tool_format", "before"),
        [
            ("glm47", "<tool_call>bash<arg_key>command</arg_key><arg_value>"),
            ("deepseek_v32", '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">'),
            ("deepseek_v31", '<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "'),
        ],
    )
    def test_a_string_argument_comes_character_by_character(self, tool_format, before):
        reader = parser(tool_format)
        assert reader.feed(before) == [ToolCallStart(0, "bash"), ToolCallArguments(0, '{"command": "')]
        for character in "ls -l 2>&1":
            assert reader.feed(character) == [ToolCallArguments(0, character)]

    def test_what_is_no_string_waits_for_its_end(self):
        reader = parser("glm47")
        assert reader.feed("<tool_call>bash<arg_key>timeout</arg_key><arg_value>1")[0] == ToolCallStart(0, "bash")
        assert reader.feed("2") == []
        assert reader.feed("</arg_value>") == [ToolCallArguments(0, "12")]


HOSTILE = {
    "angle brackets": "<",
    "spaces": " ",
    "opening tags": "<tool_call>",
    "calls of nothing": "<tool_call></tool_call>",
    "closing tags": "</arg_value>",
    "a long name": "<tool_call>" + "a" * 300,
    "thoughts of tags": "<think>",
    "DSML": "<｜DSML｜",
    "DSML blocks": "<｜DSML｜function_calls>\n",
    "JSON": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a":',
}


@pytest.mark.parametrize("tool_format", ["glm47", "deepseek_v31", "deepseek_v32"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_api_18_hostile_text_takes_linear_time(text, tool_format, in_reasoning):
    """Three characters at a time, as tokens come; ten times the text may take thirty times as long, not a hundred."""

    def seconds(size: int) -> float:
        whole = (text * size)[:size]
        reader = parser(tool_format, in_reasoning)
        start = time.process_time()
        for at in range(0, size, 3):
            reader.feed(whole[at : at + 3])
        reader.finish()
        return time.process_time() - start

    assert seconds(100_000) < 30 * seconds(10_000) + 0.5


def test_white_space_after_the_arguments_takes_linear_time():
    def seconds(size: int) -> float:
        start = time.process_time()
        text = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}{' ' * size}x<｜tool▁call▁end｜>"
        [*_, last] = parser("deepseek_v31").feed(text)
        assert isinstance(last, MalformedToolCall)
        return time.process_time() - start

    assert seconds(20_000) < 30 * seconds(2_000) + 0.5


def test_api_18_a_megabyte_of_angle_brackets_streams():
    text = "<" * 2**20
    reader = parser("deepseek_v32")
    passed = [event.text for at in range(0, len(text), 4) for event in reader.feed(text[at : at + 4])]
    assert sum(map(len, passed)) >= len(text) - 1
    assert "".join(passed) + "".join(event.text for event in reader.finish()) == text


@pytest.mark.parametrize("text", ["<", "word ", "<think>", "</think"])
def test_what_was_passed_on_is_not_kept(text):
    reader = parser("glm47")
    reader.feed("x")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(50_000):
        reader.feed(text)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000


def test_a_megabyte_within_one_argument_streams():
    reader = parser("glm47")
    reader.feed("<tool_call>bash<arg_key>command</arg_key><arg_value>")
    text = "<x" * 2**19
    passed = [event.text for at in range(0, len(text), 4) for event in reader.feed(text[at : at + 4])]
    assert "".join(passed) == text
    [call] = reader.feed("</arg_value></tool_call>")
    assert call == ToolCallArguments(0, '"}')


def test_deeply_nested_json_is_a_string_or_malformed_and_no_crash():
    deep = "[" * 200_000
    reader = parser("glm47")
    text = f"<tool_call>edit_file<arg_key>edits</arg_key><arg_value>{deep}</arg_value></tool_call>"
    assert reader.feed(text)[1] == ToolCallArguments(0, f'{{"edits": "{deep}"}}')
    reader = parser("deepseek_v31")
    closed = deep + "]" * len(deep)
    [*_, last] = reader.feed(f'<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"a": {closed}}}<｜tool▁call▁end｜>')
    assert isinstance(last, MalformedToolCall)
    assert last.why == "the arguments are not JSON: nested too deep"


class TestFormats:
    def test_of_each_model_type_there_are_parsers(self):
        assert formats_for("glm_moe_dsa") == ("glm47", "glm45")
        assert formats_for("deepseek_v32") == ("deepseek_v32", "deepseek_v3")
        assert formats_for("llama") == (None, None)
        for model_type in ("glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32"):
            tool_format, reasoning_format = formats_for(model_type)
            assert tool_format in TOOL_FORMATS
            assert reasoning_format in REASONING_FORMATS

    @pytest.mark.parametrize(
        ("reasoning_format", "prompt", "inside"),
        [
            ("glm45", "[gMASK]<sop><|user|>\nWhat is <think>?<|assistant|>", False),
            ("glm45", "<|user|>x<|assistant|>\n<think></think>\n", False),
            ("glm45", "<|user|>x<|assistant|><think>", True),
            ("glm45", "<|user|>x<|assistant|></think>", False),
            ("deepseek_v3", "<｜User｜>x<｜Assistant｜><think>\n", True),
            ("deepseek_v3", "<｜User｜>x<｜Assistant｜><think>a</think>\n\n<function_results>\n\n<think>", True),
            ("deepseek_v3", "<｜User｜><think><｜Assistant｜></think>", False),
            ("deepseek_r1", "<｜Assistant｜><think>begun by the clie", True),
            ("deepseek_r1", "no marks at all <think>\n", True),
            ("deepseek_r1", "no marks at all <think>x", False),
            (None, "<|assistant|><think>", False),
        ],
    )
    def test_whether_the_prompt_leaves_the_model_thinking(self, reasoning_format, prompt, inside):
        assert starts_in_reasoning(reasoning_format, prompt) is inside

    def test_an_unknown_name_is_an_error_that_lists_the_known(self):
        with pytest.raises(ValueError, match=r"no tool format 'x'; there are glm45, glm47"):
            make_parser(tool_format="x", reasoning_format=None, tools=None, starts_in_reasoning=False)
        with pytest.raises(ValueError, match=r"no reasoning format 'x'; there are glm45"):
            make_parser(tool_format=None, reasoning_format="x", tools=None, starts_in_reasoning=False)
