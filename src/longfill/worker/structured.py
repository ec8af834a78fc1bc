"""Structured outputs: which tokens a request's form (JSON schema, regular expression, grammar...) allows next.

May import request, errors, NumPy and llguidance. Invariant: what is allowed is a function of the form and the output
tokens before a row alone: not of how often, or in how many steps, they were sampled.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property

import llguidance
import numpy as np
import numpy.typing as npt

from longfill.errors import RequestError
from longfill.request import StructuredOutputsParams

_MAX_FORM_CHARS = 128 * 1024
"""OpenAI's limit, about. Compilation grows with the square of the length and holds up the steps of all: here for a few
tenths of a second, at eight times the length for ten seconds."""

_MAX_CHOICES = 2000
"""More alternatives than llguidance keeps apart at a time."""
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=50_000)
"""Compilation grows with the square of a form's names and texts; this much takes about a second."""


class OutputForm:
    """Where one request's output stands in its form. Rows name, by output index, the outputs that they see."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._count = 0
        """Outputs so far."""
        self._held = 0
        """Of these, outputs that the matcher took: none behind the end of the form."""

    def append(self, token_id: int) -> None:
        """Take one more output."""
        if (
            self._held == self._count
            and not self._matcher.is_stopped()
            and self._matcher.try_consume_tokens([token_id])
        ):
            self._held += 1
        self._count += 1

    def truncate(self, num_output_tokens: int) -> None:
        """Forget the outputs behind the first `num_output_tokens`. Raises ValueError if it does not know so many."""
        if num_output_tokens > self._count:
            raise ValueError(f"a row sees {num_output_tokens} outputs, but the form has only {self._count}")
        if num_output_tokens < self._held:
            self._matcher.rollback(self._held - num_output_tokens)
            self._held = num_output_tokens
        self._count = num_output_tokens

    def allowed(self) -> npt.NDArray[np.bool_] | str:
        """bool [V]: tokens that may follow, eos where the form may end here; or why that cannot be said."""
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed_V = np.zeros(self._vocab_size, np.bool_)
            found = np.unpackbits(bits, bitorder="little", count=min(self._vocab_size, 8 * bits.size))
            allowed_V[: found.size] = found
            if not self._matcher.is_error():
                return allowed_V
        return f"structured_outputs: {' '.join(self._matcher.get_error().split())[:300]}"


class StructuredOutputs:
    """Forms over one tokenizer: `token_bytes` gives the bytes of each token id, or None where there are none.

    `encode` turns text into ids; `special_token_ids` are tokens that no form allows (but those of `eos_token_ids`,
    which end it).
    """

    def __init__(
        self,
        token_bytes: Callable[[], list[bytes] | None],
        *,
        encode: Callable[[str], Sequence[int]],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._token_bytes = token_bytes
        self._encode = encode
        self._special = special_token_ids
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._vocab_size = vocab_size

    def validate(self, params: StructuredOutputsParams) -> None:
        """Raise RequestError, saying why, for a form that cannot be honoured; within tenths of a second."""
        if (count := len(params.choice or ())) > _MAX_CHOICES:
            raise RequestError(f"structured_outputs: choice holds {count:,} texts; at most {_MAX_CHOICES:,} are taken")
        grammar = _grammar(params)
        if len(grammar) > _MAX_FORM_CHARS:
            raise RequestError(
                f"structured_outputs: the form has {len(grammar):,} characters; at most {_MAX_FORM_CHARS:,} are taken"
            )
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer, limits=_LIMITS)
        if failed or messages:
            # What llguidance warns of (a keyword of a schema that it passes over) would be ignored in silence.
            field = next(f.name for f in fields(params) if getattr(params, f.name) not in (None, False))
            raise RequestError(f"structured_outputs.{field}: {' '.join(' '.join(messages).split())[:1000]}")
        begins = self._form(grammar).allowed()
        if isinstance(begins, str):  # it can be read, but no output has it
            raise RequestError(begins)

    def begin(self, params: StructuredOutputsParams, output_token_ids: Sequence[int] = ()) -> OutputForm:
        """The form of a request that has these outputs."""
        form = self._form(_grammar(params))
        for token_id in output_token_ids:
            form.append(token_id)
        return form

    def _form(self, grammar: str) -> OutputForm:
        return OutputForm(llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS), self._vocab_size)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        spelled = self._token_bytes()
        if spelled is None:
            raise RequestError(
                "structured_outputs: this model's tokenizer spells a token differently beside other tokens, so no form "
                "can be held to its bytes; drop structured_outputs and response_format"
            )
        if not self._eos:
            raise RequestError("structured_outputs: the model has no eos token, so an output could not end")
        wrapped = llguidance.TokenizerWrapper(
            _Vocabulary(spelled[: self._vocab_size], self._special, self._eos[0], self._encode)
        )
        return llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._eos)


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special: Sequence[int], eos: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = eos
        self._encode = encode
        unusable = {*special, eos}
        self._ids = {token: index for index, token in enumerate(tokens) if token and index not in unusable}
        self._width = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids that spell `text` byte for byte: the tokenizer's own where they do, else the longest that fit."""
        wanted = text.encode() if isinstance(text, str) else text
        ids = list(self._encode(wanted.decode("utf-8", "replace")))
        if b"".join(self.tokens[index] if index < len(self.tokens) else b"" for index in ids) == wanted:
            return ids
        # What llguidance gets here it forces on the output, whose bytes must then be those of the form.
        return self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        """The longest token at each place; stops where none fits."""
        ids, at = [], 0
        while at < len(text):
            found = (self._ids.get(text[at:end]) for end in range(min(at + self._width, len(text)), at, -1))
            token = next((index for index in found if index is not None), None)
            if token is None:
                break
            ids.append(token)
            at += len(self.tokens[token])
        return ids


def _grammar(params: StructuredOutputsParams) -> str:
    """The form in llguidance's language. Raises RequestError for a schema that is no JSON."""
    matcher = llguidance.LLMatcher
    if params.json_object:
        return matcher.grammar_from_json_schema('{"type": "object"}')
    if params.choice is not None:
        # A JSON string is a Lark string.
        return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return matcher.grammar_from_lark(params.grammar)
    try:
        return matcher.grammar_from_json_schema(params.json or "")
    except ValueError as error:
        raise RequestError(f"structured_outputs: json is not a JSON schema: {error}") from None
