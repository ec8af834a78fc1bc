"""The answers of /v1/completions, whole and streamed, from the engine's deltas.

May import the response structs. Invariant: choices are numbered prompt by prompt (choice p * n + i is completion i of
prompt p), and a stream's parts, joined, are the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct

from longfill.server.messages import CompletionDelta, OutputDelta
from longfill.server.openai_answer import AnswerHead, PromptState, raise_if_failed, stream_usage
from longfill.server.openai_logprobs import CompletionLogprobList, joined, prompt_logprobs
from longfill.server.protocol_completion import CompletionRequest
from longfill.server.protocol_responses import Completion, CompletionChoice, CompletionLogprobs, PrefillProgress
from longfill.server.sampling import scores_prompt_only


class _Choice:
    """One completion and all that came of it."""

    def __init__(self, index: int, body: CompletionRequest, head: AnswerHead, state: PromptState) -> None:
        self.index = index
        self._body = body
        self._head = head
        self._state = state
        self._prompt_only = scores_prompt_only(body)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[CompletionLogprobs] = []
        self._list = CompletionLogprobList(
            head.speller, body.logprobs or 0, skip_special_tokens=state.params.skip_special_tokens
        )
        self._begun = False
        self.last: CompletionChoice | None = None
        """With the finish reason, once it is known."""

    def take(self, part: CompletionDelta) -> list[CompletionChoice]:
        """Add new text and tokens; returns the choices of the frames that show them."""
        raise_if_failed(part)
        shown = [] if self._begun or not self._body.echo else [self._echo()]
        if not self._begun and self._body.return_token_ids:
            shown = shown or [CompletionChoice(self.index, "")]
            shown[0].prompt_token_ids = self._state.prompt.token_ids.tolist()
        self._begun = True
        if not self._prompt_only and (part.token_ids or part.text):
            shown += self._add(part)
        if part.finish_reason is not None:
            reason = "length" if self._prompt_only else part.finish_reason
            stop_reason = None if self._prompt_only else part.stop_reason
            self.last = CompletionChoice(self.index, "", finish_reason=reason, stop_reason=stop_reason)  # type: ignore[arg-type]
            shown.append(self.last)
        return shown

    def _echo(self) -> CompletionChoice:
        text = self._state.prompt.text or ""
        self._texts.append(text)
        choice = CompletionChoice(self.index, text)
        if self._body.logprobs is not None:
            entries = self._state.prompt_logprobs or [None] * self._state.prompt.token_ids.size
            choice.logprobs = self._list.add_prompt(self._state.prompt.token_ids, entries)
            self._logprobs.append(choice.logprobs)
        self._list.start_at(len(text))
        return choice

    def _add(self, part: CompletionDelta) -> list[CompletionChoice]:
        self._texts.append(part.text)
        self._token_ids += part.token_ids
        choice = CompletionChoice(self.index, part.text)
        if part.logprobs is not None and self._body.logprobs is not None:
            choice.logprobs = self._list.add(part.token_ids, part.logprobs)
            self._logprobs.append(choice.logprobs)
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
        shows = part.text or choice.logprobs is not None or self._body.return_token_ids
        return [choice] if shows else []

    def whole(self) -> CompletionChoice:
        """All of it."""
        assert self.last is not None
        choice = CompletionChoice(
            self.index,
            "".join(self._texts),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
        )
        if self._body.logprobs is not None:
            choice.logprobs = joined(self._logprobs)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._state.prompt_logprobs or [], self._head.speller)
        if self._body.return_token_ids:
            choice.prompt_token_ids = self._state.prompt.token_ids.tolist()
            choice.token_ids = self._token_ids
        return choice


class CompletionAnswer:
    """Answer of one completion request."""

    def __init__(self, head: AnswerHead, body: CompletionRequest) -> None:
        self.head = head
        self._prompt_only = scores_prompt_only(body)
        self._body = body
        self._choices: dict[int, _Choice] = {}
        """Those that have begun, by index."""

    def take(self, prompt: int, delta: OutputDelta) -> Sequence[Struct]:
        """Add what came; returns the frames of a stream that show it."""
        self.head.prompts[prompt].take(delta)
        frames = []
        for part in delta.completions:
            self.head.completion_tokens += 0 if self._prompt_only else len(part.token_ids)
            shown = self._choice(prompt, part.index).take(part)
            frames += [self._frame([choice]) for choice in shown]
        return frames

    def _choice(self, prompt: int, completion: int) -> _Choice:
        index = prompt * self.head.n + completion
        if index not in self._choices:
            self._choices[index] = _Choice(index, self._body, self.head, self.head.prompts[prompt])
        return self._choices[index]

    def progress(self, progress: PrefillProgress) -> Struct:
        """A frame that shows how far the prompts are."""
        frame = self._frame([])
        frame.prefill_progress = progress
        return frame

    def last(self) -> Struct:
        """The usage frame."""
        frame = self._frame([])
        frame.usage = self.head.usage() if self.head.includes_usage else UNSET
        frame.kv_transfer_params = self.head.kv_transfer_params
        frame.prefix_cache = self.head.prefix_cache
        return frame

    def whole(self) -> Struct:
        """The whole answer."""
        answer = self._completion([choice.whole() for _, choice in sorted(self._choices.items())])
        answer.usage = self.head.usage()
        answer.kv_transfer_params = self.head.kv_transfer_params
        answer.prefix_cache = self.head.prefix_cache
        return answer

    def _frame(self, choices: list[CompletionChoice]) -> Completion:
        frame = self._completion(choices)
        frame.usage = stream_usage(self.head, self.head.usage)
        return frame

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self.head.id, self.head.created, self.head.model, choices)
