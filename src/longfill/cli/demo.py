"""`longfill demo`: hide a fact in a long text, prefill it in front of the user's eyes, ask for the fact.

Imports the needle task and the session. Invariant: exit code 0 only for the exact answer.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from longfill.cli.console import duration, print_json, stdout
from longfill.cli.flags import JsonFlag, engine_flags
from longfill.cli.needle_task import ANSWER_PARAMS, is_exact, prompt_for, sized_for, text_with_facts
from longfill.cli.session import generate, open_engine, report
from longfill.config import EngineArgs
from longfill.units import PageSize, pages_for


@engine_flags(positional_model=False, seed="Seed of the text")
def demo(
    engine: EngineArgs,
    context: Annotated[int, typer.Option(help="Length of the prompt in tokens", min=1)] = 131_072,
    depth: Annotated[
        float | None,
        typer.Option(help="Where the fact stands: 0 start, 1 end (default: drawn from the seed)", min=0.0, max=1.0),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Hide a fact in a long text and ask the bundled model for it."""
    llm = open_engine(_one_request(sized_for(engine, [context])))
    haystack = text_with_facts(llm, context, seed=engine.seed, depth=depth)
    fact = haystack.facts[0]
    started = time.monotonic()
    [output] = generate(llm, [prompt_for(haystack, fact)], ANSWER_PARAMS)
    correct = is_exact(output, fact)
    values = report(llm, output) | {
        "question": haystack.chat_question(fact).strip(),
        "expected": fact.code,
        "correct": correct,
        "context": context,
        "depth": fact.depth,
        "seed": engine.seed,
        "facts": len(haystack.facts),
        "seconds": time.monotonic() - started,
    }
    if as_json:
        print_json(values)
    else:
        _show(values, stdout())
    return 0 if correct else 1


def _one_request(engine: EngineArgs) -> EngineArgs:
    """`engine` with no more pages than the demo's one request and the null page need, unless told otherwise."""
    if engine.num_gpu_blocks_override is not None or engine.max_model_len is None:
        return engine
    pages = pages_for(engine.max_model_len, PageSize(engine.block_size)) + 1
    return dataclasses.replace(engine, num_gpu_blocks_override=pages)


def _show(values: dict[str, Any], console: Console) -> None:
    verdict = "[bold green]RIGHT[/]" if values["correct"] else "[bold red]WRONG[/]"
    speed = values["prefill_tokens_per_s"]
    rows = [
        ("text", f"{values['prompt_tokens']:,} tokens with {values['facts']:,} facts (seed {values['seed']})"),
        ("question", f"{values['question']}  [stated at depth {values['depth']:.0%}]"),
        ("expected", values["expected"]),
        ("answer", values["text"].strip() or "(nothing)"),
    ]
    console.print()
    for name, text in rows:
        console.print(f"{name:<10}[bold]{escape(text)}[/]")
    rate = f", {speed:,.0f} prompt tokens/s" if speed is not None else ""
    console.print(f"{verdict} after {duration(values['seconds'])} in {values['steps']} steps{rate}")
