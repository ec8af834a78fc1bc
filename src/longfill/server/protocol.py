"""Fields that bodies of more than one endpoint share, checked strictly: no conversion, no unknown field.

May import pydantic and the errors of this floor. Invariant: None means that the client did not give the field, and a
field that would have no effect is refused by name unless doing nothing is what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from longfill.server.errors import ApiError, bad_request

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in which the first wrong element is the error: a hundred thousand of them would take long to explain."""
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/-]{1,128}$")]


class Body(BaseModel):
    """Base of every request model."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


AnyBody = TypeVar("AnyBody", bound=Body)


class StreamOptions(Body):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = Field(None, description="Add a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(None, description="Usage so far in every chunk; needs include_usage")
    prefill_progress: bool | None = Field(
        None, description="Chunks with empty choices and prefill_progress while the prompt is computed"
    )


def _sendable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """What goes to the engine as it is must be able to go there."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise ValueError("integers must have at most 64 bits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


class StructuredOutputsBody(Body):
    """What the output must match; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema")
    regex: str | None = None
    choice: Items[str] | None = Field(None, description="The output is one of these")
    grammar: str | None = Field(None, description="A Lark grammar")
    json_object: bool | None = Field(None, description="Any JSON object")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("json_", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) + bool(self.json_object) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object: true")
        if self.choice is not None and not self.choice:
            raise ValueError("choice must hold at least one string")
        return self


class JsonSchemaFormat(Body):
    """OpenAI's wrapping of a schema."""

    name: str = Field(description="For people; it changes nothing")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is always enforced")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type json_schema, and only with it")
        return self


class GenerationBody(Body):
    """Fields of both completion endpoints. Ranges are those of SamplingParams."""

    model: str | None = Field(None, description="One of the names at /v1/models (default: the model that is served)")
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[
        dict[str, Any] | None, WithJsonSchema({"type": ["object", "null"], "additionalProperties": {"type": "number"}})
    ] = Field(None, description="Token id (as a string) to a number in [-100, 100]")
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens; both must agree")
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, description="Log-probabilities of the prompt's tokens; not in streams")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    priority: int | None = Field(None, description="Lower goes first, under --scheduling-policy priority")
    cache_salt: str | None = Field(None, description="Prompts share cached pages only with those of the same salt")
    kv_transfer_params: Annotated[dict[str, Any] | None, AfterValidator(_sendable)] = Field(
        None, description="Passed to whoever moves KV, and back"
    )
    return_token_ids: bool | None = None
    request_id: RequestId | None = Field(None, description="Used where the x-request-id header is not given")
    timeout: float | None = Field(None, gt=0, description="Seconds until the request is aborted and answered with 504")
    explain_prefix_cache: bool | None = Field(None, description="Say where the prefix cache's match ended, and why")
    # These ask for nothing that a server of one's own could do differently.
    user: str | None = Field(None, description="No effect")
    safety_identifier: str | None = Field(None, description="No effect")
    prompt_cache_key: str | None = Field(None, description="No effect: this server has one cache for all prompts")
    metadata: dict[str, Any] | None = Field(None, description="No effect")
    store: Literal[False] | None = Field(None, description="Nothing is stored")
    service_tier: Literal["auto", "default"] | None = Field(None, description="No effect: there is one tier")

    @model_validator(mode="after")
    def _stream_fields_in_streams(self) -> Self:
        options = self.stream_options
        if options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats needs include_usage: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs does not come in streams; drop it or set stream: false")
        if self.stream and self.explain_prefix_cache and not (options and options.include_usage):
            raise ValueError("explain_prefix_cache needs stream_options.include_usage: the last chunk carries it")
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs excludes response_format; give one of them")
        return self


