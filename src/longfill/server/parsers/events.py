"""What a completion's text turns out to be: reasoning, content, tool calls, and what was meant as a call and is none.

May import nothing of longfill. Invariant: events carry text only; ids, roles and finish reasons are the HTTP layer's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningText:
    """The next part of the message's reasoning_content."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """The next part of the message's content."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; its arguments follow. Calls are numbered from 0 without gaps."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next part of a call's arguments; the parts joined are a JSON object, unless the call turns out malformed."""

    index: int
    text: str


@dataclass(frozen=True)
class MalformedToolCall:
    """What the model wrote as a call and is none.

    If a call with this index was started, it is void: it broke off after its name or some of its arguments had been
    sent. Else none was started, and the next call will have this index.
    """

    index: int
    text: str
    """As written, markup and all."""
    why: str


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | MalformedToolCall
