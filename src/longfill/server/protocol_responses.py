"""What the OpenAI endpoints answer, whole and in chunks: one struct for each JSON object.

May import msgspec and the cache report. Invariant: a field that is UNSET is left out, one that is None is written as
null, and these structs are what the OpenAPI document shows.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from longfill.server.cache_report import PrefixCacheReport


class PromptTokensDetails(Struct):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the output's tokens, those before the end of the reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a request, added up over its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PrefillProgress(Struct):
    """How far the prompt has been computed."""

    tokens_done: int
    tokens_total: int
    cached_tokens: int
    estimated_seconds: float | None
    """Until its end."""


class PromptLogprob(Struct):
    """A token of the prompt, in vLLM's form."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(Struct):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The chosen token, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities in the form of chats."""

    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    """Log-probabilities in the form of completions: four lists over the tokens."""

    text_offset: list[int]
    """Where in the choice's text each token begins."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(Struct):
    """A called function."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallError(Struct):
    """What the model wrote as a tool call and is none. A call with this index, if a stream began one, is void."""

    index: int
    text: str
    """As written."""
    why: str


class AssistantMessage(Struct):
    """The answer of a chat."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    tool_call_errors: list[ToolCallError] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(Struct):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prefix_cache: PrefixCacheReport | UnsetType = UNSET


class FunctionDelta(Struct):
    """The next part of a called function."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The next part of a tool call; id, type and name come with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(Struct):
    """The next part of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    tool_call_errors: list[ToolCallError] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """The next part of one of n answers."""

    index: int
    delta: MessageDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """A frame of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prefill_progress: PrefillProgress | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prefix_cache: PrefixCacheReport | UnsetType = UNSET


class CompletionChoice(Struct):
    """One completion, or the next part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """Answer of /v1/completions, and each frame of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    prefill_progress: PrefillProgress | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    prefix_cache: PrefixCacheReport | UnsetType = UNSET


class ModelCard(Struct):
    """A name under which the model is served."""

    id: str
    created: int
    root: str
    """The model's folder."""
    max_model_len: int
    vocab_size: int
    object: Literal["model"] = "model"
    owned_by: str = "longfill"
    parent: str | None = None


class ModelList(Struct):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """Answer of /detokenize."""

    prompt: str


def encode(answer: Struct) -> bytes:
    """An answer as JSON."""
    return msgspec.json.encode(answer)
