"""How far a request's prompts are, for frames of a stream that asked for it.

May import streams and the response structs. Invariant: frames are sent on a change only, and the last one says that all
tokens are done.
"""

from __future__ import annotations

from collections.abc import Sequence

from longfill.server.protocol_responses import PrefillProgress
from longfill.server.streams import RequestStream

PROGRESS_INTERVAL = 0.2
"""Seconds between two frames, at least."""


class ProgressFrames:
    """Progress over all prompts of a request; `streams` is filled when they go to the engine."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self._shown: tuple[int, int] | None = None

    def news(self) -> PrefillProgress | None:
        """The progress, if it is not what was shown last."""
        if not self._streams:
            return None
        done = sum(stream.num_computed_prompt_tokens for stream in self._streams)
        state = (done, self._cached)
        if state == self._shown:
            return None
        self._shown = state
        estimates = [stream.estimated_prefill_seconds for stream in self._streams if stream.first_token is None]
        known = [seconds for seconds in estimates if seconds is not None]
        return PrefillProgress(done, self._total, self._cached, max(known) if len(known) == len(estimates) else None)

    def last(self) -> PrefillProgress:
        """All done."""
        return PrefillProgress(self._total, self._total, self._cached, 0.0)

    @property
    def _total(self) -> int:
        return sum(stream.num_prompt_tokens for stream in self._streams)

    @property
    def _cached(self) -> int:
        return sum(stream.num_cached_tokens or 0 for stream in self._streams)
