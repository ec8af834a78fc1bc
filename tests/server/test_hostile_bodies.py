"""API-01: no body takes the server down; each is refused at once, by name, and the next request is served."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from tests.server.running import Running

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
VOCABULARY = 464
DEEP = "[" * 100_000 + "]" * 100_000


def _completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETION, {"prompt": "a", "max_tokens": 1, **fields}


def _chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HELLO, "max_tokens": 1, **fields}


def _forced(parameters: Any) -> tuple[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return _chat(tools=[tool], tool_choice="required")


def _says(**message: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [message], "max_tokens": 1}


HOSTILE: dict[str, tuple[str, Any]] = {
    # Bodies that are no bodies.
    "empty": (COMPLETION, b""),
    "no JSON": (COMPLETION, b"{"),
    "a list": (COMPLETION, b"[]"),
    "null": (CHAT, b"null"),
    "no UTF-8": (COMPLETION, b'{"prompt": "\xff\xfe"}'),
    "NUL bytes": (COMPLETION, b"\0" * 4096),
    "NaN": (COMPLETION, b'{"prompt": "a", "temperature": NaN}'),
    "infinity": (COMPLETION, b'{"prompt": "a", "temperature": 1e999}'),
    "nested lists": (COMPLETION, f'{{"prompt": {DEEP}}}'.encode()),
    "nested messages": (CHAT, f'{{"messages": {DEEP}}}'.encode()),
    "a lone surrogate": (COMPLETION, b'{"prompt": "\\ud800 a"}'),
    "a lone surrogate in a chat": (CHAT, b'{"messages": [{"role": "user", "content": "\\udc00"}]}'),
    # Prompts.
    "no prompt": (COMPLETION, {"max_tokens": 1}),
    "prompt null": _completion(prompt=None),
    "prompt empty list": _completion(prompt=[]),
    "prompt empty lists": _completion(prompt=[[], []]),
    "prompt empty text": _completion(prompt=""),
    "prompt number": _completion(prompt=5),
    "prompt object": _completion(prompt={"a": 1}),
    "prompt mixed": _completion(prompt=["a", 1]),
    "prompt booleans": _completion(prompt=[True, False]),
    "prompt floats": _completion(prompt=[1.0, 2.0]),
    "prompt id negative": _completion(prompt=[-1]),
    "prompt id = vocabulary": _completion(prompt=[1, VOCABULARY]),
    "prompt id 2**31": _completion(prompt=[2**31]),
    "prompt id 2**64": _completion(prompt=[2**64]),
    "prompt id 10**40": _completion(prompt=[10**40]),
    "prompts too many": _completion(prompt=["a"] * 100_000),
    "prompt too long": _completion(prompt=[1] * 100_000),
    # Counts.
    "n 0": _completion(n=0),
    "n -1": _completion(n=-1),
    "n 5,000,000": _completion(n=5_000_000),
    "n 10**9": _chat(n=10**9),
    "n 10**30": _chat(n=10**30),
    "n text": _completion(n="5"),
    "n true": _completion(n=True),
    "n 1.0": _completion(n=1.0),
    "best_of 10**9": _completion(best_of=10**9),
    "n times prompts": _completion(prompt=["a"] * 2000, n=16_000),
    "max_tokens 0": _completion(max_tokens=0),
    "max_tokens -5": _chat(max_tokens=-5),
    "max_tokens 10**9": _completion(max_tokens=10**9),
    "max_completion_tokens 0": _chat(max_tokens=None, max_completion_tokens=0),
    "two lengths": _chat(max_completion_tokens=2),
    "min_tokens -1": _completion(min_tokens=-1),
    "min_tokens above max_tokens": _completion(min_tokens=2),
    "min_tokens 10**9": _chat(max_tokens=None, min_tokens=10**9),
    # Numbers.
    "temperature -1": _completion(temperature=-1),
    "temperature text": _completion(temperature="hot"),
    "temperature 10**400": (COMPLETION, b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}"),
    "top_p 0": _completion(top_p=0),
    "top_p 2": _completion(top_p=2),
    "top_k -2": _completion(top_k=-2),
    "min_p 5": _completion(min_p=5),
    "presence_penalty 100": _completion(presence_penalty=100),
    "repetition_penalty 0": _completion(repetition_penalty=0),
    "seed 2**80": _completion(seed=2**80),
    "priority 2**40": _completion(priority=2**40),
    "timeout 0": _completion(timeout=0),
    "timeout -1": _completion(timeout=-1),
    "top_k 2**70": _completion(top_k=2**70),
    "kv_transfer_params of more than 64 bits": _completion(kv_transfer_params={"a": [10**40]}),
    "kv_transfer_params 2**64": _chat(kv_transfer_params={"a": 2**64}),
    # Log-probabilities.
    "logprobs 10**9": _completion(logprobs=10**9),
    "logprobs -1": _completion(logprobs=-1),
    "logprobs true": _completion(logprobs=True),
    "top_logprobs 10**9": _chat(logprobs=True, top_logprobs=10**9),
    "top_logprobs alone": _chat(top_logprobs=2),
    "prompt_logprobs of the vocabulary": _completion(prompt_logprobs=VOCABULARY),
    "prompt_logprobs -1": _chat(prompt_logprobs=-1),
    # Stops and biases.
    "stop empty": _completion(stop=""),
    "stop with an empty one": _completion(stop=["a", ""]),
    "stop numbers": _completion(stop=[1, 2]),
    "stop 10**5 strings": _completion(stop=[f"s{i}" for i in range(100_000)]),
    "stop 10**5 numbers": _completion(stop=[1] * 100_000),
    "stop a megabyte": _completion(stop="x" * 1_000_000),
    "stop_token_ids out of range": _completion(stop_token_ids=[10**6], min_tokens=1),
    "stop_token_ids negative": _completion(stop_token_ids=[-3]),
    "stop_token_ids 10**5": _completion(stop_token_ids=[1] * 100_000),
    "logit_bias out of range": _completion(logit_bias={"999999": 1}),
    "logit_bias negative id": _completion(logit_bias={"-1": 1}),
    "logit_bias no id": _completion(logit_bias={"the": 1}),
    "logit_bias 1000": _completion(logit_bias={"5": 1000}),
    "logit_bias texts": _completion(logit_bias={"5": "x"}),
    "logit_bias 10**5 entries": _completion(logit_bias={str(i): 1 for i in range(100_000)}),
    # Messages.
    "no messages": (CHAT, {"max_tokens": 1}),
    "messages empty": _chat(messages=[]),
    "messages text": _chat(messages="hi"),
    "message text": _chat(messages=["hi"]),
    "messages 10**5 numbers": _chat(messages=[1] * 100_000),
    "role unknown": _says(role="root", content="a"),
    "role missing": _says(content="a"),
    "content missing": _says(role="user"),
    "content number": _says(role="user", content=5),
    "content image": _says(role="user", content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
    "arguments no JSON": _says(
        role="assistant", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    ),
    "arguments nested": _says(
        role="assistant", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": DEEP}}]
    ),
    "template variable messages": _chat(chat_template_kwargs={"messages": []}),
    "template variable self": _chat(chat_template_kwargs={"self": 1}),
    # Forms.
    "grammar empty": _completion(structured_outputs={"grammar": ""}),
    "choices too many": _completion(structured_outputs={"choice": [f"c{i}" for i in range(2001)]}),
    "schema of itself": _completion(structured_outputs={"json": {"$ref": "#"}}),
    "forced tool with $defs a list": _forced({"$defs": [1]}),
    "forced tool with $defs null": _forced({"$defs": None}),
    "regex broken": _completion(structured_outputs={"regex": "("}),
    "grammar broken": _completion(structured_outputs={"grammar": "start: %%"}),
    "schema no schema": _completion(structured_outputs={"json": {"type": "nothing"}}),
    "schema of 15,000 properties": _completion(
        structured_outputs={
            "json": {"type": "object", "properties": {f"p{i}": {"maxLength": 50} for i in range(15_000)}}
        }
    ),
    "two forms": _completion(structured_outputs={"regex": "a", "choice": ["a"]}),
    "no form": _completion(structured_outputs={}),
    "choice empty": _completion(structured_outputs={"choice": []}),
    # Fields.
    "unknown field": _completion(temprature=1),
    "unknown field in a chat": _chat(prompt="a"),
    "truncate_prompt_tokens": _completion(truncate_prompt_tokens=5),
    "use_beam_search": _completion(use_beam_search=True),
    "suffix": _completion(suffix="b"),
    "store": _chat(store=True),
    "stream text": _completion(stream="yes"),
    "stream_options without stream": _completion(stream_options={"include_usage": True}),
    "stream_options unknown": _completion(stream=True, stream_options={"usage": True}),
    "model unknown": _completion(model="gpt-5"),
    "cache_salt number": _completion(cache_salt=5),
    "request_id with spaces": _completion(request_id="a b"),
    "detokenize negative": ("/detokenize", {"tokens": [-1]}),
    "detokenize huge": ("/detokenize", {"tokens": [2**70]}),
    "tokenize number": ("/tokenize", {"prompt": 5}),
}


def _send(server: Running, path: str, body: Any) -> httpx.Response:
    if isinstance(body, bytes):
        return server.http.post(path, content=body, headers={"content-type": "application/json"})
    return server.post(path, **body)


def _assert_served(server: Running) -> None:
    answer = server.post(COMPLETION, prompt="The code is", temperature=0, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_and_the_next_request_is_served(tiny_server: Running, name: str) -> None:
    path, body = HOSTILE[name]
    answer = _send(tiny_server, path, body)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["code"]
    _assert_served(tiny_server)


@pytest.mark.slow
def test_every_hostile_body_is_refused_in_less_than_100_ms(tiny_server: Running) -> None:
    """API-01's limit, on a machine that does nothing else."""
    late = {}
    for name, (path, body) in HOSTILE.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            tiny_server.http.post(path, content=content)
            seconds.append(time.perf_counter() - began)
        if min(seconds) >= 0.1:
            late[name] = seconds
    assert not late


