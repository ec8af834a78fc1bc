"""One request on its way: the deltas that have come and nobody has taken yet, and how far its prompt is.

May import messages. Invariant: whoever takes deltas late gets the same text and tokens in fewer pieces, so what waits
is bounded by the output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from longfill.server.messages import AddRequest, CompletionDelta, OutputDelta, RequestProgress


class RequestStream:
    """Deltas of one request. As a context it ends the request when it is left, unless that has ended."""

    def __init__(self, request: AddRequest, num_prompt_tokens: int, abort: Callable[[str], None]) -> None:
        self.request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.arrival = time.monotonic()
        self.num_computed_tokens = 0
        """Of the completion that is furthest behind in its prompt, as of the last step with tokens of it."""
        self.num_tokens = num_prompt_tokens
        self.num_cached_tokens: int | None = None
        """None until it is known."""
        self.num_preemptions = 0
        self.queued_seconds: float | None = None
        """From its arrival in the engine to its first step."""
        self.first_step: float | None = None
        """When the first step with tokens of it was over; monotonic seconds, as all moments here."""
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.last_gap = 0.0
        """Seconds between the last two deltas with tokens."""
        self.num_output_tokens = 0
        self.finished = False
        """No delta will come."""
        self._waiting: OutputDelta | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._abort = abort
        self._advanced = self.arrival
        self._first_progress: tuple[float, int] | None = None

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Have the engine end it; a last delta says so. Nothing where it has ended."""
        if not self.finished:
            self._abort(self.request_id)

    @property
    def state(self) -> str:
        """Where it stands: "waiting", "prefill" or "decode"."""
        if self.first_token is not None:
            return "decode"
        return "waiting" if self.first_step is None else "prefill"

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Tokens of the prompt whose KV is in the cache."""
        return min(self.num_computed_tokens, self.num_prompt_tokens)

    @property
    def estimated_prefill_seconds(self) -> float | None:
        """Seconds to the end of the prompt, as its steps have gone so far; None before two have shown a rate."""
        if self._first_progress is None or self.first_token is not None:
            return None
        began, start = self._first_progress
        done, total = self.num_computed_prompt_tokens, self.num_prompt_tokens
        if done <= start:
            return None
        return (self._advanced - began) * _work(done, total, total) / _work(start, done, total)

    def observe(self, progress: RequestProgress) -> None:
        """Take what a step says of it."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = now
            self.num_cached_tokens = progress.num_cached_tokens
        if progress.num_computed_tokens < self.num_computed_tokens:  # preempted: the chase began anew
            self._first_progress = None
        self.num_computed_tokens = progress.num_computed_tokens
        self.num_tokens = progress.num_tokens
        self._advanced = now
        if self._first_progress is None:
            self._first_progress = (now, self.num_computed_prompt_tokens)

    def put(self, delta: OutputDelta) -> None:
        """Add a delta behind those that wait."""
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_preemptions = delta.num_preemptions
        self.queued_seconds = delta.queued_seconds
        count = sum(len(completion.token_ids) for completion in delta.completions)
        if count:
            now = time.monotonic()
            self.last_gap = now - (self.last_token or now)
            self.last_token = now
            self.first_token = self.first_token or now
            self.num_output_tokens += count
        self.finished = delta.finished
        self._waiting = delta if self._waiting is None else merge(self._waiting, delta)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it with an exception, which comes after the deltas that wait."""
        self._error = error
        self.finished = True
        self._news.set()

    async def next(self) -> OutputDelta:
        """What has come since the last call, as one delta; waits for it where nothing has.

        Raises what ended the request, if it was no delta. Behind the last delta nothing comes: do not call it then.
        """
        if self._waiting is None and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._waiting is None:
            assert self._error is not None
            raise self._error
        delta, self._waiting = self._waiting, None
        return delta


def _work(start: int, end: int, total: int) -> float:
    """Relative work of a prompt's tokens [start, end). A token's grows with those before it: here to threefold."""
    return (end - start) * (1 + (start + end) / total)


def merge(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Both deltas as one."""
    completions = {completion.index: completion for completion in first.completions}
    for completion in second.completions:
        known = completions.get(completion.index)
        completions[completion.index] = completion if known is None else _joined(known, completion)
    return OutputDelta(
        request_id=second.request_id,
        completions=[completions[index] for index in sorted(completions)],
        finished=second.finished,
        num_cached_tokens=second.num_cached_tokens,
        num_preemptions=second.num_preemptions,
        queued_seconds=second.queued_seconds,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        kv_transfer_params=second.kv_transfer_params,
    )


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return CompletionDelta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
    )
