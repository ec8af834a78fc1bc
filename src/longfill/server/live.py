"""The feed of the live page: `/v1/live`, server-sent events of steps and requests, and the page's own files.

May import state, routes_system and FastAPI. Invariant: all readers together cost one small update a quarter of a
second at most; a reader that does not read is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

import longfill
from longfill.server.errors import ApiError
from longfill.server.messages import StepRecord
from longfill.server.routes_system import MOST_REQUESTS, OPERATOR, request_list, sees
from longfill.server.state import AppState

UPDATE_SECONDS = 0.25
QUIET_SECONDS = 5.0
"""An update comes this often even where nothing has changed."""
_MOST_READERS = 32
_STALL_SECONDS = 30.0
"""A reader that takes nothing for so long is dropped, so that its place is free."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_PAGE = files("longfill.server") / "page"


def live_router(state: AppState) -> APIRouter:
    """Routes over one server's state."""
    router = APIRouter()
    readers = _Readers(state)

    @router.get("/v1/live", summary="Server-sent events of steps and requests", response_class=Response)
    async def live(request: Request) -> Response:
        if not sees(request, OPERATOR):
            raise ApiError(403, "the feed shows everybody's requests: it needs the first key", code="not_the_operator")
        if readers.count >= _MOST_READERS:
            raise ApiError(503, f"{_MOST_READERS} pages are open already; close one", code="too_many_readers")
        return _Feed(readers.read())

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(str(_PAGE / "index.html"), headers={"Cache-Control": "no-cache"})

    @router.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        known = {entry.name for entry in _PAGE.iterdir() if entry.is_file()}
        if name not in known:
            raise ApiError(404, f"the page has no file {name!r:.80}", code="not_found")
        return FileResponse(str(_PAGE / name), headers={"Cache-Control": "no-cache"})

    return router


class _Feed(StreamingResponse):
    """The feed of one reader, whose place is free once it is left."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(_STALL_SECONDS):
                await send(message)

        async with contextlib.aclosing(self._events):
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, send_soon)


class _Readers:
    """Everybody who reads the feed."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self.count = 0

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Events for one reader: the past, then what happens."""
        self.count += 1
        try:
            newest, shown = self._newest, self._outline
            yield _event("hello", _hello(self._state))
            said = time.monotonic()
            while not self._state.stopped:
                await asyncio.sleep(UPDATE_SECONDS)
                steps = self._since(newest)
                quiet = time.monotonic() - said
                if not steps and self._outline == shown and quiet < QUIET_SECONDS:
                    continue
                newest, shown, said = self._newest, self._outline, time.monotonic()
                yield _event("update", _update(self._state, steps))
        finally:
            self.count -= 1

    @property
    def _newest(self) -> int:
        """The last step's number."""
        steps = self._state.client.steps
        return steps[-1].step if steps else -1

    @property
    def _outline(self) -> object:
        """What may change without a step: health, pages, and who is being served in which stage."""
        tickets = list(self._state.admission.tickets.values())[:MOST_REQUESTS]
        return (
            self._state.health[0],
            self._state.client.ledger,
            [(ticket.request_id, [stream.state for stream in ticket.streams]) for ticket in tickets],
        )

    def _since(self, number: int) -> list[StepRecord]:
        """Steps behind that number, oldest first."""
        found = []
        for step in reversed(self._state.client.steps):
            if step.step <= number:
                break
            found.append(step)
        return found[::-1]


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


def _hello(state: AppState) -> dict[str, Any]:
    ready = state.client.ready
    return {
        "model": state.args.model,
        "served_model_name": state.model_names[0],
        "version": longfill.__version__,
        "page_size": ready.page_size,
        "num_pages": ready.num_pages,
        "max_model_len": ready.max_model_len,
        "max_num_batched_tokens": state.args.max_num_batched_tokens,
        "memory": ready.memory,
        "kernels": ready.kernels,
        "num_threads": ready.num_threads,
        "started": state.started,
        **_update(state, list(state.client.steps)),
    }


def _update(state: AppState, steps: list[StepRecord]) -> dict[str, Any]:
    status, why = state.health
    ledger, ready = state.client.ledger, state.client.ready
    last = state.client.steps[-1] if state.client.steps else None
    return {
        "now": time.time(),
        "steps": steps,
        "requests": request_list(state),
        "num_requests": len(state.admission.tickets),
        "num_running": ledger.num_running,
        "num_waiting": ledger.num_waiting,
        "pages": {"used": ledger.pages_used, "cached": ledger.pages_cached, "total": ready.num_pages},
        "health": {"status": status, "reason": why},
        "rss_bytes": 0 if last is None else last.rss_bytes,
    }
