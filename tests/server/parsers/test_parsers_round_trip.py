"""API-18: arguments of any content, written in a model's format and cut anywhere, come back as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_parsers_recorded_outputs import joined

from longfill.server.parsers import ContentText, ReasoningText, ToolCallArguments, ToolCallStart, make_parser

PIECES = (
    "<",
    "</",
    ">",
    "</tool_call>",
    "<arg_key>",
    "｜DSML｜",
    "</think>",
    '"',
    "\\",
    "\n",
    "```",
    "2>&1",
    "é",
    "🙂",
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text("abcXYZ019_-", min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)
Calls = list[tuple[str, dict[str, Any]]]

JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def glm(calls: Calls, gap: str) -> str:
    def pair(key: str, value: Any) -> str:
        return f"{gap}<arg_key>{key}</arg_key>{gap}<arg_value>{as_text(value)}</arg_value>"

    return "".join(
        f"{gap}<tool_call>{name}{''.join(pair(*each) for each in arguments.items())}{gap}</tool_call>"
        for name, arguments in calls
    )


def dsml(calls: Calls, bare: bool) -> str:
    def parameter(key: str, value: Any) -> str:
        string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{string}">{as_text(value)}</｜DSML｜parameter>\n'

    invokes = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n{"".join(parameter(*each) for each in arguments.items())}</｜DSML｜invoke>'
        for name, arguments in calls
    )
    if not calls or bare:
        return "\n\n" * bool(calls) + invokes
    return f"\n\n<｜DSML｜function_calls>\n{invokes}\n</｜DSML｜function_calls>"


def plain_json(calls: Calls, fenced: bool) -> str:
    def call(name: str, arguments: Mapping[str, Any]) -> str:
        body = f"function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```" if fenced else ""
        return f"<｜tool▁call▁begin｜>{body or f'{name}<｜tool▁sep｜>{as_json(arguments)}'}<｜tool▁call▁end｜>"

    block = "\n".join(call(*each) for each in calls)
    return f"<｜tool▁calls▁begin｜>{block}<｜tool▁calls▁end｜>" if calls else ""


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    """One tool for each name, that declares what its first call has."""
    tools: dict[str, Any] = {}
    for name, arguments in calls:
        properties = {key: {"type": JSON_TYPES[type(v)]} for key, v in arguments.items() if v is not None}
        tools.setdefault(name, {"function": {"name": name, "parameters": {"properties": properties}}})
    return list(tools.values()) or [{"function": {"name": "unused"}}]


def read(tool_format: str, tools: list[dict[str, Any]], text: str, cuts: list[int]) -> tuple[str, str, Calls]:
    """(reasoning, content, calls) of a text that begins inside `<think>`."""
    parser = make_parser(tool_format=tool_format, reasoning_format="glm45", tools=tools, starts_in_reasoning=True)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    events = joined([event for part in parts for event in parser.feed(part)] + parser.finish())
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, ToolCallArguments)]
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in (ReasoningText, ContentText)
    )
    assert sum(isinstance(e, ToolCallStart | ToolCallArguments | ReasoningText | ContentText) for e in events) == len(
        events
    )
    return reasoning, content, list(zip(names, arguments, strict=True))


anything = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)
WORDS = st.text("ab <>/\n", max_size=12)


def without(calls: Calls, *tags: str) -> Calls:
    """The calls with no value that holds a tag which ends one: no format can say that."""
    text = as_json(calls)
    return [] if any(as_json(tag)[1:-1] in text for tag in tags) else calls


@anything
@given(CALLS, WORDS, WORDS, st.sampled_from(["", "\n", " "]), CUTS)
def test_api_18_glm(calls, thought, content, gap, cuts):
    calls = without(calls, "</arg_value>")
    # Each call of a name is declared by the first: a string stays one, and JSON is told from a string by its type.
    calls = [(f"{name}{index}", arguments) for index, (name, arguments) in enumerate(calls)]
    text = f"{thought}</think>{content}{glm(calls, gap)}"
    got = read("glm47", tools_for(calls), text, cuts)
    assert got == (thought, content.rstrip() if calls else content, calls)


@anything
@given(CALLS, WORDS, WORDS, st.booleans(), CUTS)
def test_api_18_deepseek_v32(calls, thought, content, bare, cuts):
    calls = without(calls, "</｜DSML｜parameter>")
    tools = [{"function": {"name": "unused"}}]
    got = read("deepseek_v32", tools, f"{thought}</think>{content}{dsml(calls, bare)}", cuts)
    assert got == (thought, content if content.strip() or not calls else "", calls)


@anything
@given(CALLS, WORDS, WORDS, st.booleans(), CUTS)
def test_api_18_deepseek_v3_and_v31(calls, thought, content, fenced, cuts):
    text = f"{thought}</think>{content}{plain_json(calls, fenced)}"
    got = read("deepseek_v3" if fenced else "deepseek_v31", [{"function": {"name": "unused"}}], text, cuts)
    assert got == (thought, content if content.strip() or not calls else "", calls)
