"""API-07, API-08, API-09: what a stream's frames are, that it ends with its last one, and that it is never silent."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import Running, running

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "The access code"},
    CHAT: {"messages": [{"role": "user", "content": "The access code?"}]},
}
ROUTES = [COMPLETION, CHAT]


def _long_prompt(salt: int, count: int = 1900) -> list[int]:
    return [20 + (salt * 37 + i * i) % 300 for i in range(count)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_a_stream_without_usage_has_no_usage_anywhere(tiny_server: Running, route: str, options: Any) -> None:
    extra = {} if options is None else {"stream_options": options}
    events = tiny_server.events(route, **PROMPTS[route], max_tokens=5, ignore_eos=True, **extra)
    assert events
    assert not any("usage" in event for event in events)
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("route", ROUTES)
def test_include_usage_adds_one_last_frame_without_choices(tiny_server: Running, route: str) -> None:
    body = {**PROMPTS[route], "max_tokens": 5, "seed": 1, "ignore_eos": True}
    events = tiny_server.events(route, **body, stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    assert events[-1]["choices"] == []
    whole = tiny_server.post(route, **body).json()["usage"]
    whole.pop("prompt_tokens_details")
    cached = events[-1]["usage"].pop("prompt_tokens_details")
    assert events[-1]["usage"] == whole
    assert set(cached) == {"cached_tokens"}


@pytest.mark.parametrize("route", ROUTES)
def test_continuous_usage_counts_up_to_the_total(tiny_server: Running, route: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = tiny_server.events(route, **PROMPTS[route], max_tokens=6, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + count
               for event, count in zip(events, counts, strict=True))  # fmt: skip


def test_a_chat_stream_is_role_then_deltas_then_the_reason_then_done(tiny_server: Running) -> None:
    lines = tiny_server.frames(CHAT, **PROMPTS[CHAT], max_tokens=8, ignore_eos=True)
    assert lines[0].startswith(":")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    assert lines[-1] == "data: [DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_progress_of_the_prompt_is_told_up_to_its_end(tiny_server: Running) -> None:
    prompt = _long_prompt(1)
    options = {"prefill_progress": True}
    events = tiny_server.events(COMPLETION, prompt=prompt, max_tokens=2, ignore_eos=True, stream_options=options)
    progress = [event["prefill_progress"] for event in events if "prefill_progress" in event]
    assert all(event["choices"] == [] for event in events if "prefill_progress" in event)
    done = [each["tokens_done"] for each in progress]
    assert done == sorted(set(done))
    assert progress[-1]["tokens_done"] == progress[-1]["tokens_total"] == len(prompt)
    first_text = next(i for i, event in enumerate(events) if event["choices"])
    assert all("prefill_progress" not in event for event in events[first_text:])
    # The official client reads such a stream too.
    chunks = list(
        tiny_server.client().completions.create(
            model="tiny", prompt=prompt, max_tokens=2, stream=True, extra_body={"stream_options": options}
        )
    )
    assert (chunks[0].model_extra or {})["prefill_progress"]["tokens_total"] == len(prompt)


def test_headers_come_within_a_second_and_comments_while_a_step_stalls(tiny_server: Running) -> None:
    """The engine stands still in the middle of a prompt (as a step of minutes would); the interval here is 0.5 s."""
    body = json.dumps({"prompt": _long_prompt(2), "max_tokens": 4, "stream": True}).encode()
    os.kill(tiny_server.engine_pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", tiny_server.port), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            connection.sendall(body)
            received = b""
            moments = []
            while time.monotonic() < began + 4:
                part = connection.recv(65536)
                assert part
                received += part
                moments.append(time.monotonic() - began)
            assert moments[0] < 2, "within a second, and room for a busy machine"
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert received.count(b": keepalive") >= 4
            assert max(b - a for a, b in itertools.pairwise(moments)) < 2, "every half second, and room"
            os.kill(tiny_server.engine_pid, signal.SIGCONT)
            while b"[DONE]" not in received:
                received += connection.recv(65536)
    finally:
        os.kill(tiny_server.engine_pid, signal.SIGCONT)
    tiny_server.wait_until_idle()


def _failed(events: list[str]) -> dict[str, Any]:
    """The error that a stream ended with."""
    lines = [line for line in events if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    error: dict[str, Any] = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["message"]
    return error


def test_an_error_while_tokenising_gets_its_status_or_ends_the_stream(tiny_server: Running) -> None:
    for _ in range(3):  # on one connection, which a refusal does not close
        quick = tiny_server.post(CHAT, **PROMPTS[CHAT], stream=True, chat_template_kwargs={"slow": 0})
        assert (quick.status_code, "slow refusal" in quick.text) == (400, True)
    slow = tiny_server.frames(CHAT, **PROMPTS[CHAT], chat_template_kwargs={"slow": 30_000})
    assert "slow refusal" in _failed(slow)["message"]
    assert sum(line.startswith(":") for line in slow) >= 2


@pytest.mark.parametrize("timeout", [0.05, 1.5])
def test_a_deadline_in_the_prefill_is_a_504_or_a_last_event(tiny_server: Running, timeout: float) -> None:
    os.kill(tiny_server.engine_pid, signal.SIGSTOP)
    try:
        body = {"prompt": _long_prompt(3), "timeout": timeout}
        whole = tiny_server.post(COMPLETION, **body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
        if timeout < 0.7:  # before the headers were sent
            assert tiny_server.post(COMPLETION, **body, stream=True).status_code == 504
        else:
            assert _failed(tiny_server.frames(COMPLETION, **body))["code"] == "deadline_exceeded"
    finally:
        os.kill(tiny_server.engine_pid, signal.SIGCONT)
    tiny_server.wait_until_idle()


def test_a_deadline_in_the_output_ends_the_stream_behind_what_came(tiny_server: Running) -> None:
    lines = tiny_server.frames(COMPLETION, prompt="a", max_tokens=2000, ignore_eos=True, timeout=1.0)
    assert any('"text"' in line for line in lines)
    assert _failed(lines)["code"] == "deadline_exceeded"
    tiny_server.wait_until_idle()


@pytest.fixture
def doomed_server(random_model: Path, tmp_path: Path) -> Iterator[Running]:
    """One whose engine a test may kill."""
    with running(random_model, "--max-model-len", "2048", log=tmp_path / "doomed.log") as server:
        yield server


def test_an_engine_that_dies_ends_every_answer_with_its_code(doomed_server: Running) -> None:
    streams: list[list[str]] = []
    statuses: list[int] = []
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
    threads = [
        *(threading.Thread(target=lambda: streams.append(doomed_server.frames(COMPLETION, **long))) for _ in range(2)),
        threading.Thread(target=lambda: statuses.append(doomed_server.post(COMPLETION, **long).status_code)),
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while sum(request["state"] == "decode" for request in doomed_server.requests()) < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(doomed_server.engine_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert [_failed(lines)["code"] for lines in streams] == ["engine_dead"] * 2
    assert statuses == [500]
    assert doomed_server.process.wait(10) != 0