_INSTEAD = "give structured_outputs"
UNSUPPORTED: Mapping[str, str] = {
    "add_special_tokens": "a chat template writes its own special tokens; drop it",
    "allowed_token_ids": "give structured_outputs or logit_bias",
    "audio": "this server gives text only; drop it",
    "bad_words": "give logit_bias",
    "best_of": "give n",
    "chat_template": "start the server with --chat-template",
    "data_parallel_rank": "there is one engine; drop it",
    "documents": "give it in chat_template_kwargs, if the template reads it",
    "early_stopping": "there is no beam search; drop it",
    "echo": "send the prompt to /v1/completions with echo",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "guided_choice": _INSTEAD,
    "guided_decoding_backend": "there is one backend; drop it",
    "guided_grammar": _INSTEAD,
    "guided_json": _INSTEAD,
    "guided_regex": _INSTEAD,
    "length_penalty": "there is no beam search; drop it",
    "logits_processors": "give logit_bias",
    "mm_processor_kwargs": "this server takes text only; drop it",
    "modalities": "this server gives text only; drop it",
    "moderation": "this server does not moderate; drop it",
    "prediction": "start the server with --speculative-config",
    "prompt_cache_options": "cached pages stay until the memory is needed; drop it",
    "prompt_cache_retention": "cached pages stay until the memory is needed; drop it",
    "prompt_embeds": "give text or token ids",
    "return_tokens_as_token_ids": "give return_token_ids",
    "spaces_between_special_tokens": "drop it",
    "suffix": "the model does not fill in the middle; drop it",
    "thinking_token_budget": "give max_tokens",
    "truncate_prompt_tokens": "a prompt is never cut; shorten it yourself (see /tokenize)",
    "use_beam_search": "there is no beam search; give n with a temperature",
    "verbosity": "give it in chat_template_kwargs, if the template reads it",
    "web_search_options": "this server does not search; drop it",
}
"""Fields of OpenAI's or vLLM's that are known here and not supported, and what to do instead."""


def validate(model: type[AnyBody], fields: Mapping[str, Any]) -> AnyBody:
    """The body as its model. Raises ApiError, naming the first field at fault.

    A field that is not supported may hold what asks for nothing: null, or what an answer is anyway.
    """
    given = {name: value for name, value in fields.items() if name not in UNSUPPORTED or not _asks_nothing(name, value)}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None


def _asks_nothing(name: str, value: Any) -> bool:
    return value is None or (name, value) in (("suffix", ""), ("modalities", ["text"]))


def _explained(error: ValidationError) -> ApiError:
    faults = sorted(error.errors(include_url=False, include_context=False), key=_rank)
    fault = faults[0]
    if _rank(fault) == _OTHER:
        # Of the members of a union, the one that came furthest says best what is wrong.
        related = [each for each in faults if each["loc"][:1] == fault["loc"][:1]]
        fault = max(related, key=lambda each: len(_path(each["loc"])))
    path = _path(fault["loc"])
    param = path[:_MOST_PARAM_CHARS]
    if fault["type"] == "extra_forbidden":
        instead = UNSUPPORTED.get(param)
        if instead is not None:
            return bad_request(f"{param} is not supported: {instead}", param=param, code="unsupported_parameter")
        return bad_request(
            f"{param} is not a field that this endpoint knows; drop it (/openapi.json lists the fields)",
            param=param,
            code="unknown_parameter",
        )
    if fault["type"] == "missing":
        return bad_request(f"{param} is required", param=param, code="missing_required_parameter")
    alternatives = dict.fromkeys(each["msg"] for each in faults if _path(each["loc"]) == path)
    words = " or ".join(message.removeprefix("Value error, ") for message in alternatives)
    if not param:  # a check of the whole object, which begins with the field's name
        param = words.partition(" ")[0].partition(".")[0]
        return bad_request(words, param=param)
    return bad_request(f"{param}: {words}", param=param)


_OTHER = 2
_MOST_PARAM_CHARS = 200
"""Of a field's name in an answer: a client may have called it anything, at any length."""


def _rank(fault: ErrorDetails) -> int:
    """A wrong kind of object first, then an unknown field: other faults may come from these."""
    if fault["loc"][-1:] == ("type",):
        return 0
    return 1 if fault["type"] == "extra_forbidden" else _OTHER


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for a pydantic location, without the members of unions that it names."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int", "float", "bool", "dict") and "[" not in part and not part[:1].isupper():
            path += f".{part}" if path else part
    return path
