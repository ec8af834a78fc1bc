"""Traces from one line of text: `long=1x500000, short=30x200 at 1s every 0.5s out 16`.

Imports errors and the trace. Invariant: the same text and seed give the same trace.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from longfill.errors import ConfigError
from longfill.simulate.trace import (
    DEFAULT_MAX_TOKENS,
    MOST_PROMPT_TOKENS,
    NO_TOKENS,
    OwnTokens,
    Prompt,
    TraceRequest,
)

MOST_REQUESTS = 1_000_000
_GROUP = re.compile(r"(?P<name>[^\s=,]+)\s*=\s*(?P<count>\d+)x(?P<tokens>\d+)(?P<options>(?:\s+\S+\s+\S+)*)")
_OPTIONS = {
    "out": (r"\d+", "outputs, such as 16"),
    "at": (r"\d+(\.\d+)?s", "the first arrival, such as 2s"),
    "every": (r"~?\d+(\.\d+)?s", "the time between arrivals, such as 0.5s, or ~0.5s on average"),
    "shared": (r"\d+", "tokens that all prompts of the group begin with, such as 1000"),
    "tenant": (r"\S+", "a name"),
    "priority": (r"-?\d+", "an integer, lower first"),
}
"""What may follow a group's size: each word's value, and what that is."""


def synthetic_trace(text: str, seed: int) -> list[TraceRequest]:
    """The requests of groups `NAME=COUNTxTOKENS [WORD VALUE]...`, separated by commas.

    Raises ConfigError, with the group, for text that does not say that.
    """
    own, rng = OwnTokens(), np.random.default_rng(seed)
    trace: list[TraceRequest] = []
    for part in text.split(","):
        trace.extend(_group(part.strip(), own, rng))
    [(name, count)] = Counter(request.id for request in trace).most_common(1)
    if count > 1:
        raise ConfigError(f"--synthetic: two groups make a request {name!r}; give each group a name of its own")
    return trace


def _group(text: str, own: OwnTokens, rng: np.random.Generator) -> Iterator[TraceRequest]:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ConfigError(f"--synthetic: cannot read {text!r}; write for example 'short=30x200 at 1s every 0.5s'")
    options = _options(match["options"], match["name"])
    count, tokens, shared = int(match["count"]), int(match["tokens"]), int(options.get("shared", "0"))
    if not (1 <= count <= MOST_REQUESTS and 1 <= tokens <= MOST_PROMPT_TOKENS):
        raise ConfigError(
            f"--synthetic: {match['name']}: from 1 to {MOST_REQUESTS:,} prompts of 1 to {MOST_PROMPT_TOKENS:,} tokens, "
            f"got {count:,} of {tokens:,}"
        )
    if shared > tokens:
        raise ConfigError(f"--synthetic: {match['name']}: shared {shared:,} is more than the prompt's {tokens:,}")
    max_tokens = int(options.get("out", str(DEFAULT_MAX_TOKENS)))
    if max_tokens < 1:
        raise ConfigError(f"--synthetic: {match['name']}: out must be at least 1")
    beginning = np.array(own.take(shared), dtype=np.int64) if shared else NO_TOKENS
    arrivals = _arrivals(count, options, rng)
    if not math.isfinite(arrivals[-1]):
        raise ConfigError(f"--synthetic: {match['name']}: the last one would never arrive; give smaller times")
    for i, arrival_s in enumerate(arrivals):
        yield TraceRequest(
            id=match["name"] if count == 1 else f"{match['name']}-{i}",
            prompt=Prompt(beginning, own.take(tokens - shared)),
            max_tokens=max_tokens,
            arrival_s=arrival_s,
            tenant=options.get("tenant", ""),
            priority=int(options.get("priority", "0")),
        )


def _options(text: str, group: str) -> dict[str, str]:
    words = text.split()
    options: dict[str, str] = {}
    for word, value in zip(words[::2], words[1::2], strict=True):
        if word not in _OPTIONS:
            raise ConfigError(f"--synthetic: {group}: {word!r} is not known; there are {', '.join(_OPTIONS)}")
        pattern, meaning = _OPTIONS[word]
        if word in options or re.fullmatch(pattern, value, re.ASCII) is None:
            raise ConfigError(f"--synthetic: {group}: {word} takes {meaning}, once; got {value!r}")
        options[word] = value
    return options


def _arrivals(count: int, options: dict[str, str], rng: np.random.Generator) -> list[float]:
    first, gap = float(options.get("at", "0s")[:-1]), options.get("every", "0s")
    if gap.startswith("~"):
        gaps = rng.exponential(float(gap[1:-1]), count - 1)
        return [first, *(first + np.cumsum(gaps)).tolist()]
    return [first + i * float(gap[:-1]) for i in range(count)]
