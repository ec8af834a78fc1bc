"""What distinguishes the two completion endpoints: how a body becomes prompts, and deltas an answer.

May import the protocol, prompts, sampling and answers. Invariant: `read` and `prepare` run in threads, check everything
that is cheap before they tokenise, and raise ApiError for a body that cannot be served as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from longfill.request import SamplingParams, TokenIds
from longfill.server.errors import bad_request
from longfill.server.openai_answer import Answer, AnswerHead
from longfill.server.openai_chat import ChatAnswer, Parser
from longfill.server.openai_completions import CompletionAnswer
from longfill.server.openai_forced_calls import NamedCall, RequiredCalls
from longfill.server.openai_model import ServedModel
from longfill.server.openai_usage import ReasoningCounter, ReasoningMarks
from longfill.server.parsers import make_parser, starts_in_reasoning
from longfill.server.prompts import Prompt, read_body, read_prompts
from longfill.server.protocol import GenerationBody, validate
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_completion import CompletionRequest
from longfill.server.sampling import sampling_params, with_room
from longfill.server.structured import form_field


@dataclass(frozen=True)
class Prepared:
    """A request that can go to the engine."""

    prompts: list[tuple[Prompt, SamplingParams]]
    answer: Callable[[AnswerHead], Answer]


@dataclass(frozen=True)
class Parsed:
    """A body that was checked, and the work that is left to make prompts of it."""

    body: GenerationBody
    prepare: Callable[[], Prepared]


class Endpoint(Protocol):
    """One of the two."""

    id_prefix: str

    def read(self, body: bytes) -> Parsed:
        """Check a body."""
        ...


class CompletionEndpoint:
    """/v1/completions."""

    id_prefix = "cmpl-"

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def read(self, body: bytes) -> Parsed:
        """Check a body."""
        fields = read_body(body)
        if "prompt" in fields:
            fields["prompt"] = read_prompts(fields["prompt"], self._model.vocab_size)
        request = validate(CompletionRequest, fields)
        self._model.check_name(request.model)
        params = sampling_params(request, self._model.defaults, self._model.limits)
        if not request.prompt:
            raise bad_request("prompt is an empty list; give at least one prompt", param="prompt")
        self._model.check_text_needs(params)
        return Parsed(request, lambda: self._prepare(request, params))

    def _prepare(self, request: CompletionRequest, params: SamplingParams) -> Prepared:
        self._model.check_form(params.structured_outputs, form_field(request))
        return Prepared(
            [self._prompt(request, given, params) for given in request.prompt],
            lambda head: CompletionAnswer(head, request),
        )

    def _prompt(
        self, request: CompletionRequest, given: str | TokenIds, params: SamplingParams
    ) -> tuple[Prompt, SamplingParams]:
        prompter = self._model.prompter
        if isinstance(given, str):
            wraps = request.add_special_tokens is not False
            prompt = prompter.encode(given, add_special_tokens=wraps, param="prompt")
        else:
            text = None
            if request.echo and prompter.tokenizer is not None:
                text = prompter.tokenizer.decode(given, skip_special_tokens=params.skip_special_tokens)
            prompt = Prompt(given, text)
        limited = request.max_tokens is not None or request.max_completion_tokens is not None
        room = with_room(params, prompt.token_ids.size, self._model.max_model_len, given=limited, param="prompt")
        return prompt, room


class ChatEndpoint:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def read(self, body: bytes) -> Parsed:
        """Check a body."""
        fields = read_body(body)
        request = validate(ChatCompletionRequest, fields)
        self._model.check_name(request.model)
        params = sampling_params(request, self._model.defaults, self._model.limits)
        self._model.check_text_needs(params)
        if request.may_call and not request.must_call and self._model.tool_format is None:
            raise bad_request(
                "tools: no format of tool calls is known for this model; name one with --tool-call-parser, or set "
                "tool_choice to 'required' or to a function",
                param="tools",
            )
        if request.may_call and not request.must_call and not self._model.prompter.templates.takes("tools"):
            raise bad_request(
                "tools: the model's chat template does not show them to the model; drop them, start the server with a "
                "--chat-template that does, or set tool_choice to 'required' or to a function",
                param="tools",
            )
        variables = self._variables(request, constrained=params.structured_outputs is not None)
        return Parsed(request, lambda: self._prepare(request, params, variables))

    def _prepare(self, request: ChatCompletionRequest, params: SamplingParams, variables: dict[str, Any]) -> Prepared:
        model = self._model
        model.check_form(params.structured_outputs, form_field(request))
        prompt = model.prompter.chat(request, variables)
        limited = request.max_tokens is not None or request.max_completion_tokens is not None
        reasoning = model.reasoning_format
        inside = reasoning is not None and starts_in_reasoning(reasoning, prompt.text or "")
        if params.structured_outputs is not None:
            if inside:
                raise bad_request(
                    "the chat template leaves the model inside its reasoning, where an output cannot have a form; "
                    "switch thinking off, or drop the form",
                    param="chat_template_kwargs",
                )
            reasoning = None
        if model.tags_are_special and (reasoning is not None or request.may_call):
            params = replace(params, skip_special_tokens=False)  # the parsers have to see them
        room = with_room(params, prompt.token_ids.size, model.max_model_len, given=limited, param="messages")
        marks = ReasoningMarks.of(model.prompter.need_tokenizer("messages")) if reasoning else None
        return Prepared(
            [(prompt, room)],
            lambda head: ChatAnswer(
                head,
                request,
                lambda: self._parser(request, reasoning, inside=inside),
                lambda: None if marks is None else ReasoningCounter(marks, inside=inside),
            ),
        )

    def _parser(self, request: ChatCompletionRequest, reasoning: str | None, *, inside: bool) -> Parser:
        if request.called_function is not None:
            return NamedCall(request.called_function)
        if request.must_call:
            return RequiredCalls()
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if request.may_call else None
        return make_parser(
            tool_format=self._model.tool_format if tools else None,
            reasoning_format=reasoning,
            tools=tools,
            starts_in_reasoning=inside,
        )

    def _variables(self, request: ChatCompletionRequest, *, constrained: bool) -> dict[str, Any]:
        """What the switches for reasoning mean to the template."""
        given, effort = request.chat_template_kwargs or {}, request.reasoning_effort
        takes = self._model.prompter.templates.takes
        thinks: bool | None = None
        if request.thinking is not None:
            thinks = request.thinking.type == "enabled"
        elif effort == "none":
            thinks = False
        switches = [name for name in ("enable_thinking", "thinking") if takes(name)]
        if thinks is not None and not switches:
            name = "thinking" if request.thinking is not None else "reasoning_effort"
            raise bad_request(f"{name}: the chat template of this model has no switch for it; drop it", param=name)
        if thinks is None and constrained and not set(switches) & set(given):
            thinks = False  # a form holds from the first token on, which leaves no room for reasoning
        variables: dict[str, Any] = {} if thinks is None else dict.fromkeys(switches, thinks)
        if effort not in (None, "none"):
            if not takes("reasoning_effort"):
                raise bad_request(
                    "reasoning_effort: the chat template of this model does not read it; drop it, or switch thinking "
                    "with chat_template_kwargs",
                    param="reasoning_effort",
                )
            variables["reasoning_effort"] = effort
        return variables
