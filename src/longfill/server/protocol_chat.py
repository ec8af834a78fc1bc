"""Body of /v1/chat/completions.

May import pydantic and the shared protocol. Invariant: a model holds what the client sent, checked; messages come out
of `Message.for_template` in the form that chat templates read.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec
from pydantic import Field, field_validator, model_validator

from longfill.server.protocol import Body, GenerationBody, Items

FunctionName = str


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        try:
            msgspec.json.decode(text or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a JSON object ({error}); send what the model wrote") from None
        return text


class MessageToolCall(Body):
    """A call in an assistant's message of the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as the templates' renderer takes it."""
        call: dict[str, Any] = {"type": self.type, "function": self.function.model_dump()}
        return call if self.id is None else {"id": self.id, **call}


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content")
    # What clients send back with an answer of this server, or of OpenAI's library, that says nothing to a template.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Items[Any] | None = Field(None, max_length=0)
    tool_call_errors: Items[Any] | None = Field(None, description="No effect: the text of a call that was none")

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"a part of type {kind!r:.40} is not supported; this server takes text only")
        return content

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Self:
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to messages of the assistant, not of role {self.role}")
            if self.content is None:
                raise ValueError(f"content is required with role {self.role}")
        elif not (self.tool_calls or self.tool_call_errors) and (
            self.content is None and self.reasoning_content is None and self.reasoning is None
        ):
            raise ValueError("content or tool_calls is required with role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id belongs to messages of role tool, not of role {self.role}")
        return self

    @property
    def text(self) -> str | None:
        """The content as one string; parts are joined by newlines, as vLLM joins them."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The message as the templates' renderer takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class FunctionDefinition(Body):
    """What the model is told about a function."""

    name: FunctionName = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object")
    strict: bool | None = Field(None, description="No effect on free calls; forced ones always follow the schema")


class Tool(Body):
    """A tool; functions only."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The function of a named tool choice."""

    name: FunctionName


class NamedToolChoice(Body):
    """`tool_choice` that names the function to be called."""

    type: Literal["function"]
    function: NamedFunction


class Thinking(Body):
    """The switch for reasoning that the APIs of GLM and DeepSeek have."""

    type: Literal["enabled", "disabled"]


class ChatFields(Body):
    """What makes a conversation into a prompt; /tokenize takes these too."""

    messages: Items[Message] = Field(min_length=1)
    tools: Items[Tool] | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: true, unless continue_final_message is set")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template")

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message excludes add_generation_prompt: true")
        if self.messages[-1].role != "assistant" or not self.messages[-1].text:
            raise ValueError("continue_final_message needs a last message of the assistant, with content")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_variables(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(set(given or ()) & {"messages", "tools", "add_generation_prompt", "continue_final_message"})
        if taken:
            raise ValueError(f"{taken[0]} is a field of the body, not a variable of the template")
        return given


class ChatCompletionRequest(GenerationBody, ChatFields):
    """Body of /v1/chat/completions."""

    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking: Thinking | None = None
    include_reasoning: bool | None = Field(None, description="false leaves the reasoning out of the answer")

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools must have different names")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.80}, which tools does not have")
        return self

    @property
    def called_function(self) -> str | None:
        """The function that a named tool choice wants called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None

    @property
    def must_call(self) -> bool:
        """Whether the output has to be a tool call."""
        return self.tool_choice == "required" or self.called_function is not None

    @property
    def may_call(self) -> bool:
        """Whether the output is searched for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"
