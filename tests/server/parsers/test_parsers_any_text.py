"""API-18: whatever a model writes, cutting its text changes nothing, nothing is lost, and content is free of markup."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_glm import TOOLS
from test_parsers_recorded_outputs import MARKUP, joined

from longfill.engine.deepseek_v32_chat import render
from longfill.server.parsers import (
    ContentText,
    Event,
    MalformedToolCall,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
)

GLM_PIECES = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "bash", "command"),
    *(
        "<tool_call>bash<arg_key>command</arg_key><arg_value>",
        "<arg_key>timeout</arg_key><arg_value>",
        "<tool_call>now",
    ),
)
DSML_PIECES = (
    *(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="bash">',
        "</｜DSML｜invoke>",
        "<｜DSML｜",
    ),
    *('<｜DSML｜parameter name="command" string="true">', '<｜DSML｜parameter name="x" string="false">'),
    *("</｜DSML｜parameter>", "</｜DSML｜", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>'),
)
JSON_PIECES = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("function", "f", "```json", "```", "{", "}", '{"a": 1}', '"', "\\", "[", "]"),
)
PIECES = {
    "glm47": GLM_PIECES,
    "deepseek_v32": DSML_PIECES,
    "deepseek_v3": JSON_PIECES,
    "deepseek_v31": JSON_PIECES,
}
PLAIN = ("<", "</", ">", "<think>", "</think>", "\n", "\n\n", " ", "a", "12", "é")


def events_of(tool_format: str, parts: list[str], in_reasoning: bool) -> tuple[Event, ...]:
    parser = make_parser(
        tool_format=tool_format, reasoning_format="glm45", tools=TOOLS, starts_in_reasoning=in_reasoning
    )
    return joined([event for part in parts for event in parser.feed(part)] + parser.finish())


@pytest.mark.parametrize("tool_format", PIECES)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), in_reasoning=st.booleans())
def test_api_18_any_text(tool_format, data, in_reasoning):
    pieces = data.draw(st.lists(st.sampled_from(PIECES[tool_format] + PLAIN), max_size=14))
    text = "".join(pieces)
    whole = events_of(tool_format, [text], in_reasoning)
    assert events_of(tool_format, list(text), in_reasoning) == whole
    assert events_of(tool_format, pieces, in_reasoning) == whole
    check(whole)
    for broken in (event for event in whole if isinstance(event, MalformedToolCall)):
        assert broken.text
        assert broken.text in text


LONG = (
    "<｜DSML｜function_calls>" + "\n" * 300 + '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    "<｜DSML｜function_calls>" + "\n" * 256 + '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    f'<｜DSML｜invoke name="{"n" * 300}">\n</｜DSML｜invoke>',
    f"<tool_call>{'n' * 300}</tool_call>",
    f"<tool_call>bash{' ' * 257}<arg_key>command</arg_key><arg_value>x</arg_value></tool_call>",
    f"<tool_call>bash<arg_key>command</arg_key><arg_value>x</arg_value>{' ' * 300}</tool_call>",
    f"<tool_call>bash<arg_key>command</arg_key><arg_value>x</arg_value>{' ' * 300}",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}" + " " * 300 + "<｜tool▁call▁end｜>",
    " " * 300 + "<think>x</think>",
)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_longer_runs_than_a_header_may_have_are_the_same_for_every_cut(text, in_reasoning):
    for tool_format in ("glm47", "deepseek_v32", "deepseek_v31"):
        whole = events_of(tool_format, [text], in_reasoning)
        assert events_of(tool_format, list(text), in_reasoning) == whole
        for cut in range(len(text)):
            assert events_of(tool_format, [text[:cut], text[cut:]], in_reasoning) == whole, cut


def check(events: tuple[Event, ...]) -> None:
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    tags = [tag for tag in MARKUP if tag != "</think>"]
    assert not any(tag in content and f"<{tag}" in content for tag in tags), content
    kinds = [type(event) for event in events]
    assert ReasoningText not in kinds[1:]
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    void = {event.index for event in events if isinstance(event, MalformedToolCall)}
    for start in starts:
        parts = [event.text for event in events if isinstance(event, ToolCallArguments) and event.index == start.index]
        if start.index not in void:
            assert isinstance(json.loads("".join(parts)), dict)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "written",
    [
        "The answer.\n",
        'Look.\n\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n'
        '<｜DSML｜parameter name="command" string="true">ls "x" </b></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="timeout" string="false">[5, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ],
)
def test_pfx_09_an_answer_comes_back_in_the_next_prompt_as_the_model_wrote_it(written, thinking):
    """So its pages stay cached: through the parser, the client's history and DeepSeek-V3.2's format."""
    question = {"role": "user", "content": "q"}
    prompt = render([question], add_generation_prompt=True, thinking=thinking)
    text = f"So:\n</think>{written}" if thinking else written
    events = events_of("deepseek_v32", [text], in_reasoning=thinking)
    calls = [
        {"function": {"name": event.name, "arguments": ""}} for event in events if isinstance(event, ToolCallStart)
    ]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    answer = {
        "role": "assistant",
        "content": "".join(event.text for event in events if isinstance(event, ContentText)),
        "reasoning_content": "".join(event.text for event in events if isinstance(event, ReasoningText)),
        "tool_calls": calls,
    }
    following = render([question, answer], add_generation_prompt=False, thinking=thinking)
    assert following == f"{prompt}{text}<｜end▁of▁sentence｜>"
