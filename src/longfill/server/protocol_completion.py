"""Bodies of /v1/completions, /tokenize and /detokenize.

May import pydantic, NumPy and the shared protocol. Invariant: token ids come as int64 arrays, read from the body's JSON
in short pieces beforehand (`prompts.read_prompt`), since a list of a million integers would hold the interpreter.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, SkipValidation, WithJsonSchema, model_validator

from longfill.request import TokenIds
from longfill.server.protocol import Body, GenerationBody
from longfill.server.protocol_chat import ChatFields

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string"}

Prompts = Annotated[
    SkipValidation[list[str | TokenIds]],
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Ids = Annotated[SkipValidation[TokenIds], WithJsonSchema(_IDS)]


class CompletionRequest(GenerationBody):
    """Body of /v1/completions."""

    prompt: Prompts = Field(description="A text, texts, token ids, or lists of token ids")
    echo: bool | None = Field(
        None, description="Begin the text with the prompt; with logprobs also those of the prompt"
    )
    logprobs: int | None = None
    best_of: int | None = Field(None, description="Only with the value of n")
    add_special_tokens: bool | None = Field(None, description="Whether a text gets what the tokenizer puts around one")

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is supported only with the value of n; drop it and give n")
        if self.explain_prefix_cache and len(self.prompt) > 1:
            raise ValueError("explain_prefix_cache explains one prompt; send several prompts one by one")
        return self


class TokenizePrompt(Body):
    """Body of /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    """Body of /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids


def tokenize_model(fields: dict[str, Any]) -> type[TokenizePrompt] | type[TokenizeChat]:
    """Which of the two bodies of /tokenize this is."""
    return TokenizeChat if "messages" in fields else TokenizePrompt
