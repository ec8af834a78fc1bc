"""What clients send before and beside their bodies takes bounded memory."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from tests.server.running import Running

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: ",
        b"GET /",
        CHUNKED + b"2;",
        CHUNKED + b"2\r\n{}\r\n0\r\nA: ",
    ],
    ids=["header", "path", "chunk size", "trailer"],
)
def test_a_head_without_an_end_is_cut_off(tiny_server: Running, beginning: bytes) -> None:
    before, sent = tiny_server.rss(), 0
    address = ("127.0.0.1", tiny_server.port)
    with socket.create_connection(address, timeout=20) as client, contextlib.suppress(ConnectionError):
        client.sendall(beginning)
        while sent < 16 * 2**20:
            client.sendall(b"a" * 65536)
            sent += 65536
    assert sent < 16 * 2**20
    assert tiny_server.rss() < before + 8 * 2**20
    assert tiny_server.http.get("/health").status_code == 200


def test_a_head_that_is_too_long_is_refused_in_words(tiny_server: Running) -> None:
    with socket.create_connection(("127.0.0.1", tiny_server.port), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 65536)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert tiny_server.http.get("/health", headers={"A": "a" * 60_000}).status_code == 200


def test_a_large_body_in_small_chunks_is_no_head(tiny_server: Running) -> None:
    body = b'{"prompt": "a", "max_tokens": 1' + b" " * 200_000 + b"}"
    answer = tiny_server.http.post("/v1/completions", content=(body[i : i + 2] for i in range(0, len(body), 2)))
    assert answer.status_code == 200, answer.text
