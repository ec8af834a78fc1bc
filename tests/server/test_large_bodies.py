"""API-03: bodies of megabytes are read, rendered and tokenised beside the event loop, and small ones pass them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.running import Running

SENTENCE = "The access code of amber Kestrel is 48213. It's what they'd said; don't  forget,   okay?\n\n"
TEXT = (SENTENCE * 50_000)[: 4 * 2**20]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": ("/v1/completions", {"prompt": TEXT}),
    "chats": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "ids": ("/v1/completions", {"prompt": [20 + i % 400 for i in range(1_000_000)]}),
}


class _Watch(threading.Thread):
    """Does something again and again until told to stop, and keeps how long each time took."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self.stopped = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            began = time.perf_counter()
            self._act()
            self.seconds.append(time.perf_counter() - began)
            time.sleep(0.005)

    def p99(self) -> float:
        self.stopped.set()
        self.join(30)
        return float(np.percentile(self.seconds, 99))


def _health(server: Running) -> Callable[[], None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

    def ask() -> None:
        connection.request("GET", "/health")
        assert connection.getresponse().read()

    return ask


@cache
def _content(kind: str) -> bytes:
    return json.dumps({**BODIES[kind][1], "max_tokens": 1}).encode()


def _send_four(server: Running, kind: str) -> list[httpx.Response]:
    url, content = server.url + BODIES[kind][0], _content(kind)
    answers: list[httpx.Response] = []

    def send() -> None:
        answers.append(httpx.post(url, content=content, timeout=120))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


@pytest.mark.parametrize("kind", BODIES)
def test_four_large_prompts_at_once_do_not_hold_the_others_up(tiny_server: Running, kind: str) -> None:
    """/health stays quick, and so do small requests, which take the other lane. Machines of tests are busy: the limits
    here are wide; alone, the 99th percentile of /health is below 50 ms."""
    _content(kind)  # while this process writes JSON, its own threads would take the server for slow
    health = _Watch(_health(tiny_server))
    small = _Watch(lambda: _assert_ok(tiny_server.post("/tokenize", prompt="a few words")))
    try:
        health.start()
        small.start()
        answers = _send_four(tiny_server, kind)
        while len(health.seconds) < 100 or len(small.seconds) < 100:
            answers = _send_four(tiny_server, kind)
        assert [answer.json()["error"]["code"] for answer in answers] == ["context_length_exceeded"] * 4
    finally:
        percentiles = health.p99(), small.p99()
    assert percentiles[0] < 0.25
    assert percentiles[1] < 0.5


def _assert_ok(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def test_a_running_stream_goes_on_while_a_large_prompt_is_tokenised(tiny_server: Running) -> None:
    _content("chats")
    body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with tiny_server.http.stream("POST", "/v1/completions", json=body) as response:
        large = threading.Thread(target=_send_four, args=(tiny_server, "chats"), daemon=True)
        large.start()
        moments = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
    large.join(120)
    assert len(moments) > 300
    assert max(np.diff(moments)) < 1.0
