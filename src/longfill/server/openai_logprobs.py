"""Tokens and their log-probabilities, spelled as OpenAI's two endpoints spell them.

May import the tokenizer, token_bytes and the response structs. Invariant: `bytes` are the token's own where the
tokenizer has such, so that the bytes of a choice's tokens, joined, are its text; and two tokens never share a name.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property

from longfill.engine.token_bytes import token_bytes
from longfill.engine.tokenizer import Tokenizer
from longfill.request import Logprob, TokenIds
from longfill.server.protocol_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

Entry = dict[int, Logprob]
"""One position: the token itself first, then the likeliest ones."""

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; vLLM's value."""


class TokenSpeller:
    """Token ids as bytes and as strings."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; empty for an id that the tokenizer does not know."""
        if self.tokenizer is None:
            return b""
        spelled = self._spelled
        if spelled is None:  # it depends on the tokens around; the nearest is the token by itself
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return spelled[token_id] if token_id < len(spelled) else b""

    def string_of(self, token_id: int) -> str:
        """The token's name: its text, or "bytes:\\xe2\\x80" for a part of a character, as OpenAI writes it."""
        spelled = self.bytes_of(token_id)
        if not spelled:
            return f"token_id:{token_id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    @cached_property
    def _spelled(self) -> list[bytes] | None:
        return None if self.tokenizer is None else token_bytes(self.tokenizer)


def chat_logprobs(ids: Sequence[int], entries: Sequence[Entry], asked: int, speller: TokenSpeller) -> ChatLogprobs:
    """For chats; `asked` is the request's `top_logprobs`."""
    return ChatLogprobs(
        [_token_logprob(token, entry, asked, speller) for token, entry in zip(ids, entries, strict=True)]
    )


def _token_logprob(token: int, entry: Entry, asked: int, speller: TokenSpeller) -> TokenLogprob:
    top = [
        TopLogprob(speller.string_of(other), _finite(logprob), list(speller.bytes_of(other)))
        for other, logprob in _likeliest(entry, asked)
    ]
    return TokenLogprob(speller.string_of(token), _finite(entry[token]), list(speller.bytes_of(token)), top)


def _likeliest(entry: Entry, asked: int) -> list[tuple[int, Logprob]]:
    """The `asked` first by rank: the chosen token is among them only if it is that likely."""
    return sorted(
        ((t, logprob) for t, logprob in entry.items() if logprob.rank <= asked), key=lambda item: item[1].rank
    )


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)


def prompt_logprobs(entries: Sequence[Entry | None], speller: TokenSpeller) -> PromptLogprobs:
    """For the prompt, in vLLM's form."""
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(_finite(logprob), logprob.rank, speller.string_of(token))
            for token, logprob in entry.items()
        }
        for entry in entries
    ]


class CompletionLogprobList:
    """Log-probabilities of one completion in OpenAI's four lists, as its tokens come."""

    def __init__(self, speller: TokenSpeller, asked: int, *, skip_special_tokens: bool) -> None:
        self._speller = speller
        self._asked = asked
        tokenizer = speller.tokenizer
        self._skipped = tokenizer.special_token_ids if tokenizer and skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add_prompt(self, ids: TokenIds, entries: Sequence[Entry | None]) -> CompletionLogprobs:
        """The part for an echoed prompt; the first token has no log-probability."""
        return self._part(ids.tolist(), entries)

    def add(self, ids: Sequence[int], entries: Sequence[Entry]) -> CompletionLogprobs:
        """The part for new tokens."""
        return self._part(ids, entries)

    def start_at(self, offset: int) -> None:
        """The text begins with that many characters of others (an echoed prompt)."""
        self._offset = offset

    def _part(self, ids: Sequence[int], entries: Sequence[Entry | None]) -> CompletionLogprobs:
        part = CompletionLogprobs([], [], [], [])
        for token, entry in zip(ids, entries, strict=True):
            spelled = b"" if token in self._skipped else self._speller.bytes_of(token)
            if self._utf8.getstate()[0] and spelled and not 0x80 <= spelled[0] < 0xC0:
                # The character that the tokens before began stays incomplete.
                self._offset += len(self._utf8.decode(b"", final=True))
            part.text_offset.append(self._offset)
            part.tokens.append(self._speller.string_of(token))
            part.token_logprobs.append(None if entry is None else _finite(entry[token]))
            part.top_logprobs.append(None if entry is None else self._top(token, entry))
            self._offset += len(self._utf8.decode(spelled))
        return part

    def _top(self, token: int, entry: Entry) -> dict[str, float]:
        """The likeliest ones, and the token itself wherever it stands, as OpenAI has it."""
        top = dict(_likeliest(entry, self._asked))
        return {self._speller.string_of(t): _finite(logprob) for t, logprob in {**top, token: entry[token]}.items()}


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Parts of one completion as one."""
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.text_offset += part.text_offset
        whole.token_logprobs += part.token_logprobs
        whole.tokens += part.tokens
        whole.top_logprobs += part.top_logprobs
    return whole