def test_the_table_knows_the_vocabulary(tiny_server: Running) -> None:
    assert tiny_server.http.get("/v1/models").json()["data"][0]["vocab_size"] == VOCABULARY
    assert len(HOSTILE) >= 60


def test_memory_stays_flat_under_hostile_bodies(tiny_server: Running) -> None:
    def all_of_them() -> int:
        for path, body in HOSTILE.values():
            assert 400 <= _send(tiny_server, path, body).status_code < 500
        _assert_served(tiny_server)
        return tiny_server.rss()

    all_of_them()
    after_one = all_of_them()
    for _ in range(4):
        after_all = all_of_them()
    assert after_all < after_one + 32 * 2**20


def test_refusals_name_the_field_and_say_what_to_do(tiny_server: Running) -> None:
    expected = {
        "n 10**9": ("n", "count from 1 to"),
        "stop_token_ids out of range": ("stop_token_ids", "0 to 463"),
        "truncate_prompt_tokens": ("truncate_prompt_tokens", "never cut"),
        "unknown field": ("temprature", "/openapi.json"),
        "content image": ("messages[0].content", "text only"),
        "prompt id = vocabulary": ("prompt", "0 to 463"),
        "logprobs 10**9": ("logprobs", "--max-logprobs"),
        "two lengths": ("max_completion_tokens", "one of them"),
        "arguments no JSON": ("messages[0].tool_calls[0].function.arguments", "not a JSON object"),
    }
    for name, (param, words) in expected.items():
        error = _send(tiny_server, *HOSTILE[name]).json()["error"]
        assert (error["param"], words in error["message"]) == (param, True), error


def test_fields_that_ask_for_nothing_are_taken(tiny_server: Running) -> None:
    answer = tiny_server.post(
        CHAT,
        messages=HELLO,
        max_tokens=1,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        logprobs=False,
        functions=None,
        modalities=None,
        stop=None,
        tools=None,
    )
    assert answer.status_code == 200, answer.text


def test_a_field_of_a_megabyte_is_not_sent_back(tiny_server: Running) -> None:
    for path, body in (_completion(**{"k" * 1_000_000: 1}), _says(role="user", content="a", **{"k" * 1_000_000: 1})):
        answer = _send(tiny_server, path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_parameter"
        assert len(answer.content) < 2000
