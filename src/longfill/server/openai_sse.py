"""Server-sent events: how a stream is framed, kept alive and watched, whatever is sent in it.

May import starlette. Invariant: nothing is silent for longer than the keep-alive interval, by wall clock, and a client
that goes away cancels the work within a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
_AFTER_COMMENT = b":\n\n"
"""Before the first frame after a comment. Clients that cut the white space off each piece they read (vLLM's load
generator) lose the end of a comment that came alone, and would take the frame for its continuation.
"""


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to be answered."""


class ClientWatch:
    """Waits for the client to close its connection, from when the body has been read."""

    def __init__(self, request: Request) -> None:
        self._gone = asyncio.create_task(self._wait(request.receive))

    @staticmethod
    async def _wait(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def guard(self, work: Awaitable[T], timeout: float | None = None) -> T:
        """The result of `work`, which is cancelled when the client goes.

        Raises ClientGoneError then, and TimeoutError (the work goes on) where the result is not there in time.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except asyncio.CancelledError:
            await cancelled(task)
            raise
        if self._gone.done():
            await cancelled(task)
            raise ClientGoneError
        raise TimeoutError

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()


async def cancelled(task: asyncio.Future[T]) -> None:
    """Cancel a task and wait until it has ended, however it ends."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen, so that nothing is logged about it


class FrameSender:
    """Sends frames one at a time, also from several tasks."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._sent_at = time.monotonic()
        self._after_comment = False

    async def send(self, frame: bytes) -> None:
        """Send one frame; waits where the client reads slowly."""
        async with self._lock:
            comment = frame == KEEPALIVE
            body = _AFTER_COMMENT + frame if self._after_comment and not comment else frame
            self._after_comment = comment
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._sent_at = time.monotonic()

    async def keep_alive(self, interval: float) -> None:
        """Send a comment whenever nothing was sent for so many seconds; runs until cancelled."""
        while True:
            wait = self._sent_at + interval - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self.send(KEEPALIVE)


class SseResponse(Response):
    """A stream that `produce` writes, with comments in between; `close` is called at the end, whatever the end is."""

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[FrameSender], Awaitable[None]],
        watch: ClientWatch,
        close: Callable[[], Awaitable[None]],
        keepalive_interval: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._produce = produce
        self._watch = watch
        self._close = close
        self._interval = keepalive_interval

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer; what could be received is the watch's already."""
        sender = FrameSender(send)
        alive = asyncio.create_task(sender.keep_alive(self._interval))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await sender.send(KEEPALIVE)  # some proxies hold headers back until the first byte of the body
            with contextlib.suppress(ClientGoneError, OSError):
                await self._watch.guard(self._produce(sender))
                await cancelled(alive)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await cancelled(alive)
            self._watch.close()
            await self._close()


def data(frame: bytes) -> bytes:
    """A JSON text as an event."""
    return b"data: %b\n\n" % frame
