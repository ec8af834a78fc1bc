"""Tool calls out of an output that a schema forces to be calls: `tool_choice` "required" or a named function.

May import the parsers' events. Invariant: the events, with neighbouring parts joined, are the same however the text is
cut; arguments are handed on as the model wrote them, as soon as they come.
"""

from __future__ import annotations

import json
import re

from longfill.server.parsers import Event, MalformedToolCall, ToolCallArguments, ToolCallStart

_BROKE_OFF = "the output ended before the call was complete"
_HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}")
_END = re.compile(r"\s*(\]\s*)?")


class _JsonObject:
    """Follows a JSON object through text that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.closed = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = char == "\\"
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return at + 1
        return len(text)


class NamedCall:
    """The whole output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._object = _JsonObject()
        self._parts: list[str] = []

    def feed(self, text: str) -> list[Event]:
        """Events of the next part of the output."""
        if not text or self._object.closed:
            return []
        events: list[Event] = [] if self._parts else [ToolCallStart(0, self._name)]
        self._parts.append(text[: self._object.take(text)])
        return [*events, ToolCallArguments(0, self._parts[-1])]

    def finish(self) -> list[Event]:
        """Events of the output's end."""
        return [] if self._object.closed else [MalformedToolCall(0, "".join(self._parts), _BROKE_OFF)]


class RequiredCalls:
    """The output is a JSON list of objects, each with `name` and then `parameters`."""

    def __init__(self) -> None:
        self._buffer = ""
        """What stands between two calls' arguments."""
        self._index = -1
        self._head = ""
        self._arguments: list[str] = []
        self._object: _JsonObject | None = None
        """The arguments being read."""

    def feed(self, text: str) -> list[Event]:
        """Events of the next part of the output."""
        events: list[Event] = []
        self._buffer += text
        while self._buffer:
            if self._object is None and not self._begin(events):
                break
            self._read_arguments(events)
        return events

    def finish(self) -> list[Event]:
        """Events of the output's end."""
        if self._object is not None:
            return [MalformedToolCall(self._index, self._head + "".join(self._arguments), _BROKE_OFF)]
        rest = self._buffer
        if self._index >= 0 and (tail := _TAIL.match(rest)) is not None:
            rest = rest[tail.end() :]
        if self._index >= 0 and _END.fullmatch(rest):
            return []
        return [MalformedToolCall(self._index + 1, rest, _BROKE_OFF)]

    def _begin(self, events: list[Event]) -> bool:
        """Whether the buffer now begins with a call's arguments."""
        tail = _TAIL.match(self._buffer) if self._index >= 0 else None
        head = _HEAD.match(self._buffer, tail.end() if tail else 0)
        if head is None:
            return False
        self._head, self._buffer = head.group(), self._buffer[head.end() :]
        self._index += 1
        self._object, self._arguments = _JsonObject(), []
        events.append(ToolCallStart(self._index, json.loads(head.group(1))))
        return True

    def _read_arguments(self, events: list[Event]) -> None:
        assert self._object is not None
        taken = self._object.take(self._buffer)
        self._arguments.append(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        events.append(ToolCallArguments(self._index, self._arguments[-1]))
        if self._object.closed:
            self._object = None
