"""Forced tool calls: the same events however the text is cut, and an output that broke off is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.server.openai_forced_calls import NamedCall, RequiredCalls
from longfill.server.parsers import Event, MalformedToolCall, ToolCallArguments, ToolCallStart

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=6), OBJECTS), min_size=1, max_size=3)


def _joined(parser: Any, parts: list[str]) -> list[Any]:
    """(index, name, arguments) of each call, and the errors."""
    events: list[Event] = [event for part in parts for event in parser.feed(part)] + parser.finish()
    result: list[Any] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            result.append([event.index, event.name, ""])
        elif isinstance(event, ToolCallArguments):
            assert result[-1][0] == event.index
            result[-1][2] += event.text
        else:
            result.append(event)
    return result


@given(CALLS, st.data(), st.sampled_from([None, 1]), st.booleans())
def test_required_calls_are_the_same_however_they_are_cut(
    calls: list[tuple[str, dict[str, Any]]], data: st.DataObject, indent: int | None, ascii_only: bool
) -> None:
    listed = [{"name": name, "parameters": arguments} for name, arguments in calls]
    text = json.dumps(listed, indent=indent, ensure_ascii=ascii_only)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for pieces in (parts, list(text), [text]):
        got = _joined(RequiredCalls(), pieces)
        assert [(index, name, json.loads(arguments)) for index, name, arguments in got] == [
            (index, name, arguments) for index, (name, arguments) in enumerate(calls)
        ]


def test_arguments_come_before_their_call_is_complete() -> None:
    parser = RequiredCalls()
    events = parser.feed('[{"name": "f", "parameters": {"a": "some')
    assert events == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": "some')]
    assert parser.feed(" text") == [ToolCallArguments(0, " text")]


@pytest.mark.parametrize("cut", range(1, 46))
def test_a_required_output_that_breaks_off_is_an_error(cut: int) -> None:
    text = '[{"name": "f", "parameters": {"a": "x}", "b": 1}}]'
    got = _joined(RequiredCalls(), list(text[:cut]))
    assert isinstance(got[-1], MalformedToolCall)
    assert got[-1].index == 0


def test_a_call_whose_arguments_are_complete_is_one() -> None:
    assert _joined(RequiredCalls(), ['[{"name": "f", "parameters": {"a": 1}']) == [[0, "f", '{"a": 1}']]


@given(OBJECTS, st.data())
def test_a_named_call_is_the_same_however_it_is_cut(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments)
    cut = data.draw(st.integers(0, len(text)))
    for parts in ([text[:cut], text[cut:]], list(text)):
        ((index, name, got),) = _joined(NamedCall("f"), parts)
        assert (index, name, json.loads(got)) == (0, "f", arguments)


@pytest.mark.parametrize("text", ["", "{", '{"a": "}'])
def test_a_named_output_that_breaks_off_is_an_error(text: str) -> None:
    assert isinstance(_joined(NamedCall("f"), [text])[-1], MalformedToolCall)
