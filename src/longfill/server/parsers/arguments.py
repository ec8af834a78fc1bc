"""A tool call's arguments as JSON text: what the model wrote for each, read by the type that the tool declares.

May import nothing of longfill. Invariant: a string stays what the model wrote, even if it looks like a number; anything
else is passed on as written if it is JSON, and as a string if not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Types = frozenset[str]
"""Names of JSON schema types; none where nothing is declared."""

STRING: Types = frozenset({"string"})


def parameter_schemas(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The parameters object of the tool `name` (JSON schema), empty if there is none. Tools are as OpenAI's."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def argument_types(parameters: Mapping[str, Any], key: str) -> Types:
    """The types that a tool's parameters allow for the argument `key`."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, depth=0)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > 8:  # deeper only if references go round in circles
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(name), list):
            each = [_types(choice, root, depth + 1) for choice in choices]
            return frozenset().union(*each) if all(each) else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset().union(*map(_types_of, values)) if isinstance(values, list) else frozenset()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the same schema points at (`#/$defs/Name`), or None."""
    target: Any = root
    for name in reference.removeprefix("#/").split("/"):
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _types_of(value: Any) -> Types:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"}) if value.is_integer() else frozenset({"number"})
        case str():
            return STRING
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def string_part(text: str) -> str:
    """A part of a string's value as it stands between the quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def argument_json(text: str, types: Types) -> str:
    """The JSON of an argument that the model wrote as `text`.

    Where the tool allows strings among others, JSON of a type that it does not allow is a string too.
    """
    if types != STRING:
        try:
            value = parse_json(text)
        except ValueError:
            pass
        else:
            if "string" not in types or types & _types_of(value):
                return text.strip()
    return json.dumps(text, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """The value; raises ValueError also for NaN and Infinity, which are no JSON, and for nesting too deep to read."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
