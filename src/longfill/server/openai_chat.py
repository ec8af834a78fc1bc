"""The answers of /v1/chat/completions, whole and streamed, from the engine's deltas.

May import the parsers and the response structs. Invariant: a stream's parts, joined, are the whole answer; what the
model wrote as a tool call and is none is reported as such, and then the choice does not finish with "tool_calls".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from msgspec import UNSET, Struct

from longfill.server.messages import CompletionDelta, OutputDelta
from longfill.server.openai_answer import AnswerHead, raise_if_failed, stream_usage
from longfill.server.openai_logprobs import Entry, TokenSpeller, chat_logprobs, prompt_logprobs
from longfill.server.openai_usage import ReasoningCounter
from longfill.server.parsers import (
    ContentText,
    Event,
    MalformedToolCall,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    PrefillProgress,
    ToolCall,
    ToolCallDelta,
    ToolCallError,
    Usage,
)


class Parser(Protocol):
    """What turns a completion's text into events."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class _Choice:
    """One completion: its parser, and all that came of it."""

    def __init__(
        self, index: int, body: ChatCompletionRequest, parser: Parser, counter: ReasoningCounter | None
    ) -> None:
        self.index = index
        self._body = body
        self._parser = parser
        self.counter = counter
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, tuple[ToolCall, list[str]]] = {}
        self.errors: list[ToolCallError] = []
        self.token_ids: list[int] = []
        self.entries: list[Entry] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._streamed = 0
        """Tokens whose log-probabilities and ids went into the stream."""
        self._role_sent = False

    def take(self, part: CompletionDelta) -> list[MessageDelta]:
        """Add new text and tokens; returns what they add to the message."""
        raise_if_failed(part)
        self.token_ids += part.token_ids
        self.entries += part.logprobs or []
        if self.counter is not None:
            self.counter.take(part.token_ids)
        events = self._parser.feed(part.text)
        if part.finish_reason is not None:
            events += self._parser.finish()
        deltas = [delta for event in events if (delta := self._add(event)) is not None]
        if part.finish_reason is not None:
            self.finish_reason = self._finish_reason(part.finish_reason)
            self.stop_reason = part.stop_reason
        return deltas

    def _add(self, event: Event) -> MessageDelta | None:
        """Add one event; returns what a stream shows of it."""
        if isinstance(event, ContentText):
            self.content.append(event.text)
            return MessageDelta(content=event.text)
        if isinstance(event, ReasoningText):
            self.reasoning.append(event.text)
            return None if self._body.include_reasoning is False else MessageDelta(reasoning_content=event.text)
        if self._body.parallel_tool_calls is False and event.index > 0:
            return None
        if isinstance(event, ToolCallStart):
            call = ToolCall(f"call_{secrets.token_hex(12)}", FunctionCall(event.name, ""))
            self.calls[event.index] = (call, [])
            function = FunctionDelta(name=event.name, arguments="")
            return MessageDelta(tool_calls=[ToolCallDelta(event.index, function, id=call.id, type="function")])
        if isinstance(event, ToolCallArguments):
            self.calls[event.index][1].append(event.text)
            return MessageDelta(tool_calls=[ToolCallDelta(event.index, FunctionDelta(arguments=event.text))])
        return self._add_error(event)

    def _add_error(self, event: MalformedToolCall) -> MessageDelta:
        self.calls.pop(event.index, None)
        self.errors.append(ToolCallError(event.index, event.text, event.why))
        return MessageDelta(tool_call_errors=self.errors[-1:])

    def _finish_reason(self, reason: str) -> FinishReason:
        if reason == "stop" and self.calls and not self.errors:
            return "tool_calls"
        return reason  # type: ignore[return-value]  # the engine's, without "error"

    def frames(
        self, deltas: Sequence[MessageDelta], logprobs: Callable[[int], ChatLogprobs | None]
    ) -> list[ChatChunkChoice]:
        """The choices of the frames that show new deltas: the role first, the finish reason last."""
        choices = [ChatChunkChoice(self.index, delta) for delta in deltas]
        if not choices and self._streamed < len(self.token_ids) and self._shows_tokens:
            choices = [ChatChunkChoice(self.index, MessageDelta())]
        if choices:
            choices[-1].logprobs = logprobs(self._streamed)
            if self._body.return_token_ids:
                choices[-1].token_ids = self.token_ids[self._streamed :]
            self._streamed = len(self.token_ids)
        if self.finish_reason is not None:
            choices.append(self._last_frame())
        if not self._role_sent and choices:
            self._role_sent = True
            choices.insert(0, ChatChunkChoice(self.index, MessageDelta(role="assistant", content="")))
        return choices

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._body.logprobs or self._body.return_token_ids)

    def _last_frame(self) -> ChatChunkChoice:
        return ChatChunkChoice(
            self.index, MessageDelta(), finish_reason=self.finish_reason, stop_reason=self.stop_reason
        )

    def message(self) -> AssistantMessage:
        """The whole message."""
        content = "".join(self.content)
        message = AssistantMessage(content if content or not (self.calls or self.errors) else None)
        if self.reasoning and self._body.include_reasoning is not False:
            message.reasoning_content = "".join(self.reasoning)
        if self.calls:
            message.tool_calls = [
                ToolCall(call.id, FunctionCall(call.function.name, "".join(arguments)))
                for _, (call, arguments) in sorted(self.calls.items())
            ]
        if self.errors:
            message.tool_call_errors = self.errors
        return message


