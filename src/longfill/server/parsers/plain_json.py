"""Tool calls whose arguments are one JSON object: DeepSeek-V3's and V3.1's.

May import parsers.arguments, .calls and .incoming. Invariant: the object's text is passed on as it comes and unchanged,
up to its closing brace.
"""

from __future__ import annotations

import re

from longfill.server.parsers.arguments import parse_json
from longfill.server.parsers.calls import Call, ToolFormat
from longfill.server.parsers.incoming import SPACE, Incoming, Run, Shape, Steps, Tags

_NAME = Run(r"[^\s<]", 1, group="name")
_AFTER = re.compile(r"\s*+(?:```)?\s*+")
"""What may stand between the object and the end of the call: V3 puts it into a fenced block."""


class PlainJson(ToolFormat):
    block = "<｜tool▁calls▁begin｜>"
    block_end = "<｜tool▁calls▁end｜>"
    call_end = "<｜tool▁call▁end｜>"
    openings = (block, "<｜tool▁call▁begin｜>")
    fragments = ("<｜tool▁sep｜>", call_end, block_end)
    separator = ""

    def __init__(self) -> None:
        super().__init__()
        self.headers = tuple(Shape(*wrapper, *self.header, "{") for wrapper in self.wrappers)
        self._after = Tags(*self.openings, *self.ends)

    def read_arguments(self, call: Call, _header: re.Match[str], incoming: Incoming) -> Steps[str]:
        found = _Object(call)
        found.add("{")
        tag = yield from incoming.until(self._after, found.add)
        after = "".join(found.after)
        if not tag:  # the output's end may be within the call's
            after = after[: len(after) - self._after.held(after)]
        if why := found.fault():
            return why
        if not _AFTER.fullmatch(after):
            return "text follows the arguments"
        # A missing end is not the arguments' fault: they are complete.
        if tag == self.call_end:
            incoming.take(len(tag))
        return ""


class _Object:
    """Passes a JSON object on until its last brace, and keeps it; `after` is what follows."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._parts: list[str] = []
        self.after: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def add(self, text: str) -> None:
        if self._parts and not self._depth:
            self.after.append(text)
            return
        end = self._scan(text)
        self._call.add(text[:end])
        self._parts.append(text[:end])
        if end < len(text):
            self.after.append(text[end:])

    def _scan(self, text: str) -> int:
        """Where the object ends within `text`, or the text's length."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._in_string
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character in "{[":
                self._depth += 1
            elif not self._in_string and character in "}]":
                self._depth -= 1
                if not self._depth:
                    return position + 1
        return len(text)

    def fault(self) -> str:
        """Why this is no object of arguments, or ""."""
        if self._depth:
            return "the arguments are cut off"
        try:
            parse_json("".join(self._parts))
        except ValueError as error:
            return f"the arguments are not JSON: {error}"
        return ""


class DeepSeekV31(PlainJson):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, in a block."""

    header = ("<｜tool▁call▁begin｜>", SPACE, _NAME, SPACE, "<｜tool▁sep｜>", SPACE)


class DeepSeekV3(PlainJson):
    """V3 and R1: the type `function` where V3.1 has the name; the name and the object follow as a fenced block."""

    header = (
        "<｜tool▁call▁begin｜>",
        SPACE,
        "function",
        SPACE,
        "<｜tool▁sep｜>",
        SPACE,
        _NAME,
        SPACE,
        "```json",
        SPACE,
    )
