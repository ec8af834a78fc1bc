"""The needle question as the commands ask it: exact prompt length, greedy answer, strict scoring.

Imports the haystack builder. Invariant: an answer is right only if it is the digits of the code and then the end of
the text, nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from longfill.cli.session import tokenizer_of
from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.needle.haystack import CODE_DIGITS, Fact, Haystack, build_haystack
from longfill.request import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from longfill.engine.llm import LLM

ANSWER_TOKENS = CODE_DIGITS + 3
"""Room for the answer: the digits, the end of the text, and enough more to show that an answer ran on."""

ANSWER_PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)


def sized_for(engine: EngineArgs, contexts: Iterable[int]) -> EngineArgs:
    """`engine` with `max_model_len` just large enough for prompts of these lengths and their answers.

    Raises ConfigError for a length beyond the model's (or the given) limit.
    """
    longest = max(contexts)
    limit = engine.max_model_len or model_limit(engine)
    if longest > limit:
        owner = "the model's" if engine.max_model_len is None else "--max-model-len, here"
        raise ConfigError(f"a context of {longest:,} tokens is longer than {owner} {limit:,}; ask for a shorter one")
    return dataclasses.replace(engine, max_model_len=engine.max_model_len or min(longest + ANSWER_TOKENS, limit))


def model_limit(engine: EngineArgs) -> int:
    """The longest context of the model, read from its config.json alone."""
    from longfill.models.config import ModelConfig
    from longfill.models.hub import resolve_model

    folder = resolve_model(engine.model, engine.revision)
    return ModelConfig.from_folder(folder, engine.hf_overrides).max_position_embeddings


def text_with_facts(
    llm: LLM, context: int, *, seed: int, facts: int | None = None, depth: float | None = None
) -> Haystack:
    """A text whose prompts are `context` tokens long; the first fact stands at `depth` if that is given.

    Only where the context is all that the model takes, the prompt is shorter by the answer's few tokens.
    """
    tokenizer = tokenizer_of(llm)
    prompt_tokens = min(context, llm.memory.max_model_len - ANSWER_TOKENS)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    added = len(tokenizer.encode("a")) - count("a")
    try:
        return build_haystack(prompt_tokens, seed=seed, count=count, reserve=added, facts=facts, depth=depth)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def prompt_for(haystack: Haystack, fact: Fact) -> str:
    """The whole prompt that asks for one fact."""
    return haystack.text + haystack.question(fact)


def is_exact(output: RequestOutput, fact: Fact) -> bool:
    """Strict scoring: the exact digits, then the end of the text."""
    completion = output.outputs[0]
    return completion.text.strip() == fact.code and completion.finish_reason == FinishReason.STOP
