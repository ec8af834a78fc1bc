"""`longfill bench decode`: what steps in flight hide and what drafts bring, for the same prompts and outputs.

Imports the benchmark when it is run. Invariant: no figure is printed unless all settings said the same tokens, and the
report says what text it was.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longfill.cli.bench import PlotFlag, benchmark_model, check_plot, finish, parse_counts
from longfill.cli.console import stderr
from longfill.cli.flags import KNOBS, JsonFlag, engine_flags
from longfill.config import MAX_SPECULATIVE_TOKENS, EngineArgs
from longfill.errors import ConfigError
from longfill.host import default_threads

if TYPE_CHECKING:
    from longfill.bench.decode import DecodePlan, DecodeResult
    from longfill.models.config import ModelConfig

SET_HERE = ("speculative_config", "async_scheduling", "max_concurrent_batches", "max_num_seqs", "enable_prefix_caching")
"""Engine arguments that the command's own flags decide."""
MOST_IN_FLIGHT = 8
ANSWER_TOKENS, OTHER_TOKENS = 8, 128


@engine_flags(
    only=[knob for knob in KNOBS if knob not in SET_HERE], seed="Seed of a preset's weights, the prompts and sampling"
)
def decode(
    engine: EngineArgs,
    preset: Annotated[
        str | None, typer.Option(help="A random model made here: toy or glm-width (instead of MODEL)")
    ] = None,
    depths: Annotated[str, typer.Option(help="Steps in flight, separated by commas; 1 prepares none ahead")] = "1,2,3",
    drafts: Annotated[
        str | None, typer.Option(help="Drafts of a step, separated by commas (default: 0,1,2,3, or 0 without a layer)")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="[answers|haystack|random]",
            help="Answers to questions about a text, its continuation, or what follows random tokens "
            "(default: haystack; random for a preset)",
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a prompt; about so many for answers", min=1)] = 4096,
    prompts: Annotated[int, typer.Option(help="Prompts side by side", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Such groups of other prompts, one after the other", min=1)] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an output (default: 8 for answers, else 128)", min=2)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0)] = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs of each round of which the fastest counts", min=1)] = 3,
    keep: Annotated[Path | None, typer.Option(help="Folder where the preset's checkpoint stays for next time")] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Decode the same prompts with more steps in flight and with drafts, and show what each setting gains."""
    check_plot(plot)
    in_flight = parse_counts("--depths", depths)
    counts = None if drafts is None else parse_counts("--drafts", drafts, least=0)
    _check_most("--depths", in_flight, MOST_IN_FLIGHT)
    _check_most("--drafts", counts or [], MAX_SPECULATIVE_TOKENS)

    from longfill.bench.decode import DecodePlan, OutputsDifferError, Setting
    from longfill.bench.decode_texts import DESCRIPTIONS, TEXTS
    from longfill.bench.machine import describe_machine
    from longfill.models.config import ModelConfig
    from longfill.models.hub import BUNDLED

    made = preset not in (None, BUNDLED)
    chosen = text or ("random" if made else "haystack")
    if chosen not in TEXTS:
        raise ConfigError(f"--text {chosen}: there is no such text; choose from {', '.join(TEXTS)}")
    if made and chosen != "random":
        raise ConfigError(f"--text {chosen}: a preset has no tokenizer; leave --text out, or name a model that has one")
    if made and counts != [0]:
        engine = dataclasses.replace(
            engine, hf_overrides={"num_nextn_predict_layers": 1, **(engine.hf_overrides or {})}
        )
    with benchmark_model(engine, preset, keep, ()) as (name, folder, _):
        engine = dataclasses.replace(
            engine, model=str(folder), hf_overrides=None if made else engine.hf_overrides,
            skip_tokenizer_init=engine.skip_tokenizer_init or chosen == "random",
        )  # fmt: skip
        counts = _possible(counts, engine, ModelConfig.from_folder(folder, engine.hf_overrides))
        plan = DecodePlan(
            engine=engine,
            text=chosen,
            context=context,
            count=prompts,
            rounds=rounds,
            repeats=repeats,
            max_tokens=max_tokens or (ANSWER_TOKENS if chosen == "answers" else OTHER_TOKENS),
            temperature=temperature,
            settings=tuple(Setting(depth, count) for count in sorted(counts) for depth in sorted(in_flight)),
        )
        try:
            results = _run(plan)
        except OutputsDifferError as error:
            stderr().print(f"longfill: {error}", soft_wrap=True)
            return 1
    values = {
        "machine": describe_machine(),
        "model": name,
        "threads": engine.num_threads or default_threads(),
        "text": chosen,
        "random_tokens": chosen == "random",
        "description": DESCRIPTIONS[chosen],
        "context": context,
        "prompts": prompts,
        "rounds": rounds,
        "repeats": repeats,
        "max_tokens": plan.max_tokens,
        "temperature": temperature,
        "decodes": [result.to_json() for result in results],
    }
    finish(values, plot, as_json)
    return 0


def _check_most(flag: str, counts: list[int], most: int) -> None:
    if max(counts, default=0) > most:
        raise ConfigError(f"{flag}: {max(counts)} is more than {most}")


def _possible(drafts: list[int] | None, engine: EngineArgs, model: ModelConfig) -> list[int]:
    """The numbers of drafts to run; raises ConfigError for some that the model cannot make."""
    from longfill.worker.speculate import check_draft_layer

    if drafts is None:
        return [0, 1, 2, 3] if model.num_mtp_layers == 1 else [0]
    if max(drafts):
        method = {"method": "mtp", "num_speculative_tokens": max(drafts)}
        check_draft_layer(dataclasses.replace(engine, speculative_config=method), model)
    return drafts


def _run(plan: DecodePlan) -> list[DecodeResult]:
    from longfill.bench.decode import run_decodes

    console = stderr()
    return run_decodes(plan, lambda setting, rate: console.print(f"longfill: {setting}: {rate:,.0f} tokens/s"))
