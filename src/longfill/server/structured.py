"""What an output must match, from every field that asks for it: structured_outputs, response_format, tool_choice.

May import request and the protocol. Invariant: at most one of them constrains an output, and the schema of a forced
tool call is the tools' own, so that the answer is a call whatever the model would have written.
"""

from __future__ import annotations

from typing import Any

import msgspec

from longfill.request import StructuredOutputsParams
from longfill.server.errors import bad_request
from longfill.server.protocol import GenerationBody, ResponseFormat, StructuredOutputsBody
from longfill.server.protocol_chat import ChatCompletionRequest, FunctionDefinition, Tool


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """The constraint of this request, if it has one. Raises ApiError for two at once."""
    constraint, name = None, form_field(body)
    if body.structured_outputs is not None:
        constraint = _of_fields(body.structured_outputs)
    elif body.response_format is not None:
        constraint = _of_format(body.response_format)
    if not isinstance(body, ChatCompletionRequest) or not body.may_call:
        return constraint
    if constraint is not None:
        raise bad_request(
            f"{name} excludes tools: an output that must match it cannot be a call; set tool_choice: 'none' or drop "
            f"{name}",
            param=name,
        )
    if not body.must_call:
        return None
    tools = body.tools or []
    if body.called_function is not None:
        chosen = next(tool.function for tool in tools if tool.function.name == body.called_function)
        return _compact(_parameters(chosen))
    return _compact(_calls_schema(tools, one=body.parallel_tool_calls is False))


def form_field(body: GenerationBody) -> str:
    """The field that a constraint comes from."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if body.response_format is not None else "tools"


def _compact(schema: dict[str, Any]) -> StructuredOutputsParams:
    """Without white space between tokens, of which a small model may write any number."""
    return _schema({"x-guidance": {"whitespace_flexible": False}, **schema})


def _schema(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=msgspec.json.encode(schema).decode())


def _of_fields(given: StructuredOutputsBody) -> StructuredOutputsParams:
    if given.json_ is not None:
        if isinstance(given.json_, dict):
            return _schema(given.json_)
        try:
            msgspec.json.decode(given.json_, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(
                f"structured_outputs.json is no JSON schema: {error}", param="structured_outputs.json"
            ) from None
        return StructuredOutputsParams(json=given.json_)
    if given.regex is not None:
        return StructuredOutputsParams(regex=given.regex)
    if given.choice is not None:
        return StructuredOutputsParams(choice=tuple(given.choice))
    if given.grammar is not None:
        return StructuredOutputsParams(grammar=given.grammar)
    return StructuredOutputsParams(json_object=True)


def _of_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type == "text":
        return None
    if given.json_schema is None or given.json_schema.schema_ is None:
        return StructuredOutputsParams(json_object=True)
    return _schema(given.json_schema.schema_)


def _calls_schema(tools: list[Tool], *, one: bool) -> dict[str, Any]:
    """A list of calls, each an object with name and parameters."""
    shared: dict[str, dict[str, Any]] = {}
    items = [_call_schema(tool.function, shared) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if one:
        schema["maxItems"] = 1
    return {**schema, **shared}


def _call_schema(function: FunctionDefinition, shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parameters = _parameters(function)
    # "$ref": "#/$defs/..." counts from the root, so definitions move there.
    for place in ("$defs", "definitions"):
        definitions = parameters.pop(place, {})
        if not isinstance(definitions, dict):
            raise bad_request(f"tools: {place} of {function.name} must be an object", param="tools")
        for name, definition in definitions.items():
            if shared.setdefault(place, {}).setdefault(name, definition) != definition:
                raise bad_request(
                    f"tools: {function.name} and another tool define {name!r:.80} in {place} differently; rename one",
                    param="tools",
                )
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """A copy of the schema of a function's arguments, which is one of an object."""
    parameters = {"type": "object", **(function.parameters or {})}
    if parameters["type"] != "object":
        raise bad_request(
            f"tools: the parameters of {function.name} must be a schema of type object to be forced", param="tools"
        )
    return parameters
