"""A client that reads as vLLM's load generator does: it cuts the white space off every piece, comments included."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from tests.server.running import Running

from longfill.bench.serve_stream import EventParser


def chunks(pieces: Iterable[bytes]) -> list[dict[str, Any]]:
    """What such a client sees: whole events of a piece, and a last one without its end where it is JSON by itself."""
    rest, seen = "", []
    for piece in pieces:
        *whole, rest = (rest + piece.decode().strip()).split("\n\n")
        if rest.startswith("data: {") and rest.endswith("}"):
            whole, rest = [*whole, rest], ""
        seen += [event.removeprefix("data: ") for event in whole if event.startswith("data: {")]
    return [json.loads(event) for event in seen]


@pytest.mark.parametrize("length", [3, 1500])
def test_comments_hide_no_token_from_a_client_that_strips_what_it_reads(tiny_server: Running, length: int):
    body = {
        "prompt": [7] * length, "max_tokens": 20, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    with tiny_server.http.stream("POST", "/v1/completions", json=body) as response:
        pieces = list(response.iter_raw())
    assert any(piece.startswith(b": ") for piece in pieces)
    seen = chunks(pieces)
    sent = [json.loads(data) for _, data in EventParser().feed(b"".join(pieces)) if data != "[DONE]"]
    assert seen == sent
    assert seen[-1]["usage"]["completion_tokens"] == 20
