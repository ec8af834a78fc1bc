"""What the API process and the engine process say to each other: one tagged struct for each kind of message.

May import request and msgspec. Invariant: a message holds plain values only, and the ids of a prompt, which can be a
million, travel beside it as raw bytes (int64), never as a list.
"""

from __future__ import annotations

from typing import Any

import msgspec

from longfill.request import Logprob, SamplingParams


class AddRequest(msgspec.Struct, tag=True, kw_only=True):
    """API to engine: queue a request. Its prompt's token ids are the message's second frame: int64 bytes."""

    request_id: str
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    kv_transfer_params: dict[str, Any] | None = None


class AbortRequests(msgspec.Struct, tag=True):
    """API to engine: end these requests now; no output of theirs follows. Those that ended already are passed over."""

    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    """API to engine: end the process."""


class EngineReady(msgspec.Struct, tag=True, kw_only=True):
    """Engine to API, once, as its first message: it takes requests. All values are ready for JSON."""

    pid: int
    model: str
    """The model's folder."""
    model_type: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    """Pages that can hold tokens."""
    page_size: int
    eos_token_ids: list[int]
    memory: dict[str, Any]
    """The start-up plan: budget, rows (name, bytes, note), bytes per token; bytes everywhere."""
    kernels: dict[str, str]
    """Operation -> the kernel that runs it."""
    num_threads: int


class EngineFailed(msgspec.Struct, tag=True, kw_only=True):
    """Engine to API, as its last message: it could not start, or a step raised."""

    message: str
    expected: bool
    """Whether it is one of longfill's own errors, whose message says what to do."""
    traceback: str = ""


class RequestRefused(msgspec.Struct, tag=True, kw_only=True):
    """Engine to API: this request was not queued, and why."""

    request_id: str
    message: str


class CompletionDelta(msgspec.Struct, kw_only=True):
    """What one completion of a request got since the delta before."""

    index: int
    text: str
    token_ids: list[int]
    """All sampled tokens, also those that show no text (a stop token, or half a character)."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry for each of `token_ids`, where asked for: the token itself first, then the likeliest ones."""
    finish_reason: str | None = None
    """One of "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; with "error" the message."""


class OutputDelta(msgspec.Struct, kw_only=True):
    """What a request got in a step. Its deltas, in order, make up its output."""

    request_id: str
    completions: list[CompletionDelta]
    """At most one for each index; an index without news is left out."""
    finished: bool
    """No delta follows: all completions have ended."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    num_preemptions: int = 0
    queued_seconds: float | None = None
    """From arrival in the engine to the first step with tokens of it; None before."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Of the whole prompt, where asked for, in the first delta that has them."""
    kv_transfer_params: dict[str, Any] | None = None
    """In the last delta: what the request brought, as whoever moves KV left it."""


class RequestProgress(msgspec.Struct, array_like=True):
    """A request that was in a step."""

    request_id: str
    num_computed_tokens: int
    """Tokens whose KV is in the cache after it."""
    num_tokens: int
    """Prompt and outputs so far: what `num_computed_tokens` chases."""
    num_prompt_tokens: int
    num_step_tokens: int
    """Tokens of it in this step."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that were found in the prefix cache."""


class StepRecord(msgspec.Struct, kw_only=True):
    """One step, for metrics and the live page: the engine's `StepStats` as plain values, and the ledger behind it."""

    step: int
    time: float
    """Unix time of its end."""
    num_tokens: int
    num_prompt_tokens: int
    """Of these, rows of prompts; the others are decode rows (drafts to verify among them)."""
    num_running: int
    num_waiting: int
    pages_used: int
    pages_cached: int
    """Free pages that hold a findable prefix."""
    pages_total: int
    indexer_chunks: int
    scored_pairs: int
    screened_pairs: int
    screen_survivors: int
    gathered_rows: int
    seconds: dict[str, float]
    """Stage -> seconds; see `StepStats.seconds`."""
    requests: list[RequestProgress]
    preempted: list[str]
    rss_bytes: int
    """Resident memory of the engine process."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    rank_scored_pairs: list[int] = []
    """Of all ranks' scored pairs, each one's."""
    comm: dict[str, int] = {}
    """Bytes that rank 0 has sent to others, by what they were."""


class Ledger(msgspec.Struct, array_like=True):
    """What the engine holds at a moment."""

    pages_used: int = 0
    pages_cached: int = 0
    """Free pages that hold a findable prefix."""
    num_running: int = 0
    num_waiting: int = 0


class StepOutputs(msgspec.Struct, tag=True, kw_only=True):
    """Engine to API, after each step, and where requests ended without one (`step` is None)."""

    outputs: list[OutputDelta]
    ledger: Ledger
    step: StepRecord | None = None


class Heartbeat(msgspec.Struct, tag=True, kw_only=True):
    """Engine to API, every second, from a thread beside the step loop."""

    work: int
    """Grows while anything is done: kernel tasks, layers, rounds of the step loop. Standing still means hung."""
    ledger: Ledger


ToEngine = AddRequest | AbortRequests | Stop
FromEngine = EngineReady | EngineFailed | RequestRefused | StepOutputs | Heartbeat
