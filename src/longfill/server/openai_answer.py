"""What every answer of the completion endpoints has, whatever its form: who it is for, what was asked, what it cost.

May import the response structs and the protocol. Invariant: an answer grows by deltas only, and each delta is turned
into frames once; whole answers and streams are made from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from longfill.request import SamplingParams
from longfill.server.cache_report import PrefixCacheReport
from longfill.server.errors import ApiError
from longfill.server.messages import CompletionDelta, OutputDelta
from longfill.server.openai_logprobs import Entry, TokenSpeller
from longfill.server.openai_usage import usage
from longfill.server.prompts import Prompt
from longfill.server.protocol import GenerationBody
from longfill.server.protocol_responses import PrefillProgress, Usage


@dataclass
class PromptState:
    """One prompt of a request and what the engine said about it."""

    prompt: Prompt
    params: SamplingParams
    cached_tokens: int = 0
    started: bool = False
    """Whether a token has been sampled."""
    prompt_logprobs: list[Entry | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def take(self, delta: OutputDelta) -> None:
        """What a delta says about the prompt."""
        self.cached_tokens = delta.num_cached_tokens
        self.started = self.started or any(part.token_ids for part in delta.completions) or delta.finished
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params


@dataclass
class AnswerHead:
    """What all frames of an answer share."""

    id: str
    model: str
    created: int
    body: GenerationBody
    prompts: list[PromptState]
    speller: TokenSpeller
    prefix_cache: PrefixCacheReport | UnsetType = UNSET
    completion_tokens: int = 0

    @property
    def n(self) -> int:
        """Completions of each prompt."""
        return self.body.n or 1

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """Of what has come so far."""
        return usage(
            (state.prompt.token_ids.size for state in self.prompts),
            (state.cached_tokens for state in self.prompts),
            self.completion_tokens,
            reasoning_tokens,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last frame has the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def kv_transfer_params(self) -> dict[str, Any] | UnsetType:
        """What the request brought, as whoever moves KV left it."""
        return next((s.kv_transfer_params for s in self.prompts if s.kv_transfer_params is not None), UNSET)


class Answer(Protocol):
    """An answer in the making."""

    head: AnswerHead

    def take(self, prompt: int, delta: OutputDelta) -> Sequence[Struct]:
        """Add what a prompt got; returns the frames that show it in a stream."""
        ...

    def progress(self, progress: PrefillProgress) -> Struct:
        """A frame that shows how far the prompts are."""
        ...

    def last(self) -> Struct:
        """The frame behind all others, which has no choices: the usage, if a stream asked for it."""
        ...

    def whole(self) -> Struct:
        """All of it, once it is finished."""
        ...


def raise_if_failed(part: CompletionDelta) -> None:
    """Raise ApiError for a completion that the engine gave up, with its message."""
    if part.finish_reason == "error":
        raise ApiError(500, f"the engine gave up this request: {part.stop_reason}", code="engine_error")


def stream_usage(head: AnswerHead, now: Callable[[], Usage]) -> Usage | UnsetType | None:
    """What a frame that is not the last one has under usage; `now` counts so far."""
    if not head.includes_usage:
        return UNSET
    options = head.body.stream_options
    return now() if options is not None and options.continuous_usage_stats else None
