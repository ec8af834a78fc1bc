"""Tool calls whose arguments each stand between tags of their own: GLM's and DeepSeek-V3.2's.

May import parsers.arguments, .calls, .events and .incoming. Invariant: a string argument is passed on as it comes; any
other is held back to its end, because only then is it known to be JSON.
"""

from __future__ import annotations

import re

from longfill.server.parsers.arguments import STRING, Types, argument_json, argument_types, string_part
from longfill.server.parsers.calls import Call, ToolFormat
from longfill.server.parsers.incoming import SPACE, Incoming, Run, Shape, Steps, Tags


class TaggedArguments(ToolFormat):
    """`argument` is the shape before a value, with the group `key`, and `value_end` the tag after it."""

    argument: tuple[str | Run, ...]
    value_end: str

    def __init__(self) -> None:
        super().__init__()
        first = ((SPACE, *self.argument), (SPACE, self.call_end))
        self.headers = tuple(Shape(*wrapper, *self.header, *rest) for wrapper in self.wrappers for rest in first)
        self._next = tuple(Shape(*rest) for rest in first)
        without_end = (*self.starts, self.block_end) if self.block_end else self.starts
        self._unclosed = tuple(Shape(SPACE, tag) for tag in without_end)
        self._value_end = Tags(self.value_end)

    def read_arguments(self, call: Call, header: re.Match[str], incoming: Incoming) -> Steps[str]:
        found: re.Match[str] | None = header
        seen: set[str] = set()
        while found and (key := found.groupdict().get("key")) is not None:
            key = key.strip()
            if key in seen:
                return f"argument {key!r} is given twice"
            if found.groupdict().get("string", "true") not in ("true", "false"):
                return f"argument {key!r} has an attribute string that is neither true nor false"
            call.add(("{" if not seen else ", ") + argument_json(key, STRING) + ": ")
            seen.add(key)
            if not (yield from self._value(call, argument_types(call.parameters, key), found, incoming)):
                return f"the output ends inside argument {key!r}"
            found = yield from incoming.one_of(*self._next)
        if not found and not (yield from self._complete(incoming)):
            return "after an argument comes neither another one nor the end of the call"
        call.add("}" if seen else "{}")
        return ""

    def _value(self, call: Call, types: Types, argument: re.Match[str], incoming: Incoming) -> Steps[bool]:
        """Pass on one value; false if its end never came."""
        if types == STRING or argument.groupdict().get("string") == "true":
            call.add('"')
            ended = yield from incoming.until(self._value_end, lambda text: call.add(string_part(text)))
            call.add('"' if ended else "")
        else:
            parts: list[str] = []
            ended = yield from incoming.until(self._value_end, parts.append)
            call.add(argument_json("".join(parts), types) if ended else "")
        incoming.take(len(ended))
        return bool(ended)

    def _complete(self, incoming: Incoming) -> Steps[bool]:
        """Whether only the end of the call is missing: another call, the block's end or the output's comes instead."""
        if (yield from incoming.next_of(*self._unclosed)):
            return True
        if not incoming.ended:
            return False
        rest = incoming.rest.strip()
        another = next(piece for piece in self.argument if isinstance(piece, str))
        if not self.call_end.startswith(rest) or (rest and another.startswith(rest)):
            return False
        incoming.take(len(incoming.rest))
        return True


class Glm(TaggedArguments):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`; in GLM-4.5 with line breaks."""

    header = ("<tool_call>", SPACE, Run(r"[^\s<>{}()\[\]\"',;=]", 1, group="name"))
    argument = ("<arg_key>", Run("[^<]", 1, group="key"), "</arg_key>", SPACE, "<arg_value>")
    value_end = "</arg_value>"
    call_end = "</tool_call>"
    openings = ("<tool_call>",)
    fragments = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
    separator = None


class DeepSeekV32(TaggedArguments):
    """DSML: invokes in a `function_calls` block; each parameter says whether it is a string or JSON."""

    block = "<｜DSML｜function_calls>"
    block_end = "</｜DSML｜function_calls>"
    header = ("<｜DSML｜invoke", Run(r"\s", 1), 'name="', Run('[^"<]', 1, group="name"), '"', SPACE, ">")
    argument = (
        "<｜DSML｜parameter",
        Run(r"\s", 1),
        'name="',
        Run('[^"]', 1, group="key"),
        '"',
        Run(r"\s", 1),
        'string="',
        Run("[a-z]", 1, 5, group="string"),
        '"',
        SPACE,
        ">",
    )
    value_end = "</｜DSML｜parameter>"
    call_end = "</｜DSML｜invoke>"
    openings = ("<｜DSML｜",)
    fragments = ("</｜DSML｜",)
    separator = "\n\n"
