"""Errors as OpenAI writes them: an HTTP status and {"error": {"message", "type", "param", "code"}}.

May import errors and starlette. Invariant: every failure that a client sees is one `ApiError`, whose message says what
is wrong and what to do, and whose `param` names the field of the body where one is at fault.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from longfill.errors import (
    CapacityError,
    EngineDeadError,
    LongfillError,
    OverloadedError,
    RequestError,
    StoppingError,
)

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}


class ErrorObject(msgspec.Struct):
    """The object under `error`; what OpenAI's clients show."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """Body of every answer that is not a success, and the last frame of a stream that failed."""

    error: ErrorObject


class ApiError(Exception):
    """A refusal or failure with its HTTP status. `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """JSON text of the error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, kind, self.param, self.code)))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400 for a body that cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


def deadline_exceeded(seconds: float) -> ApiError:
    """504 for a request that was not done in its time."""
    return ApiError(
        504,
        f"the request was not done within {seconds:g} s and was aborted; send a shorter one, raise `timeout`, or start "
        "the server with a larger --request-timeout",
        code="deadline_exceeded",
    )


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as what the client gets. One that nobody expected is logged, and its text is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | CapacityError):
        return bad_request(str(error), param=_field_of(str(error)), code="invalid_request")
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, StoppingError):
        return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, LongfillError):
        logger.error("a request failed: %s", error)
        return ApiError(500, str(error), code="internal_error")
    logger.error("a request failed inside the server", exc_info=error)
    return ApiError(
        500, "internal error of the server; its log has the traceback, please report it", code="internal_error"
    )


def _field_of(message: str) -> str | None:
    """The field that a RequestError begins with ("n must be ...", "messages[2]: ..."), if it does."""
    field = re.match(r"([a-z_][\w.\[\]]*)(: | must be )", message)
    return field[1] if field else None
