"""What `bench decode` lets a model say: answers about a text, its continuation, or what follows random tokens.

May import the haystack builder and the engine's tokenizer. Invariant: prompts are a function of the plan's text, sizes
and seed, so that every setting gets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from longfill.bench.prefill import prompt as random_prompt
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError
from longfill.needle.haystack import Haystack, build_haystack
from longfill.request import TokenIds

Text = Literal["answers", "haystack", "random"]
TEXTS: tuple[Text, ...] = get_args(Text)
DESCRIPTIONS = {
    "answers": "haystack text, answers to questions about it",
    "haystack": "haystack text, continued",
    "random": "random tokens, continued: how often drafts are right on them says nothing about text",
}
"""What a report says about the text, by its name."""

_QUESTION_ROOM = 64
"""Tokens that the question behind a text takes at most; a text to be continued has none."""


def prompts(
    text: Text, tokenizer: Tokenizer | None, vocab_size: int, *, context: int, count: int, rounds: int, seed: int
) -> list[list[TokenIds]]:
    """For each round `count` prompts of `context` tokens: questions about one text, or a text each.

    Raises ConfigError for text without a tokenizer, and for a context too small for the facts asked about.
    """
    if text == "random":
        seeds = iter(range(seed, seed + rounds * count))
        return [
            [np.array(random_prompt(context, vocab_size, next(seeds)), dtype=np.int64) for _ in range(count)]
            for _ in range(rounds)
        ]
    if tokenizer is None:
        raise ConfigError(f"--text {text}: the model has no tokenizer; give --text random")
    if text == "answers":
        return [list(_questions(tokenizer, context, count, seed + turn)) for turn in range(rounds)]
    return [[_beginning(tokenizer, context, seed + turn * count + i) for i in range(count)] for turn in range(rounds)]


def _questions(tokenizer: Tokenizer, context: int, count: int, seed: int) -> Iterator[TokenIds]:
    haystack = _haystack(tokenizer, context, seed)
    if count > len(haystack.facts):
        raise ConfigError(
            f"--prompts {count}: a text of {context:,} tokens has {len(haystack.facts)} facts to ask for; ask for "
            "fewer or raise --context"
        )
    for fact in haystack.facts[:count]:
        yield tokenizer.encode(haystack.text + haystack.question(fact))


def _beginning(tokenizer: Tokenizer, context: int, seed: int) -> TokenIds:
    """The first `context` tokens of a longer text."""
    return tokenizer.encode(_haystack(tokenizer, context + _QUESTION_ROOM, seed).text)[:context]


def _haystack(tokenizer: Tokenizer, context: int, seed: int) -> Haystack:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    try:
        return build_haystack(context, seed=seed, count=count, reserve=len(tokenizer.encode("a")) - count("a"))
    except ValueError as error:
        raise ConfigError(f"--context {context:,}: {error}") from None
