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
    """Answers to others come between, not behind: /health and small requests, which take the other lane."""
    _content(kind)  # while this process writes JSON, its own threads would take the server for slow
    health, small = _watches(tiny_server)
    try:
        health.start()
        small.start()
        answers = _send_four(tiny_server, kind)
        between = len(health.seconds), len(small.seconds)
        assert [answer.json()["error"]["code"] for answer in answers] == ["context_length_exceeded"] * 4
    finally:
        health.p99(), small.p99()
    assert min(between) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", BODIES)
def test_health_stays_below_50_ms_beside_four_large_prompts(tiny_server: Running, kind: str) -> None:
    """API-03's limit, on a machine that does nothing else."""
    _content(kind)
    health = _Watch(_health(tiny_server))
    try:
        health.start()
        while len(health.seconds) < 300:
            _send_four(tiny_server, kind)
    finally:
        percentile = health.p99()
    assert percentile < 0.05


def _watches(server: Running) -> tuple[_Watch, _Watch]:
    small = _Watch(lambda: _assert_ok(server.post("/tokenize", prompt="a few words")))
    return _Watch(_health(server)), small


def _assert_ok(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_a_running_stream_has_no_gap_of_200_ms_beside_four_large_prompts(tiny_server: Running) -> None:
    """API-03's limit, on a machine that does nothing else; the model's steps take a few ms."""
    gaps = _gaps_beside_large_prompts(tiny_server)
    assert max(gaps) < 0.2


def test_a_running_stream_goes_on_while_large_prompts_are_tokenised(tiny_server: Running) -> None:
    assert len(_gaps_beside_large_prompts(tiny_server)) > 100


def _gaps_beside_large_prompts(server: Running) -> list[float]:
    """Seconds between the frames of a stream that runs for as long as four large prompts are tokenised."""
    _content("chats")
    large = threading.Thread(target=_send_four, args=(server, "chats"), daemon=True)
    moments: list[float] = []
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            moments.append(time.perf_counter())
            if len(moments) == 10:
                large.start()
            elif len(moments) > 10 and not large.is_alive():
                break
    large.join(120)
    assert not large.is_alive()
    return np.diff(moments).tolist()
