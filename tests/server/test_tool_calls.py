"""Tool calls and reasoning through a running server, whose model writes a script token by token."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.server.running import Running
from tests.server.scripted import PLAY

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/digit"}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"digit": {"enum": [1, 2, 3]}},
            },
        },
    },
]
ASK: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "temperature": 0,
}
PLAYED: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"play": PLAY}}}


def test_a_call_comes_as_a_call_with_content_and_reasoning_beside_it(scripted_server: Running) -> None:
    answer = scripted_server.client().chat.completions.create(**ASK, **PLAYED, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "The weather, then."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich 雨"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1


def test_a_streamed_call_joined_is_the_call(scripted_server: Running) -> None:
    chunks = list(scripted_server.client().chat.completions.create(**ASK, **PLAYED, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert parts[0].id is not None
    assert (parts[0].type, parts[0].function.name) == ("function", "get_weather")
    assert all(part.index == 0 for part in parts)
    assert all(part.id is None and part.function.name is None for part in parts[1:])
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"city": "Zürich 雨"}
    assert "".join(delta.content or "" for delta in deltas) == "I will look."
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert reasoning == "The weather, then."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_is_left_out_on_request(scripted_server: Running) -> None:
    body = {**ASK, "chat_template_kwargs": {"play": PLAY}, "tools": TOOLS, "include_reasoning": False}
    message = scripted_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    events = scripted_server.events("/v1/chat/completions", **body)
    assert not any("reasoning_content" in choice["delta"] for event in events for choice in event["choices"])


def test_without_tools_the_markup_is_content(scripted_server: Running) -> None:
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = {**ASK, **extra, "chat_template_kwargs": {"play": PLAY}}
        (choice,) = scripted_server.post("/v1/chat/completions", **body).json()["choices"]
        assert choice["message"]["content"].startswith("I will look.<tool_call>get_weather")
        assert choice["finish_reason"] == "stop"


def test_a_call_that_breaks_off_is_an_explicit_error_and_no_call(scripted_server: Running) -> None:
    body = {**ASK, "chat_template_kwargs": {"play": PLAY}, "tools": TOOLS, "max_tokens": 11}
    (choice,) = scripted_server.post("/v1/chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    (error,) = choice["message"]["tool_call_errors"]
    assert error["text"].startswith("<tool_call>get_weather")
    assert error["why"]
    events = scripted_server.events("/v1/chat/completions", **body)
    errors = [e for event in events for c in event["choices"] for e in c["delta"].get("tool_call_errors", [])]
    assert errors == [error]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_follows_one_of_the_schemas(scripted_server: Running, stream: bool) -> None:
    # The script says nothing about JSON: the form alone makes this a call.
    name, arguments, reason = _call(scripted_server, tool_choice="required", parallel_tool_calls=False, stream=stream)
    assert reason == "tool_calls"
    assert name in ("get_weather", "add")
    assert set(arguments) == ({"city"} if name == "get_weather" else {"a"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called(scripted_server: Running, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    name, arguments, reason = _call(scripted_server, tool_choice=choice, stream=stream)
    assert (name, reason) == ("add", "tool_calls")
    assert arguments["a"] in (1, 2, 3)


def _call(server: Running, *, stream: bool, **options: Any) -> tuple[str, dict[str, Any], str | None]:
    options = {**ASK, "temperature": 1.0, "seed": 6, "max_tokens": 300, "tools": TOOLS, **options}
    client = server.client()
    if not stream:
        (choice,) = client.chat.completions.create(**options).choices
        (call,) = choice.message.tool_calls or []
        return call.function.name, json.loads(call.function.arguments), choice.finish_reason
    chunks = list(client.chat.completions.create(**options, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    text = "".join(part.function.arguments or "" for part in parts)
    return parts[0].function.name, json.loads(text), chunks[-1].choices[0].finish_reason


def test_a_history_with_calls_reaches_the_template_as_objects(scripted_server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    tokens = scripted_server.post("/tokenize", messages=messages).json()["tokens"]
    text = scripted_server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>" in text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
         "response_format"),
        ({"tool_choice": "auto", "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_by_name(
    scripted_server: Running, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted_server.client().chat.completions.create(**ASK, extra_body=options)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["param"] == param, refused.value.body


def test_thinking_is_switched_off_by_the_names_clients_use(scripted_server: Running) -> None:
    for options in ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
        body = {**ASK, **options, "max_tokens": 1, "return_token_ids": True}
        ids = scripted_server.post("/v1/chat/completions", **body).json()["prompt_token_ids"]
        text = scripted_server.post("/detokenize", tokens=ids).json()["prompt"]
        assert text.endswith("<|assistant|><think></think>")


def test_an_answer_goes_back_into_the_history_however_a_client_writes_it(scripted_server: Running) -> None:
    """Also one with a malformed call: an agent that cannot go on from there would be stuck."""
    client = scripted_server.client()
    for most in (11, 100):
        options: dict[str, Any] = {**ASK, "tools": TOOLS, "max_tokens": most}
        answer = client.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"play": PLAY}})
        message = answer.choices[0].message
        assert ("tool_call_errors" in message.model_dump()) == (most == 11)
        for written in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            history: list[Any] = [*ASK["messages"], written, {"role": "user", "content": "go on"}]
            again = client.chat.completions.create(**{**options, "messages": history, "max_tokens": 1})
            assert again.usage is not None
            assert again.usage.completion_tokens == 1


def test_tools_that_the_template_would_not_show_are_refused(needle_server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "tools": TOOLS[:1]}
    answer = needle_server.post("/v1/chat/completions", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert needle_server.post("/v1/chat/completions", **body, tool_choice="none").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_no_white_space_to_get_lost_in(needle_server: Running, stream: bool) -> None:
    options = {"model": "needle", "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    name, arguments, reason = _call(needle_server, stream=stream, **options)
    assert reason == "tool_calls"
    assert set(arguments) == ({"city"} if name == "get_weather" else {"a"})
