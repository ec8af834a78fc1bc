"""Request, SamplingParams and outputs: the nouns that cross every floor.

Imports nothing of the house but errors. Invariant: a request's progress is two numbers only, `num_computed_tokens`
chasing `num_tokens`; no field says "prefill" or "decode".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from longfill.errors import RequestError

TokenIds = npt.NDArray[np.int64]

MAX_N = 16_384
"""Completions of one prompt; vLLM's limit."""


class RequestOutputKind(enum.Enum):
    """What a request's outputs hold; vLLM's names."""

    CUMULATIVE = 0
    """All tokens so far, in every step that brings one."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """All tokens, once, when the request has ended."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one field is given. vLLM's names.

    `json` is a JSON schema, as its text; `regex` a regular expression and `grammar` a Lark grammar in llguidance's
    dialect, for the whole output; `choice` a list of texts of which the output is one; `json_object` any JSON object.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        fields = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in fields.items() if value is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs must have one of json, regex, choice, grammar and json_object, got "
                f"{', '.join(given) or 'none'}"
            )
        if self.choice is not None and not (
            self.choice and _are(self.choice, lambda c: isinstance(c, str) and c != "")
        ):
            raise RequestError("structured_outputs: choice must be a list of texts, none empty")
        for name in ("json", "regex", "grammar"):
            if not isinstance(fields[name], str | NoneType):
                raise RequestError(f"structured_outputs: {name} must be text, got {fields[name]!r:.60}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token; names, defaults and ranges are vLLM's.

    `temperature` 0 is greedy (ties to the lower token id). `top_k` 0 or -1 means all tokens. `logprobs=n` returns the
    chosen token's log-probability and those of the n most likely ones; `prompt_logprobs=n` the same for each token of
    the prompt, which is then computed without the prefix cache and with the head for every row. `max_tokens=None` runs
    to the model's limit. Before `min_tokens` are there, no eos token (even with `ignore_eos`) and none of
    `stop_token_ids` is chosen, and no stop string ends the text. `presence_penalty` and `frequency_penalty` are
    subtracted from the logits of tokens in the output, once and for each time; `repetition_penalty` divides positive
    logits of tokens in prompt or output, and multiplies negative ones. `logit_bias` is added, by token id. `n`
    completions are drawn from seeds one apart; greedy ones would be equal, so they are refused. `structured_outputs`
    masks tokens that would leave the form asked for; `output_kind` says what `LLMEngine.step` returns.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        checks = [
            (_is_integer(self.n) and 1 <= self.n <= MAX_N, "n", f"a count from 1 to {MAX_N:,}"),
            (_is_within(self.presence_penalty, 2), "presence_penalty", "in [-2, 2]"),
            (_is_within(self.frequency_penalty, 2), "frequency_penalty", "in [-2, 2]"),
            (
                _is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf,
                "repetition_penalty",
                "a finite number above 0",
            ),
            (_is_number(self.temperature) and 0 <= self.temperature < math.inf, "temperature", "a finite number >= 0"),
            (_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]"),
            (_is_integer(self.top_k) and -1 <= self.top_k < 2**63, "top_k", "-1, 0 (all) or a positive 64-bit count"),
            (_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]"),
            (_is_count(self.max_tokens) and self.max_tokens != 0, "max_tokens", "a count of at least 1, or None"),
            (_is_integer(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "a count"),
            (_is_count(self.logprobs) and (self.logprobs or 0) <= 64, "logprobs", "a count up to 64, or None"),
            (
                _is_count(self.prompt_logprobs) and (self.prompt_logprobs or 0) <= 64,
                "prompt_logprobs",
                "a count up to 64, or None",
            ),
            (_is_bias(self.logit_bias), "logit_bias", "a mapping from token ids (>= 0) to numbers in [-100, 100]"),
            (self.seed is None or (_is_integer(self.seed) and -(2**63) <= self.seed < 2**64), "seed", "64-bit"),
            (_are(stops, _is_text), "stop", "a string or strings, none empty"),
            (_are(self.stop_token_ids or (), lambda t: _is_integer(t) and t >= 0), "stop_token_ids", "ids >= 0"),
            (
                isinstance(self.structured_outputs, StructuredOutputsParams | NoneType),
                "structured_outputs",
                "a StructuredOutputsParams, or None",
            ),
            (isinstance(self.output_kind, RequestOutputKind), "output_kind", "a RequestOutputKind"),
        ]
        for ok, name, want in checks:
            if not ok:
                raise RequestError(f"{name} must be {want}, got {getattr(self, name)!r:.200}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens {self.max_tokens:,}, got {self.min_tokens:,}")
        if self.n > 1 and self.temperature == 0:
            raise RequestError(
                f"n must be 1 with temperature 0, got {self.n:,}: greedy completions of one prompt are all equal; "
                "raise the temperature or drop n"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter to the next one's logits beyond what the model makes of them."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever spelling it came in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float | np.floating)


def _is_count(value: object) -> bool:
    return value is None or (_is_integer(value) and int(value) >= 0)  # type: ignore[call-overload]


def _is_within(value: object, limit: float) -> bool:
    return _is_number(value) and -limit <= value <= limit  # type: ignore[operator]


def _is_bias(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    return all(_is_integer(token) and token >= 0 and _is_within(bias, 100) for token, bias in value.items())


def _are(values: object, right: Callable[[Any], bool]) -> bool:
    """Whether `values` is a list or tuple of values that are all `right`."""
    return isinstance(values, list | tuple | np.ndarray) and all(right(value) for value in values)


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler's queues."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a request ended; the API's names."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """One prompt on its way through the engine.

    Token ids live in one growing int64 array (a million-token prompt costs 8 MB, not a list of boxed integers):
    prompt first, sampled tokens behind.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | TokenIds,
        params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.priority = priority
        """Lower goes first, under `--scheduling-policy priority`."""
        self.tenant = tenant
        """Whose share of the prefill it takes, under `--prefill-policy fair`; "" is a share of its own."""
        self.kv_transfer_params = kv_transfer_params
        """What the caller has to say to whoever moves KV between nodes; outputs carry it back."""
        prompt = _token_array(request_id, prompt_token_ids)
        self.num_prompt_tokens = int(prompt.size)
        self._tokens = prompt
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        """Tokens that steps have computed or will have, those in flight included and all their drafts taken as right:
        what a rejected draft takes away is known, and subtracted, once its step is booked."""
        self.num_in_flight_tokens = 0
        """Of these, tokens of steps that are not booked yet."""
        self.num_output_placeholders = 0
        """Tokens that steps in flight will have sampled, all drafts taken as right."""
        self.num_draft_tokens = 0
        """Drafts that the worker has ready for the next step."""
        self.num_cached_tokens = 0
        """Tokens found in the prefix cache at the first admission (what usage reports as cached)."""
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        """Why it ended with `FinishReason.ERROR`."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that it has, or will have sampled, and that no step computes yet; its drafts are not among them."""
        return self.num_tokens + self.num_output_placeholders - self.num_computed_tokens

    @property
    def num_booked_tokens(self) -> int:
        """Tokens whose KV is in the cache: `num_computed_tokens` without those of steps in flight."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def token_ids(self) -> TokenIds:
        """All tokens so far, prompt and output: int64 [num_tokens], a read-only use of a view."""
        return self._tokens[: self.num_tokens]

    @property
    def output_token_ids(self) -> TokenIds:
        return self._tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        """Add one sampled token."""
        if self.num_tokens == self._tokens.size:
            grown = np.empty(self.num_tokens + max(256, self.num_output_tokens), dtype=np.int64)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def drop_outputs_after(self, num_output_tokens: int) -> None:
        """Keep so many outputs: a stop string may end in the middle of what one step brought."""
        self.num_tokens = min(self.num_tokens, self.num_prompt_tokens + num_output_tokens)

    def sibling(self, request_id: str, params: SamplingParams) -> Request:
        """A new request for the same prompt, from the same caller. The prompt's ids are shared until it samples."""
        sibling = Request(
            request_id,
            self._tokens[:1],
            params,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            kv_transfer_params=self.kv_transfer_params,
        )
        # Never written: an output is appended to a larger copy.
        sibling._tokens = self._tokens[: self.num_prompt_tokens]
        sibling.num_prompt_tokens = sibling.num_tokens = self.num_prompt_tokens
        return sibling


def _token_array(request_id: str, token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """A copy of the caller's ids: int64 [tokens]. Raises RequestError for anything but a row of 64-bit integers."""
    try:
        given = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError):
        given = np.empty((0, 0))
    if given.ndim == 1 and given.size == 0:
        raise RequestError(f"request {request_id}: the prompt is empty; give at least one token")
    if given.ndim != 1 or given.dtype.kind not in "iu" or not np.can_cast(given.dtype, np.int64, "same_kind"):
        raise RequestError(f"request {request_id}: a prompt is text or a flat list of token ids that fit 64 bits")
    return given.astype(np.int64, copy=True)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token before temperature, and its rank (1 = most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock; counts of this request, with n > 1 added up over its completions."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    steps: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """What `LLM.generate` returns for one prompt, and `LLMEngine.step` as `SamplingParams.output_kind` asks for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: TokenIds
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry for each token of the prompt, once all are there and if they were asked for: None for the first one,
    then by token id what the model says after the tokens before: the token itself first, then the n most likely."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    digest: str | None = None
    """SHA-256 (hex) over the sampled rows' fp32 logits in order, when the engine runs with `digest=True`; with n > 1,
    that of the completions' digests, in hex and by index, of those that began."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """The request's own."""
