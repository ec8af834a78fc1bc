"""`longfill eval needle`: how often a model finds a fact, for several context lengths, over texts and depths.

Imports the needle task and the session. Invariant: what is printed counts exact answers only, and every question asked
is one trial.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from longfill.cli.console import duration, print_json, stderr, stdout
from longfill.cli.flags import JsonFlag, engine_flags
from longfill.cli.needle_task import ANSWER_PARAMS, is_exact, prompt_for, sized_for, text_with_facts
from longfill.cli.session import generate, open_engine, peak_rss_bytes
from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.needle.haystack import Fact, Haystack
from longfill.request import RequestOutput

if TYPE_CHECKING:
    from longfill.engine.llm import LLM

DEPTH_BANDS = 5


@dataclass(frozen=True)
class Trial:
    """One question with its answer."""

    seed: int
    fact: Fact
    answer: str
    exact: bool
    prompt_tokens: int
    cached_tokens: int


@engine_flags(seed="Seed of the first text; each further text takes the next one")
def needle(
    engine: EngineArgs,
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas")] = "4096,32768,131072",
    trials: Annotated[int, typer.Option(help="Questions for each length", min=1)] = 50,
    facts: Annotated[
        int | None, typer.Option(help="Facts in a text (default: one in 128 tokens, 8 to 1,024)", min=1)
    ] = None,
    questions_per_text: Annotated[
        int, typer.Option(help="Questions over one text, which share its KV through the prefix cache", min=1)
    ] = 10,
    as_json: JsonFlag = False,
) -> int:
    """Ask for hidden facts and count the exact answers."""
    lengths = parse_contexts(contexts)
    llm = open_engine(sized_for(engine, lengths))
    results = []
    for context in lengths:
        started = time.monotonic()
        done: list[Trial] = []
        while len(done) < trials:
            seed = engine.seed + _texts(done)
            haystack = text_with_facts(llm, context, seed=seed, facts=facts)
            asked = spread_over_depths(haystack.facts, min(questions_per_text, trials - len(done)))
            done += ask(llm, haystack, asked, seed=seed)
            right = sum(trial.exact for trial in done)
            stderr().print(f"{context:,} tokens: {right} of {len(done)} exact so far")
        results.append(summary(context, done, time.monotonic() - started))
    if as_json:
        print_json(results)
    else:
        _show(results, stdout())
    return 0


def parse_contexts(text: str) -> list[int]:
    """`"4096,32768"` -> [4096, 32768]; raises ConfigError on anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--contexts: expected token counts such as 4096,32768, got {text!r}")
    return [int(part) for part in parts]


def spread_over_depths(facts: tuple[Fact, ...], count: int) -> list[Fact]:
    """At most `count` of the facts, evenly spread from the first in the text to the last."""
    ordered = sorted(facts, key=lambda fact: fact.depth)
    if count >= len(ordered):
        return ordered
    return [ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count)]


def ask(llm: LLM, haystack: Haystack, facts: list[Fact], *, seed: int) -> list[Trial]:
    """One question per fact. The first goes alone, so that the others find the text's pages in the prefix cache."""
    prompts = [prompt_for(haystack, fact) for fact in facts]
    outputs = generate(llm, prompts[:1], ANSWER_PARAMS)
    if prompts[1:]:
        outputs += generate(llm, prompts[1:], ANSWER_PARAMS)
    return [_trial(seed, fact, output) for fact, output in zip(facts, outputs, strict=True)]


def summary(context: int, trials: list[Trial], seconds: float) -> dict[str, Any]:
    """One context length as `--json` prints it."""
    bands: list[dict[str, Any]] = []
    for band in range(DEPTH_BANDS):
        within = [trial for trial in trials if _band(trial.fact.depth) == band]
        bands.append(
            {
                "depth_from": band / DEPTH_BANDS,
                "depth_to": (band + 1) / DEPTH_BANDS,
                "trials": len(within),
                "exact": sum(trial.exact for trial in within),
            }
        )
    return {
        "context": context,
        "trials": len(trials),
        "exact": sum(trial.exact for trial in trials),
        "texts": _texts(trials),
        "prompt_tokens": sum(trial.prompt_tokens for trial in trials),
        "cached_tokens": sum(trial.cached_tokens for trial in trials),
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "by_depth": bands,
        "wrong": [
            {
                "seed": trial.seed,
                "name": trial.fact.name,
                "depth": trial.fact.depth,
                "expected": trial.fact.code,
                "answer": trial.answer,
            }
            for trial in trials
            if not trial.exact
        ],
    }


def _trial(seed: int, fact: Fact, output: RequestOutput) -> Trial:
    return Trial(
        seed=seed,
        fact=fact,
        answer=output.outputs[0].text,
        exact=is_exact(output, fact),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
    )


def _texts(trials: list[Trial]) -> int:
    return len({trial.seed for trial in trials})


def _band(depth: float) -> int:
    return min(DEPTH_BANDS - 1, int(depth * DEPTH_BANDS))


def _show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Exact answers", title_justify="left", box=None, padding=(0, 1))
    for column in ("context", "exact", "texts", "time"):
        table.add_column(column, justify="right")
    for band in range(DEPTH_BANDS):
        table.add_column(f"{band / DEPTH_BANDS:.0%}-{(band + 1) / DEPTH_BANDS:.0%}", justify="right")
    for result in results:
        table.add_row(
            f"{result['context']:,}",
            f"{result['exact']}/{result['trials']}",
            str(result["texts"]),
            duration(result["seconds"]),
            *(f"{band['exact']}/{band['trials']}" if band["trials"] else "-" for band in result["by_depth"]),
        )
    console.print(table)
