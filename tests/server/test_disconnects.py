"""API-06: a client that goes away, in any phase, ends its request and frees its pages; so does an operator."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from tests.server.running import Running


def _leave(server: Running, state: str, **body: Any) -> None:
    """Send a request, wait until it is in that state and close the socket."""
    content = json.dumps(body).encode()
    path = b"/v1/chat/completions" if "messages" in body else b"/v1/completions"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, len(content)))
        connection.sendall(content)
        server.wait_for(state)


def _prompt(salt: int) -> list[int]:
    return [20 + (salt * 41 + i * i) % 300 for i in range(1900)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_in_the_output_frees_all_pages_at_once(tiny_server: Running, stream: bool, n: int) -> None:
    _leave(tiny_server, "decode", prompt="a", max_tokens=2000, ignore_eos=True, n=n, stream=stream)
    # A step is some milliseconds here; the rest is room for a busy machine.
    assert tiny_server.wait_until_idle() < 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_in_the_prefill_frees_all_pages_at_once(tiny_server: Running, stream: bool) -> None:
    pid = tiny_server.engine_pid
    os.kill(pid, signal.SIGSTOP)  # held in the middle of its prompt, however quick the machine is
    try:
        _leave(tiny_server, "waiting", prompt=_prompt(stream), max_tokens=100, ignore_eos=True, stream=stream)
        until = time.monotonic() + 5
        while tiny_server.requests() and time.monotonic() < until:
            time.sleep(0.005)
        assert not tiny_server.requests()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert tiny_server.wait_until_idle() < 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_prompt_is_made_is_noticed(tiny_server: Running, stream: bool) -> None:
    messages = [{"role": "user", "content": "a"}]
    _leave(tiny_server, "tokenising", messages=messages, stream=stream, chat_template_kwargs={"slow": 30_000})
    assert tiny_server.wait_until_idle() < 1
    assert tiny_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_leaving_with_several_prompts_ends_them_all(tiny_server: Running) -> None:
    _leave(tiny_server, "decode", prompt=["a", "b", "c"], max_tokens=2000, ignore_eos=True)
    assert tiny_server.wait_until_idle() < 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_operator_ends_a_request_whose_client_gets_what_it_has(
    tiny_server: Running, path: str, stream: bool
) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {**prompt, "max_tokens": 1900, "ignore_eos": True, "n": 2}
    answers: list[list[dict[str, Any]]] = []

    def ask() -> None:
        with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
            own = Running(tiny_server.process, tiny_server.url, tiny_server.log_file, client)
            answers.append(own.events(path, **body) if stream else [own.post(path, **body).json()])

    thread = threading.Thread(target=ask)
    thread.start()
    request = tiny_server.wait_for("decode")
    assert tiny_server.post(f"/v1/requests/{request['id']}/abort").json()["aborted"] is True
    thread.join(20)
    reasons = [choice["finish_reason"] for event in answers[0] for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["abort"] * 2
    assert tiny_server.wait_until_idle() < 2
