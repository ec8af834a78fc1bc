"""Counts of tokens, as usage reports them.

May import the tokenizer and the response structs. Invariant: the counts are the engine's own (tokens sampled, tokens
found in the cache), added up over prompts and completions, the same for streams and whole answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from longfill.engine.tokenizer import Tokenizer
from longfill.server.protocol_responses import CompletionTokensDetails, PromptTokensDetails, Usage


@dataclass(frozen=True)
class ReasoningMarks:
    """The tokens around a completion's reasoning."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ReasoningMarks | None:
        """Those of a tokenizer in which the marks are single tokens."""
        begin, end = (tokenizer.backend.token_to_id(mark) for mark in ("<think>", "</think>"))
        return None if begin is None or end is None else cls(begin, end)


class ReasoningCounter:
    """Tokens of one completion between the marks."""

    def __init__(self, marks: ReasoningMarks, *, inside: bool) -> None:
        self._marks = marks
        self._inside = inside
        self._ended = False
        self.count = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        for token in token_ids:
            if self._inside and token == self._marks.end:
                self._inside, self._ended = False, True
            elif self._inside:
                self.count += 1
            elif token == self._marks.begin and not self._ended:
                self._inside = True


def usage(
    prompt_tokens: Iterable[int], cached_tokens: Iterable[int], completion_tokens: int, reasoning_tokens: int | None
) -> Usage:
    """The object in answers; no reasoning_tokens (None) where no reasoning parser runs, or its marks are no tokens."""
    prompt = sum(prompt_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(cached_tokens)),
        completion_tokens_details=UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )
