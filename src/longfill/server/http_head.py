"""uvicorn's HTTP protocol with a limit on heads: request lines, headers, trailers and chunk sizes.

May import uvicorn and errors. Invariant: what a client sends before its request reaches the application, or beside its
body, takes bounded memory and time; the parser alone would take any length, copying it at every read.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longfill.server.errors import ApiError

MOST_HEAD_BYTES = 64 * 1024


class HeadLimit(HttpToolsProtocol):
    """Refuses, with 431, a head that does not end within MOST_HEAD_BYTES (and what came in the same read)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Received since a head, a part of a body or a request ended."""

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body has come."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has ended."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        body = ApiError(
            431, f"the request's headers have more than {MOST_HEAD_BYTES:,} bytes", code="headers_too_large"
        ).body
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(head.encode() + body)
        self.transport.close()
