"""Before every route: request ids, API keys, the limit on bodies, tickets of the queue, and errors as answers.

May import admission, errors and state; plain ASGI. Invariant: what can be refused without a body is refused before one
is read, and whatever a route does its ticket is given back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longfill.server.admission import Ticket
from longfill.server.errors import ApiError, as_api_error
from longfill.server.state import AppState

logger = logging.getLogger(__name__)

GENERATES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Endpoints whose requests wait in the queue."""
OPEN = frozenset({"/", "/health", "/ping", "/ready", "/metrics", "/version"})
"""Paths that ask for no key, as in vLLM; so do the live page's files."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED = 499
"""nginx's status for an answer that nobody is there to read."""
BODY_TIMEOUT = 60.0
"""Seconds that a client may let pass between two parts of its body."""


class Gate:
    """ASGI middleware; its decisions need nothing but the head of a request."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._keys: Sequence[bytes] = [key.encode() for key in state.server_args.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), _route_path(scope)
        given = headers.get("x-request-id")
        answer = _Answer(send, scope)
        ticket: Ticket | None = None
        try:
            if given is not None and not _ID.fullmatch(given):
                raise ApiError(
                    400, "x-request-id must be 1 to 128 printable characters without spaces", code="invalid_value"
                )
            request_id = given or uuid.uuid4().hex
            values = scope.setdefault("state", {})
            values |= {
                "request_id": request_id,
                "arrival": time.monotonic(),
                "cache_salt": self._state.server_args.cache_salt,
            }
            values["tenant"] = self._tenant(path, headers)
            body = _Body(receive, self._limit(headers))
            if path in GENERATES and scope["method"] == "POST":
                ticket = values["ticket"] = self._ticket(request_id, path, values["tenant"])
            await self._app(scope, body, answer)
        except Exception as error:
            if answer.begun:
                raise
            # Here, not in starlette's handler of exceptions, which raises them again behind the answer: that closes the
            # connection.
            await as_api_error(error).response()(scope, receive, answer)
        finally:
            if ticket is not None:
                ticket.leave()
                self._note(ticket, answer)

    def _note(self, ticket: Ticket, answer: _Answer) -> None:
        """Count and log what became of a request."""
        if not answer.complete or answer.status == _CLIENT_CLOSED:
            self._state.metrics.disconnected()
            became = "the client left"
        else:
            became = str(answer.status)
        streams = ticket.streams
        first = max((stream.first_token or 0.0 for stream in streams), default=0.0)
        logger.info(
            "%s %s: %s, %d prompt tokens (%d cached), %d generated, first after %s, all after %.3f s",
            ticket.endpoint,
            ticket.request_id,
            became,
            sum(stream.num_prompt_tokens for stream in streams),
            sum(stream.num_cached_tokens or 0 for stream in streams),
            sum(stream.num_output_tokens for stream in streams),
            f"{first - ticket.arrival:.3f} s" if first else "none",
            time.monotonic() - ticket.arrival,
        )

    def _tenant(self, path: str, headers: Headers) -> str:
        """Whose request it is: the number of its key. Raises ApiError for a key that is missing or wrong."""
        if not self._keys or path in OPEN or path.startswith("/page/"):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the header's own bytes
        found = [i for i, known in enumerate(self._keys) if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401, "a valid API key is needed: send it as `Authorization: Bearer KEY`", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return f"key-{found[0]}"

    def _limit(self, headers: Headers) -> int:
        """Bytes that the body may have. Raises ApiError for one that says it has more."""
        limit = self._state.server_args.max_body_bytes
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit, f"{int(length):,} bytes")
        return limit

    def _ticket(self, request_id: str, path: str, tenant: str) -> Ticket:
        state = self._state
        if state.client.failure is not None:
            raise ApiError(500, f"the engine has failed: {state.client.failure}", code="engine_dead")
        if state.draining:
            raise ApiError(
                503, "the server is being stopped and takes no new request", code="draining",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        return state.admission.enter(request_id, path, tenant)


def _route_path(scope: Scope) -> str:
    """The path as the router reads it: without --root-path, where a proxy has left that in."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _too_large(limit: int, what: str) -> ApiError:
    # The rest of the body is not read, so the connection can carry nothing else.
    return ApiError(
        413, f"the body has {what}; at most {limit:,} are taken (--max-body-size)", code="body_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip


class _Answer:
    """`send` that adds the request id (which a body may have brought), and knows how far an answer is."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self.begun = False
        self.complete = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            request_id = self._scope.get("state", {}).get("request_id")
            if request_id is not None:
                MutableHeaders(scope=message)["x-request-id"] = request_id
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


class _Body:
    """`receive` that ends with 413 where a body is longer than it may be, and with 408 where it stops coming."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), BODY_TIMEOUT)
        except TimeoutError:
            raise ApiError(
                408, f"no part of the body came for {BODY_TIMEOUT:.0f} s", code="body_timeout",
                headers={"Connection": "close"},
            ) from None  # fmt: skip
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self._limit:
                raise _too_large(self._limit, f"more than {self._limit:,} bytes")
        return message
