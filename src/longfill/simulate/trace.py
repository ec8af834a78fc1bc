"""What happens in a simulation: requests with their prompts, arrivals, outputs and aborts, read from JSON lines.

Imports errors, numpy and Request's types. Invariant: a trace that was read can be run; what is wrong with one names the
line and the field. Prompts given by their length alone share no token with any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longfill.errors import ConfigError
from longfill.request import SamplingParams, TokenIds

MOST_PROMPT_TOKENS = 100_000_000
MOST_TOKEN_ID = 2**31 - 1
"""Of ids that a trace gives; those above are handed out to prompts that are given by their length."""
DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
FIRST_OUTPUT = 1000
"""Outputs count up from here, unless given."""


class OwnTokens:
    """Hands out token ids that no other prompt has."""

    def __init__(self) -> None:
        self._next = MOST_TOKEN_ID + 1

    def take(self, count: int) -> range:
        """`count` ids."""
        ids = range(self._next, self._next + count)
        self._next = ids.stop
        return ids


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids that other prompts may have as well, then ids that none has; made into an array only when it arrives."""

    shared: TokenIds
    """int64 [tokens]"""
    own: range

    @property
    def num_tokens(self) -> int:
        return self.shared.size + len(self.own)

    def token_ids(self) -> TokenIds:
        """int64 [num_tokens]"""
        return np.concatenate([self.shared, np.arange(self.own.start, self.own.stop, dtype=np.int64)])


NO_TOKENS: TokenIds = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace. Times are virtual seconds; steps count from 0."""

    id: str
    prompt: Prompt
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """None: to the longest sequence."""
    arrival_s: float = 0.0
    at_step: int | None = None
    """Instead of `arrival_s`: the first step that may hold it."""
    abort_at_s: float | None = None
    abort_at_step: int | None = None
    """The first step that holds it no more, if it has not ended before."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    outputs: Sequence[int] = field(default=())
    """The first outputs; those behind count up from FIRST_OUTPUT."""
    ignore_eos: bool = False

    def output(self, index: int) -> int:
        """Token id of output number `index`, from 0."""
        return self.outputs[index] if index < len(self.outputs) else FIRST_OUTPUT + index


def read_trace(lines: Iterable[str], name: str) -> list[TraceRequest]:
    """The requests of a trace with one JSON object a line; empty lines are skipped.

    Raises ConfigError, with `name`, line and field, for anything that cannot be run as written.
    """
    own = OwnTokens()
    trace: list[TraceRequest] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        request = _request(_fields(line, where), own, where)
        if request.id in seen:
            raise ConfigError(f"{where}: id {request.id!r} is that of line {seen[request.id]} already")
        seen[request.id] = number
        trace.append(request)
    if not trace:
        raise ConfigError(f"{name}: there is no request in it; give one JSON object a line")
    return trace


def _fields(line: str, where: str) -> dict[str, Any]:
    """The line's object, each field of the right kind."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and endless brackets
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f'{where}: expected an object such as {{"id": "a", "prompt_tokens": 100}}')
    for key, value in values.items():
        if key not in _KINDS:
            raise ConfigError(f"{where}: field {key!r} is not known; there are {', '.join(_KINDS)}")
        expected, is_right = _KINDS[key]
        if not is_right(value):
            shown = json.dumps(value)
            raise ConfigError(f"{where}: {key} must be {expected}, got {shown if len(shown) < 80 else shown[:76]}")
    return values


def _request(values: Mapping[str, Any], own: OwnTokens, where: str) -> TraceRequest:
    if "id" not in values:
        raise ConfigError(f"{where}: there is no id")
    _one_of(values, "prompt_token_ids", "prompt_tokens", where)
    if "prompt_token_ids" not in values and "prompt_tokens" not in values:
        raise ConfigError(f"{where}: there is no prompt; give prompt_token_ids or prompt_tokens")
    _one_of(values, "arrival_s", "at_step", where)
    _one_of(values, "abort_at_s", "abort_at_step", where)
    for abort, other, arrival in (("abort_at_s", "at_step", "arrival_s"), ("abort_at_step", "arrival_s", "at_step")):
        _one_of(values, abort, other, where)
        if abort in values and values[abort] < values.get(arrival, 0):
            raise ConfigError(f"{where}: {abort} {values[abort]} is before its {arrival} {values[arrival]}")
    outputs = values.get("outputs", ())
    rest = {key: value for key, value in values.items() if key not in ("id", "prompt_token_ids", "prompt_tokens")}
    return TraceRequest(
        id=str(values["id"]),
        prompt=Prompt(
            np.array(values.get("prompt_token_ids", ()), dtype=np.int64), own.take(values.get("prompt_tokens", 0))
        ),
        **{"max_tokens": len(outputs) or DEFAULT_MAX_TOKENS} | rest,
    )


def _one_of(values: Mapping[str, Any], first: str, second: str, where: str) -> None:
    if first in values and second in values:
        raise ConfigError(f"{where}: {first} and {second} are both given; give one")


def _is_integer(value: object, low: int = -(2**63), high: int = 2**63 - 1) -> bool:
    return type(value) is int and low <= value <= high


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_integer(token, 0, MOST_TOKEN_ID) for token in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_IDS = f"a list of integers from 0 to {MOST_TOKEN_ID}, at least one"
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "id": ("text or an integer, not empty", lambda v: (_is_text(v) and v != "") or _is_integer(v)),
    "prompt_token_ids": (_IDS, _is_ids),
    "prompt_tokens": (
        f"an integer from 1 to {MOST_PROMPT_TOKENS}",
        lambda v: _is_integer(v, 1, MOST_PROMPT_TOKENS),
    ),
    "max_tokens": ("an integer of at least 1, or null", lambda v: v is None or _is_integer(v, 1)),
    "arrival_s": ("a number of seconds, at least 0", _is_time),
    "at_step": ("an integer of at least 0", lambda v: _is_integer(v, 0)),
    "abort_at_s": ("a number of seconds, at least 0", _is_time),
    "abort_at_step": ("an integer of at least 0", lambda v: _is_integer(v, 0)),
    "priority": ("an integer", _is_integer),
    "tenant": ("text", _is_text),
    "cache_salt": ("text", _is_text),
    "outputs": (_IDS, _is_ids),
    "ignore_eos": ("true or false", lambda v: isinstance(v, bool)),
}
"""What each field must be."""