class ChatAnswer:
    """Answer of one chat request."""

    def __init__(
        self,
        head: AnswerHead,
        body: ChatCompletionRequest,
        make_parser: Callable[[], Parser],
        make_counter: Callable[[], ReasoningCounter | None],
    ) -> None:
        self.head = head
        self._body = body
        self._make_parser = make_parser
        self._make_counter = make_counter
        self._choices: dict[int, _Choice] = {}
        """Those that have begun, by index."""
        self._ids_sent = False

    def take(self, prompt: int, delta: OutputDelta) -> Sequence[Struct]:
        """Add what came; returns the frames of a stream that show it."""
        self.head.prompts[prompt].take(delta)
        frames: list[ChatChunk] = []
        for part in delta.completions:
            self.head.completion_tokens += len(part.token_ids)
            choice = self._choice(part.index)
            deltas = choice.take(part)
            shown = choice.frames(deltas, partial(self._logprobs, choice))
            frames += [self._frame([each]) for each in shown]
        return frames

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            self._choices[index] = _Choice(index, self._body, self._make_parser(), self._make_counter())
        return self._choices[index]

    def progress(self, progress: PrefillProgress) -> Struct:
        """A frame that shows how far the prompt is."""
        frame = self._frame([])
        frame.prefill_progress = progress
        return frame

    def last(self) -> Struct:
        """The usage frame."""
        frame = self._frame([])
        frame.usage = self._usage() if self.head.includes_usage else UNSET
        frame.kv_transfer_params = self.head.kv_transfer_params
        frame.prefix_cache = self.head.prefix_cache
        return frame

    def whole(self) -> Struct:
        """The whole answer."""
        state = self.head.prompts[0]
        answer = ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[self._whole_choice(choice) for _, choice in sorted(self._choices.items())],
            usage=self._usage(),
            kv_transfer_params=self.head.kv_transfer_params,
            prefix_cache=self.head.prefix_cache,
        )
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(state.prompt_logprobs or [], self.head.speller)
        if self._body.return_token_ids:
            answer.prompt_token_ids = state.prompt.token_ids.tolist()
        return answer

    def _whole_choice(self, choice: _Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        return ChatChoice(
            index=choice.index,
            message=choice.message(),
            logprobs=self._logprobs(choice, 0),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _frame(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        frame = ChatChunk(self.head.id, self.head.created, self.head.model, choices)
        frame.usage = stream_usage(self.head, self._usage)
        if self._body.return_token_ids and choices and not self._ids_sent:
            self._ids_sent = True
            frame.prompt_token_ids = self.head.prompts[0].prompt.token_ids.tolist()
        return frame

    def _logprobs(self, choice: _Choice, start: int) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        speller: TokenSpeller = self.head.speller
        ids, entries = choice.token_ids[start : len(choice.entries)], choice.entries[start:]
        return chat_logprobs(ids, entries, self._body.top_logprobs or 0, speller)

    def _usage(self) -> Usage:
        counters = [choice.counter for choice in self._choices.values() if choice.counter is not None]
        return self.head.usage(sum(counter.count for counter in counters) if counters else None)
