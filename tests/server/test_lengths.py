"""API-02 and API-15: one length limit on every route, told by /v1/models, and never a prompt cut."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.running import Running

LIMIT = 2048


def _ids(count: int) -> list[int]:
    return [20 + i % 300 for i in range(count)]


def _chat_of(server: Running, count: int) -> list[dict[str, str]]:
    """Messages whose prompt has exactly that many tokens: digits are a token each behind letters."""
    bare = server.post("/tokenize", messages=[{"role": "user", "content": ""}]).json()["count"]
    messages = [{"role": "user", "content": "<tool>" * (count - bare)}]
    assert server.post("/tokenize", messages=messages).json()["count"] == count
    return messages


def _body(server: Running, route: str, count: int) -> tuple[str, dict[str, Any]]:
    if route == "chat":
        return "/v1/chat/completions", {"messages": _chat_of(server, count)}
    if route == "ids":
        return "/v1/completions", {"prompt": _ids(count)}
    if route == "transfer":
        return "/v1/completions", {"prompt": _ids(count), "kv_transfer_params": {"do_remote_decode": True}}
    return "/v1/completions", {"prompt": "<tool>" * count}


ROUTES = ["chat", "ids", "text", "transfer"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_that_leaves_room_for_one_token_is_served_whole(tiny_server: Running, route: str) -> None:
    assert tiny_server.http.get("/v1/models").json()["data"][0]["max_model_len"] == LIMIT
    path, body = _body(tiny_server, route, LIMIT - 1)
    answer = tiny_server.post(path, **body, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == LIMIT - 1
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [LIMIT, LIMIT + 1, 10 * LIMIT])
@pytest.mark.parametrize("route", ROUTES)
def test_a_longer_prompt_is_refused_with_both_numbers(
    tiny_server: Running, route: str, count: int, stream: bool
) -> None:
    path, body = _body(tiny_server, route, count)
    answer = tiny_server.post(path, **body, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if route == "chat" else "prompt")
    assert str(LIMIT) in error["message"]
    assert str(count) in error["message"]


def test_output_asked_for_must_fit_and_defaults_are_cut_to_what_fits(tiny_server: Running) -> None:
    refused = tiny_server.post("/v1/completions", prompt=_ids(LIMIT - 5), max_tokens=6)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert str(LIMIT - 5) in refused.json()["error"]["message"]
    cut = tiny_server.post("/v1/completions", prompt=_ids(LIMIT - 5), ignore_eos=True)
    assert cut.json()["usage"]["completion_tokens"] == 5
    assert cut.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [
    ("/v1/completions", {"prompt": "The code is"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "The code?"}]}),
])  # fmt: skip
def test_both_names_of_the_length_work_on_both_routes_and_its_end_is_told(
    tiny_server: Running, path: str, prompt: dict[str, Any], field: str, stream: bool
) -> None:
    body = {**prompt, field: 3, "ignore_eos": True}
    if stream:
        events = tiny_server.events(path, **body, stream_options={"include_usage": True})
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert events[-1]["usage"]["completion_tokens"] == 3
        return
    answer = tiny_server.post(path, **body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
