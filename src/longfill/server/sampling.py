"""A body's sampling fields as SamplingParams, with the defaults of the model's own generation_config.json.

May import request, errors and the protocol. Invariant: what a client gave is either in the result, unchanged, or
refused by name; nothing here depends on the prompt but `with_room`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfill.errors import ModelError, RequestError
from longfill.request import MAX_N, RequestOutputKind, SamplingParams
from longfill.server.errors import as_api_error, bad_request
from longfill.server.protocol import GenerationBody
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_completion import CompletionRequest
from longfill.server.structured import structured_outputs

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat runs to the model's limit."""

MAX_STOPS = 128
MAX_STOP_CHARS = 4096
"""All stop strings together: each is looked for in every new piece of text."""
MAX_TOKEN_LIST = 1024
"""Entries of `stop_token_ids` and `logit_bias`."""
MAX_PROMPTS = 2048

_DEFAULTED = ("temperature", "top_p", "top_k", "repetition_penalty")
_PLAIN = (
    *("n", "presence_penalty", "frequency_penalty", "min_p", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs"),
)


@dataclass(frozen=True)
class SamplingLimits:
    """What this server allows beyond the ranges that SamplingParams checks."""

    vocab_size: int
    max_logprobs: int
    has_priorities: bool
    """Whether the scheduler reads `priority`."""


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling fields of the folder's generation_config.json, for requests that do not give them."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        defaults = {name: config[name] for name in _DEFAULTED if config.get(name) is not None}
        SamplingParams(**defaults)
    except (ValueError, TypeError, AttributeError, RequestError) as error:
        raise ModelError(f"{file}: {error}; correct it or remove it") from error
    return defaults


def check_body(body: GenerationBody, limits: SamplingLimits) -> None:
    """Refuse what needs no SamplingParams to be seen as wrong."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; they mean the "
            "same, give one of them",
            param="max_completion_tokens",
        )
    if body.priority and not limits.has_priorities:
        raise bad_request(
            "priority is read under --scheduling-policy priority only; drop it or start the server so", param="priority"
        )
    if body.priority is not None and abs(body.priority) >= 2**31:
        raise bad_request("priority must lie within 32 bits", param="priority")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        raise bad_request(
            f"stop holds {len(stops)} strings; at most {MAX_STOPS} are looked for, of {MAX_STOP_CHARS} characters "
            "together",
            param="stop",
        )
    _check_token_ids("stop_token_ids", body.stop_token_ids or (), limits)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        asked = getattr(body, name, None)
        if asked is not None and not isinstance(asked, bool) and not 0 <= asked <= limits.max_logprobs:
            raise bad_request(
                f"{name} must be from 0 to {limits.max_logprobs} (--max-logprobs), got {asked}", param=name
            )


def sampling_params(body: GenerationBody, defaults: dict[str, Any], limits: SamplingLimits) -> SamplingParams:
    """What the engine gets. `max_tokens` is None where the client gave none and the endpoint has no default."""
    check_body(body, limits)
    fields = {name: getattr(body, name) for name in (*_PLAIN, *_DEFAULTED) if getattr(body, name) is not None}
    fields = {**defaults, **fields}
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body.logit_bias, limits)
    fields["max_tokens"] = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    if isinstance(body, ChatCompletionRequest):
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    elif isinstance(body, CompletionRequest):
        fields |= _completion_fields(body, fields["max_tokens"])
    fields["structured_outputs"] = structured_outputs(body)
    fields["output_kind"] = RequestOutputKind.DELTA
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        refusal = as_api_error(error)
        if refusal.param == "max_tokens" and body.max_tokens is None:
            refusal.param, refusal.message = "max_completion_tokens", f"max_completion_tokens: {refusal.message}"
        raise refusal from None


def with_room(params: SamplingParams, num_prompt_tokens: int, limit: int, *, given: bool, param: str) -> SamplingParams:
    """`params` with a `max_tokens` that fits behind a prompt of that length, cut only if the client gave none."""
    room = limit - num_prompt_tokens
    if room < 1:
        raise bad_request(
            f"the maximum context length is {limit} tokens, prompt and output together, and this prompt has "
            f"{num_prompt_tokens}; send at most {limit - 1}",
            param=param,
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and params.max_tokens > room and given:
        raise bad_request(
            f"the maximum context length is {limit} tokens, prompt and output together, and this prompt has "
            f"{num_prompt_tokens}, with {params.max_tokens} of output asked for; lower max_tokens to at most {room}, "
            "or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > room:
        raise bad_request(
            f"min_tokens is {params.min_tokens}, but behind this prompt of {num_prompt_tokens} tokens the maximum "
            f"context length of {limit} leaves room for {room}",
            param="min_tokens",
            code="context_length_exceeded",
        )
    return dataclasses.replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))


def scores_prompt_only(body: GenerationBody) -> bool:
    """Whether the prompt's own log-probabilities are all that is asked for (`echo` with `max_tokens` 0)."""
    return isinstance(body, CompletionRequest) and bool(body.echo) and body.max_tokens == 0


def _completion_fields(body: CompletionRequest, max_tokens: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"logprobs": body.logprobs}
    if len(body.prompt) * (body.n or 1) > MAX_N or len(body.prompt) > MAX_PROMPTS:
        raise bad_request(
            f"prompt holds {len(body.prompt)} prompts, for {body.n or 1} completions each; at most {MAX_PROMPTS} "
            f"prompts and {MAX_N} completions go into one request",
            param="prompt",
        )
    if max_tokens is None:
        fields["max_tokens"] = max(COMPLETION_MAX_TOKENS, body.min_tokens or 0)
    elif scores_prompt_only(body):
        fields["max_tokens"] = 1  # the engine computes a prompt to sample behind it; what it samples is not shown
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return fields


def _logit_bias(given: dict[str, Any], limits: SamplingLimits) -> dict[int, float]:
    _check_count("logit_bias", given)
    for token in given:
        if not re.fullmatch("[0-9]{1,9}", token):
            raise bad_request(f"logit_bias: {token!r:.40} is not a token id; write ids as strings", param="logit_bias")
    bias = {int(token): value for token, value in given.items()}
    _check_token_ids("logit_bias", list(bias), limits)
    return bias


def _check_count(name: str, tokens: Sized) -> None:
    if len(tokens) > MAX_TOKEN_LIST:
        raise bad_request(f"{name} holds {len(tokens)} tokens, at most {MAX_TOKEN_LIST} are taken", param=name)


def _check_token_ids(name: str, ids: Sequence[int], limits: SamplingLimits) -> None:
    _check_count(name, ids)
    wrong = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{name}: token ids go from 0 to {limits.vocab_size - 1}, got {wrong}", param=name)
