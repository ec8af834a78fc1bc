"""API-18: what a model writes becomes the same reasoning, content and calls however its text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from recorded_deepseek import DEEPSEEK
from recorded_glm import GLM, TOOLS, Recorded

from longfill.server.parsers import (
    ContentText,
    Event,
    MalformedToolCall,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
)

RECORDED = [*GLM, *DEEPSEEK]
MARKUP = ("tool_call>", "arg_key>", "arg_value>", "｜DSML｜", "begin｜>", "end｜>", "sep｜>", "</think>")


def parser_for(recorded: Recorded) -> OutputParser:
    return make_parser(
        tool_format=recorded.tool_format,
        reasoning_format="glm45" if recorded.reasoning else None,
        tools=TOOLS,
        starts_in_reasoning=recorded.in_reasoning,
    )


def joined(events: Iterable[Event]) -> tuple[Event, ...]:
    whole: list[Event] = []
    for event in events:
        match (whole[-1] if whole else None), event:
            case (ContentText(a), ContentText(b)):
                whole[-1] = ContentText(a + b)
            case (ReasoningText(a), ReasoningText(b)):
                whole[-1] = ReasoningText(a + b)
            case (ToolCallArguments(i, a), ToolCallArguments(j, b)) if i == j:
                whole[-1] = ToolCallArguments(i, a + b)
            case _:
                whole.append(event)
    return tuple(whole)


def events_of(recorded: Recorded, parts: Iterable[str]) -> tuple[Event, ...]:
    parser = parser_for(recorded)
    return joined([event for part in parts for event in parser.feed(part)] + parser.finish())


every_output = pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each.tool_format}: {each.name}")


@every_output
def test_api_18_each_output_gives_its_events(recorded):
    assert events_of(recorded, [recorded.text]) == recorded.events


@every_output
def test_api_18_every_cut_gives_the_same_events(recorded):
    text = recorded.text
    for cut in range(len(text) + 1):
        assert events_of(recorded, [text[:cut], text[cut:]]) == recorded.events, cut
    for size in (1, 2, 3, 7):
        assert events_of(recorded, [text[at : at + size] for at in range(0, len(text), size)]) == recorded.events, size


@every_output
def test_api_18_every_beginning_of_an_output_is_read_without_markup_in_content_or_a_guessed_call(recorded):
    """As where the model stopped at max_tokens: a call is complete, or is said to be none."""
    for cut in range(len(recorded.text) + 1):
        events = events_of(recorded, [recorded.text[:cut]])
        content = "".join(event.text for event in events if isinstance(event, ContentText))
        assert not any(tag in content for tag in MARKUP), (cut, content)
        void = {event.index for event in events if isinstance(event, MalformedToolCall)}
        for start in (event for event in events if isinstance(event, ToolCallStart) and event.index not in void):
            arguments = "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == start.index)
            assert isinstance(json.loads(arguments), dict), (cut, arguments)


def test_there_are_enough_of_them_and_no_two_are_the_same():
    assert len({(each.tool_format, each.text, each.in_reasoning) for each in RECORDED}) == len(RECORDED) >= 30


def test_without_tools_the_markup_is_content():
    text = "a\n<tool_call>now</tool_call>\n"
    for tools in (None, []):
        parser = make_parser(tool_format="glm47", reasoning_format=None, tools=tools, starts_in_reasoning=False)
        assert joined([*parser.feed(text), *parser.finish()]) == (ContentText(text),)
