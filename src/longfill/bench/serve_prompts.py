"""Prompts of a known number of tokens: random token ids, or random words that the server has been asked about.

Imports NumPy. Invariant: no two prompts of a run share more than the prefix that was asked for, and the number of
tokens is the server's own count, not a guess.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfill.bench.serve_plan import Job
from longfill.errors import ConfigError

PREFIX, BODY = 1, 2
"""Streams of random numbers, by what they are for; `Workload` has 0."""

FIRST_WORD = "the"
CANDIDATES = """
river market tower garden bridge valley forest castle village library lake station island letter map boat key stone
clock doctor judge captain old small large heavy new broken clean dark warm cold narrow tall green red blue white
yellow round empty full carried found lost painted sold bought moved morning evening winter summer spring night week
month year steps miles days trees houses pages of and to in is for that with on as was by at from this be are have
not or his her they one all had when there which we can out other were time if will more no some two like has made
first any people water long most down did get come may part over name place back way well
""".split()  # noqa: SIM905 (a list of 130 strings is a screen of quotes)
"""Common words: in most vocabularies each is one token after a space, and the server is asked which are."""
LEAST_WORDS = 16


@dataclass(frozen=True)
class TokenIds:
    """Prompts of random ids below the size of the vocabulary."""

    vocab_size: int
    added: int = 0
    """Tokens that the server adds to every prompt."""
    name: str = "random token ids"

    def make(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` of them."""
        return [int(token) for token in rng.integers(self.vocab_size, size=count)]

    def join(self, parts: Sequence[list[int]]) -> list[int]:
        """One prompt."""
        return [token for part in parts for token in part]


@dataclass(frozen=True)
class Words:
    """Prompts of random words that are one token each to this server."""

    words: Sequence[str]
    added: int
    """Tokens that the server's template adds to every prompt."""
    name: str = "random words"

    def make(self, rng: np.random.Generator, count: int) -> list[str]:
        """`count` of them."""
        return [self.words[place] for place in rng.integers(len(self.words), size=count)]

    def join(self, parts: Sequence[list[str]]) -> str:
        """One prompt. It starts with the word that the server was asked about: the first has no space before it."""
        words = [word for part in parts for word in part]
        return " ".join([FIRST_WORD, *words[1:]])


PromptMaker = TokenIds | Words


def make_prompt(maker: PromptMaker, job: Job, prefix_len: int, seed: int) -> Any:
    """The prompt of a request: as many tokens as it says, of which `prefix_len` are those of all others too."""
    prefix = np.random.default_rng([seed, PREFIX])
    own = np.random.default_rng([seed, BODY, job.number])
    parts: list[Any] = [maker.make(prefix, prefix_len), maker.make(own, job.input_len - prefix_len)]
    return maker.join(parts)


async def ask_for_words(count: Callable[[str], Awaitable[int]]) -> Words:
    """The words of `CANDIDATES` that are one token each by the server's `count` of a prompt's tokens.

    A group of words costs as many tokens as it has words only if each of them is one token, so groups are asked about
    whole and halved only where that fails. Raises ConfigError where there are too few.
    """
    nothing = await count(FIRST_WORD)
    known: list[str] = []
    groups = [CANDIDATES]
    while groups:
        group = groups.pop()
        if await count(" ".join([FIRST_WORD, *group])) - nothing == len(group):
            known += group
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
    if len(known) < LEAST_WORDS:
        raise ConfigError(
            f"only {len(known)} common words are one token to this server, too few for prompts of a known length; "
            "use --endpoint /v1/completions with --vocab-size, which sends token ids"
        )
    return Words(sorted(known), nothing - 1)
