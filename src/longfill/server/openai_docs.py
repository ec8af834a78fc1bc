"""The OpenAPI document's part on the OpenAI endpoints: schemas of bodies and answers, and which errors there are.

May import pydantic, msgspec and the protocol. Invariant: schemas are made from the models that check and write what
goes over the wire, so the document cannot say anything else.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from longfill.server.errors import ErrorBody

_ERRORS = {
    400: "The body cannot be served as it is; `param` names the field",
    401: "The API key is missing or wrong",
    404: "The model is not served here",
    408: "The body did not come",
    413: "The body is longer than --max-body-size",
    429: "Too much waits already; see Retry-After",
    500: "The engine failed or gave up the request",
    503: "The server is being stopped",
    504: "The request was not done within its deadline",
}


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes one of these as its body."""
    schemas = [_without_references(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(
    answer: type[msgspec.Struct],
    *,
    frame: type[msgspec.Struct] | None = None,
    errors: tuple[int, ...] = (400, 401, 500),
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer, its stream's frames, and its errors."""
    content: dict[str, Any] = {"application/json": {"schema": _schema(answer)}}
    if frame is not None:
        # Each event's data; comments and a last [DONE] stand between and behind them.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": _schema(frame)}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "content": content}}
    for status in errors:
        error = {"application/json": {"schema": _schema(ErrorBody)}}
        described[status] = {"description": _ERRORS[status], "content": error}
    return described


GENERATION_ERRORS = tuple(_ERRORS)


def _schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return _without_references(msgspec.json.schema(struct))


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with its definitions put where they are referred to; none of ours refers to itself."""
    definitions = schema.get("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            rest = {name: value for name, value in part.items() if name not in ("$ref", "$defs")}
            return {**resolved(definitions[part["$ref"].rpartition("/")[2]]), **rest}
        return {name: resolved(value) for name, value in part.items() if name not in ("$defs", "discriminator")}

    whole: dict[str, Any] = resolved(schema)
    return whole
