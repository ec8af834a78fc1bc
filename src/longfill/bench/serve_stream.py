"""What an OpenAI-compatible server streams: server-sent events, and which of them are tokens.

Imports json only. Invariant: a stream cut into pieces anywhere gives the same events, and nothing but a chunk that
shows something generated counts as a token: no comment, no progress report, no role, no usage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHOWN_IN_CHAT = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


class StreamError(Exception):
    """A stream that breaks the protocol."""


class EventParser:
    """Bytes in any pieces to (event, data) pairs; comments are passed over, as in the specification."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        """The events that `piece` completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            field_name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                if self._data:
                    events.append((self._event, b"\n".join(self._data).decode("utf-8", "replace")))
                self._event, self._data = "", []
            elif field_name == b"data":
                self._data.append(value)
            elif field_name == b"event":
                self._event = value.decode("utf-8", "replace")
        return events


@dataclass
class Stream:
    """One answer as it comes in. Times are the caller's clock's."""

    started: float
    """When the request was sent."""
    token_times: list[float] = field(default_factory=list)
    """Of chunks that showed something generated; a chunk may carry several tokens."""
    finished: float | None = None
    """When the chunk with the finish reason came."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    """The server's message, where it reported an error in the stream."""
    done: bool = False
    """`[DONE]` came."""
    longest_silence: float = 0.0
    """The longest time without a byte from the server, comments being bytes."""
    _parser: EventParser = field(default_factory=EventParser)
    _last_byte: float | None = None

    def feed(self, piece: bytes, now: float) -> None:
        """Take in what came at `now`; raises StreamError for what is not a stream of chunks."""
        self.heard(now)
        for event, data in self._parser.feed(piece):
            if data == "[DONE]":
                self.done = True
            elif data and event in ("", "message", "error"):
                self._take(_object(data), now)

    def heard(self, now: float) -> None:
        """A byte came, of headers or of the body."""
        before = self.started if self._last_byte is None else self._last_byte
        self.longest_silence = max(self.longest_silence, now - before)
        self._last_byte = now

    def _take(self, chunk: Mapping[str, Any], now: float) -> None:
        if chunk.get("error"):
            self.error = error_message(chunk)
            return
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        for choice in chunk.get("choices") or []:
            if shows_tokens(choice):
                self.token_times.append(now)
            if choice.get("finish_reason") is not None:
                self.finish_reason, self.finished = choice["finish_reason"], now

    @property
    def first_token(self) -> float | None:
        """When something generated was seen first; where no token shows text, when the output ended."""
        if self.token_times:
            return self.token_times[0]
        return self.finished if self.count("completion_tokens") else None

    def count(self, name: str) -> int | None:
        """A count of the usage frame."""
        value = None if self.usage is None else self.usage.get(name)
        return value if isinstance(value, int) else None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server found in its prefix cache, where it says so."""
        details = None if self.usage is None else self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) else None


def shows_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether this choice of a chunk shows something generated. A chunk with empty text does not: it may be a role, or
    a finish reason, or a token whose text is held back, and counting it would make times look better than they are.
    """
    delta = choice.get("delta")
    if choice.get("token_ids") or choice.get("text"):
        return True
    return isinstance(delta, dict) and any(delta.get(name) for name in SHOWN_IN_CHAT)


def error_message(value: Any) -> str:
    """The message of an error object in any of the forms that servers have, one line."""
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _object(data: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise StreamError(f"not a chunk: {data[:100]!r}")
    return value
