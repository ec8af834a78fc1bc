"""Reads one tool call at a time: its header, then its arguments, or what went wrong and where the text is text again.

May import parsers.arguments, .events and .incoming. Invariant: a call is started only once its header and the
beginning of its arguments (or its end) have been read, so text that only mentions a tag starts none.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longfill.server.parsers.arguments import parameter_schemas
from longfill.server.parsers.events import Event, MalformedToolCall, ToolCallArguments, ToolCallStart
from longfill.server.parsers.incoming import SPACE, Incoming, Run, Shape, Steps, Tags

Emit = Callable[[Event], object]


class Call:
    """A call that has begun, and where its arguments go."""

    def __init__(self, index: int, parameters: Mapping[str, Any], emit: Emit) -> None:
        self.parameters = parameters
        self._index = index
        self._emit = emit

    def add(self, text: str) -> None:
        if text:
            self._emit(ToolCallArguments(self._index, text))


class ToolFormat(ABC):
    """How a family of models writes calls. A subclass reads the arguments, its own subclasses say which tags."""

    header: tuple[str | Run, ...]
    """Shape of a call's beginning, with the group `name`; its first piece is the tag that opens a call."""
    headers: tuple[Shape, ...]
    """The header and what has to follow for the call to be certain, each with and without `block` before."""
    block: str = ""
    """The tag that opens a block of calls, where the format has blocks. A call without one is a call too."""
    block_end: str = ""
    call_end: str
    openings: tuple[str, ...]
    """Tags at which a call may begin."""
    fragments: tuple[str, ...]
    """Other tags; outside of a call they are the rest of a broken one."""
    separator: str | None
    """What the model's template writes between content and calls, so no content; None: it strips all white space."""

    def __init__(self) -> None:
        call_open = self.header[0]
        assert isinstance(call_open, str)
        self.wrappers: tuple[tuple[str | Run, ...], ...] = ((self.block, SPACE), ()) if self.block else ((),)
        """What may stand before a header."""
        self.block_ends = (Shape(self.block_end),) if self.block_end else ()
        self.starts = tuple(filter(None, (self.block, call_open)))
        self.ends = tuple(filter(None, (self.call_end, self.block_end)))
        block = f"(?:{re.escape(self.block)})" if self.block else "(?!)"
        openings = "|".join(map(re.escape, self.openings))
        self.opening = re.compile(rf"(?:{block}{SPACE.pattern})?{re.escape(call_open)}|{block}|{openings}")
        """The part of a header that is certainly there."""

    @abstractmethod
    def read_arguments(self, call: Call, header: re.Match[str], incoming: Incoming) -> Steps[str]:
        """Read what follows the header, to the end of the call; returns why it is malformed, or ""."""


class CallReader:
    """The calls of one completion; `num_started` is how many were started, `any_read` whether there was any markup."""

    def __init__(self, form: ToolFormat, tools: Sequence[Mapping[str, Any]], incoming: Incoming, emit: Emit) -> None:
        self.num_started = 0
        self.any_read = False
        self._form = form
        self._tools = tools
        self._incoming = incoming
        self._emit = emit
        self._resume = Tags(*form.starts, *form.ends)

    def read(self, *, tentative: bool = False) -> Steps[bool]:
        """Read the call that opens here. Where none does it is malformed or, if `tentative`, false and nothing read."""
        self._incoming.keep()
        header = yield from self._incoming.one_of(*self._form.headers)
        if not header and tentative:
            self._incoming.kept()
            return False
        self.any_read = True
        if not header:
            opening = self._form.opening.match(self._incoming.rest)
            assert opening
            self._incoming.take(opening.end())
            yield from self._broken(self.num_started, "no name of a tool, or nothing that belongs after it")
            return True
        index = self.num_started
        self.num_started += 1
        name = header["name"].strip()
        self._emit(ToolCallStart(index, name))
        call = Call(index, parameter_schemas(self._tools, name), self._emit)
        why = yield from self._form.read_arguments(call, header, self._incoming)
        if why:
            yield from self._broken(index, why)
        self._incoming.kept()
        return True

    def read_fragment(self) -> Steps[None]:
        """A tag that belongs into a call stands outside of one."""
        self.any_read = True
        self._incoming.keep()
        yield from self._broken(self.num_started, "the tag that opens a call is missing")

    def _broken(self, index: int, why: str) -> Steps[None]:
        """Read on to where the text makes sense again: after the next end, or before the next call."""
        tag = yield from self._incoming.until(self._resume, lambda _: None)
        if tag in self._form.ends:
            self._incoming.take(len(tag))
        self._emit(MalformedToolCall(index, self._incoming.kept(), why))
