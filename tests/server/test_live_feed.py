"""The live page's feed, without a server: a reader that takes nothing does not keep its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from longfill.server import live


def test_a_reader_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STALL_SECONDS", 0.01)
    held = [1]

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"event: update\n\n"
        finally:
            held.clear()

    async def full(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def read() -> None:
        feed, stays = live._Feed(events()), asyncio.Event()
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await asyncio.wait_for(feed(scope, stays.wait, full), 20)
        assert not held

    asyncio.run(read())
