"""Says, for each request, how much of its prompt the prefix cache had, where the match ended and why.

May import request, msgspec and NumPy. Invariant: prompts are compared within one tenant and one cache salt only, so no
report shows text of another's; what is kept is bounded, in tokens and in prompts.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from longfill.request import TokenIds

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]
Decode = Callable[[TokenIds], str]

MAX_TOKENS = 4 * 2**20
MAX_PROMPTS = 64
MAX_REPORTS = 1024
_AROUND = 12
"""Tokens shown on either side of a difference."""
_BLOCK = 64 * 1024
_PROBE = 16
"""Tokens in a row that, found again, show that a prompt goes on with an earlier one."""


class PrefixCacheReport(msgspec.Struct, kw_only=True):
    """What the prefix cache did for one prompt."""

    prompt_tokens: int
    cached_tokens: int
    common_tokens: int
    """The longest beginning shared with a recent prompt of the same tenant and cache salt."""
    earlier_prompt_tokens: int | None
    """Length of that prompt."""
    reason: str
    """Why the match ended: whole_prompt, page_not_full, new_beginning, token_differs, evicted, caching_off or
    prompt_logprobs."""
    message: str
    """The same in words; with token_differs, the text around the first difference."""


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt and what the engine said about it."""

    request_id: str
    tenant: str
    salt: str
    token_ids: TokenIds
    num_cached_tokens: int
    prompt_logprobs: bool


class CacheReports:
    """Recent prompts, and the reports on them by request id. Methods may run in any thread."""

    def __init__(self, *, page_size: int, enabled: bool, decode: Decode | None) -> None:
        self._page = page_size
        self._enabled = enabled
        self._decode = decode
        self._prompts: OrderedDict[str, tuple[tuple[str, str], Ids]] = OrderedDict()
        """Oldest first."""
        self._tokens = 0
        self._reports: OrderedDict[str, tuple[str, PrefixCacheReport]] = OrderedDict()
        """With the tenant whose prompt it is about."""
        self._lock = threading.Lock()

    def last(self, request_id: str) -> tuple[str, PrefixCacheReport] | None:
        """The tenant of a request and the report on it, if it is not long ago."""
        with self._lock:
            return self._reports.get(request_id)

    def explain(self, prompt: CachedPrompt) -> PrefixCacheReport:
        """Report on a prompt and remember it; logs a conversation that lost more than half of its cached beginning."""
        key, ids = (prompt.tenant, prompt.salt), prompt.token_ids.astype(np.int32)
        with self._lock:
            others = [earlier for owner, earlier in self._prompts.values() if owner == key]
        match = _closest(ids, others)
        reason, message = self._why(prompt, ids, match)
        report = PrefixCacheReport(
            prompt_tokens=ids.size,
            cached_tokens=prompt.num_cached_tokens,
            common_tokens=0 if match is None else match.common,
            earlier_prompt_tokens=None if match is None else match.earlier.size,
            reason=reason,
            message=message,
        )
        self._keep(prompt.request_id, key, ids, report)
        if self._enabled and match is not None and match.goes_on:
            self._log_loss(prompt, ids, match, message)
        return report

    def _log_loss(self, prompt: CachedPrompt, ids: Ids, match: _Match, message: str) -> None:
        if 2 * prompt.num_cached_tokens >= min(match.earlier.size, ids.size) // self._page * self._page:
            return
        logger.info(
            "request %s: the prefix cache had %d of %d prompt tokens, though a recent prompt of %d looks like the same "
            "conversation: %s",
            *(prompt.request_id, prompt.num_cached_tokens, ids.size, match.earlier.size, message),
        )

    def _why(self, prompt: CachedPrompt, ids: Ids, match: _Match | None) -> tuple[str, str]:
        cached, page = prompt.num_cached_tokens, self._page
        if not self._enabled:
            return "caching_off", "prefix caching is off (--no-enable-prefix-caching)"
        if prompt.prompt_logprobs:
            return "prompt_logprobs", "prompt_logprobs needs the whole prompt computed"
        if cached >= (ids.size - 1) // page * page:
            return "whole_prompt", f"all full pages ({page} tokens) were found; the last token is always computed"
        if match is None:
            return "new_beginning", "no recent prompt begins like this one"
        if cached < match.common // page * page:
            return "evicted", (
                f"the first {match.common} tokens are those of a recent prompt, but its pages behind token {cached} "
                "were evicted, or not computed yet"
            )
        if match.common == match.earlier.size:
            return "page_not_full", (
                f"the earlier prompt of {match.earlier.size} tokens is the beginning of this one; pages of {page} "
                "tokens are found when full"
            )
        return "token_differs", self._difference(ids, match.earlier, match.common)

    def _difference(self, ids: Ids, earlier: Ids, at: int) -> str:
        if self._decode is None:
            now, before = (f"token {int(prompt[at])}" for prompt in (ids, earlier))
        else:
            now, before = (
                repr(self._decode(prompt[max(at - _AROUND, 0) : at + _AROUND].astype(np.int64)))
                for prompt in (ids, earlier)
            )
        return f"token differs at position {at}: {now}; earlier was {before}"

    def _keep(self, request_id: str, key: tuple[str, str], ids: Ids, report: PrefixCacheReport) -> None:
        with self._lock:
            self._reports[request_id] = (key[0], report)
            while len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)
            replaced = self._prompts.pop(request_id, None)
            self._tokens += ids.size - (0 if replaced is None else replaced[1].size)
            self._prompts[request_id] = (key, ids)
            while self._tokens > MAX_TOKENS or len(self._prompts) > MAX_PROMPTS:
                _, (_, dropped) = self._prompts.popitem(last=False)
                self._tokens -= dropped.size


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two prompts share from their beginning."""
    length = min(a.size, b.size)
    for start in range(0, length, _BLOCK):
        differs = a[start : min(start + _BLOCK, length)] != b[start : min(start + _BLOCK, length)]
        if differs.any():
            return start + int(differs.argmax())
    return length


@dataclass(frozen=True)
class _Match:
    """A recent prompt that begins like a new one."""

    earlier: Ids
    common: int
    goes_on: bool
    """Whether the new one looks like the same conversation, further on."""


def _closest(ids: Ids, others: Sequence[Ids]) -> _Match | None:
    """The recent prompt with the longest beginning in common; of several, one that `ids` goes on with, or the newest.

    `others` are oldest first. None where nothing is in common.
    """
    commons = [common_prefix(ids, other) for other in others]
    longest = max(commons, default=0)
    ties = [other for other, common in zip(others, commons, strict=True) if common == longest][::-1]
    match = next((_Match(other, longest, True) for other in ties if _goes_on(ids, other, longest)), None)
    if match is None and longest > 0:
        return _Match(ties[0], longest, False)
    return match


def _goes_on(ids: Ids, earlier: Ids, common: int) -> bool:
    """Whether half of `earlier` is the beginning of `ids`, or pieces of its rest are found there at other places.

    A template that drifts (a date, a changed option) moves all that stands behind the drift.
    """
    if 2 * common >= earlier.size:
        return True
    rest = earlier[common + 1 :]
    if rest.size < 4 * _PROBE:
        return False
    starts = [share * (rest.size - _PROBE) // 4 for share in range(1, 5)]
    return sum(_contains(ids, rest[start : start + _PROBE]) for start in starts) >= 2


def _contains(ids: Ids, piece: Ids) -> bool:
    places = np.flatnonzero(ids[: ids.size - piece.size + 1] == piece[0])
    for offset in range(1, piece.size):
        places = places[ids[places + offset] == piece[offset]]
    return places.size > 0
