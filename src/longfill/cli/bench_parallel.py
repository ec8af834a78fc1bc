"""`longfill bench parallel`: prefill, decode and balance on several ranks, held against one.

Imports the benchmarks when one is run. Invariant: a layout that cannot run is refused before anything is measured, and
what was not computed but filled in is said in the table and in the JSON.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfill.bench.parallel_layout import KNOBS as LAYOUT_KNOBS
from longfill.bench.parallel_layout import Layout, parse_layouts
from longfill.cli.bench import PlotFlag, benchmark_model, check_plot, finish, parse_counts
from longfill.cli.console import duration, stderr
from longfill.cli.flags import KNOBS, JsonFlag, engine_flags
from longfill.config import CPU_LIMITS, EngineArgs, choices_of
from longfill.errors import ConfigError
from longfill.host import default_threads

if TYPE_CHECKING:
    from longfill.bench.parallel import ParallelPlan, Run

SET_HERE = (
    *LAYOUT_KNOBS, "max_num_seqs", "max_model_len", "enable_prefix_caching", "digest", "tokenizer",
    "skip_tokenizer_init", "speculative_config",
)  # fmt: skip
"""Engine arguments that layouts, or the commands themselves, decide."""
OFFERED = [knob for knob in KNOBS if knob not in SET_HERE]
_SEED = "Seed of a preset's weights, of the prompt and of what is filled in"

app = typer.Typer(help="Measure several ranks against one, on this machine.", rich_markup_mode=None)

PresetFlag = Annotated[str | None, typer.Option(help="A random model made here: toy or glm-width (instead of MODEL)")]
LayoutsFlag = Annotated[
    str,
    typer.Option(
        help="Separated by commas: 1, or tpN, pcpN and dcpN together (tp2dcp2), ep behind them to spread experts, then "
        "-det, -interleave, -contiguous, -ag_rs, -low_latency, -i64 (interleave)..."
    ),
]
KeepFlag = Annotated[Path | None, typer.Option(help="Folder where the preset's checkpoint stays for next time")]
RepeatsFlag = Annotated[int, typer.Option(help="Runs of each layout, in turn, of which the fastest counts", min=1)]


@app.command("prefill")
@engine_flags(only=OFFERED, seed=_SEED, num_threads="Compute threads of a rank (default: 1)")
def prefill(
    engine: EngineArgs,
    preset: PresetFlag = None,
    layouts: LayoutsFlag = "1,tp2,pcp2,pcp2-interleave,pcp2-contiguous,1-det,tp2-det",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas")] = "65536",
    tokens_measured: Annotated[
        int | None,
        typer.Option(help="Compute only so many tokens at each prompt's end, behind a context filled in", min=1),
    ] = None,
    repeats: RepeatsFlag = 2,
    keep: KeepFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Time to the first token of one prompt in each layout of ranks, and what crosses between them."""
    check_plot(plot)
    counts, chosen = parse_counts("--lengths", lengths), parse_layouts(layouts)

    from longfill.bench.parallel import ParallelPlan

    with benchmark_model(engine, preset, keep, ()) as (name, folder, _):
        plan = ParallelPlan(
            _of_folder(engine, folder, preset), chosen, tuple(sorted(counts)), measured=tokens_measured, repeats=repeats
        )
        values = _measure(plan, name)
    values |= {"parallel": "prefill", "tokens_measured": tokens_measured, "chunk": engine.max_num_batched_tokens}
    finish(values, plot, as_json)
    return 0


@app.command("decode")
@engine_flags(only=OFFERED, seed=_SEED, num_threads="Compute threads of a rank (default: 1)")
def decode(
    engine: EngineArgs,
    preset: PresetFlag = None,
    layouts: LayoutsFlag = "1,tp2,tp2dcp2",
    context: Annotated[int, typer.Option(help="Tokens of the context, which is filled in", min=1)] = 524_288,
    max_tokens: Annotated[int, typer.Option(help="Tokens that are decoded and timed", min=1)] = 16,
    repeats: RepeatsFlag = 2,
    keep: KeepFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Time between two tokens behind a long context that is filled in, in each layout of ranks."""
    check_plot(plot)
    chosen = parse_layouts(layouts)

    from longfill.bench.parallel import ParallelPlan

    with benchmark_model(engine, preset, keep, ()) as (name, folder, _):
        plan = ParallelPlan(
            _of_folder(engine, folder, preset), chosen, (context + 1,), measured=1, decoded=max_tokens, repeats=repeats
        )
        values = _measure(plan, name)
    finish(values | {"parallel": "decode", "context": context, "decoded": max_tokens}, plot, as_json)
    return 0


@app.command("balance")
def balance(
    length: Annotated[int, typer.Option(help="Tokens of the prompt", min=1)] = 131_072,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas")] = "2,4",
    split: Annotated[
        str, typer.Option(metavar="[all|zigzag|interleave|contiguous]", help="Which split; or several, with commas")
    ] = "all",
    chunk: Annotated[int, typer.Option(help="Tokens of a step", min=1)] = CPU_LIMITS.max_num_batched_tokens,
    topk: Annotated[int, typer.Option(help="Keys that a row selects", min=1)] = 2048,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """How evenly a prompt's scoring is shared by ranks, step by step; nothing is computed."""
    check_plot(plot)
    sizes, known = parse_counts("--ranks", ranks), choices_of("pcp_split")
    splits = list(known) if split == "all" else [name.strip() for name in split.split(",")]
    for name in splits:
        if name not in known:
            raise ConfigError(f"--split {name}: there is no such split; choose from all, {', '.join(known)}")

    from longfill.bench.parallel_balance import balance as count

    results = [
        count(length, ranks=size, split=name, chunk=chunk, topk=topk).to_json()  # type: ignore[arg-type]
        for size in sizes
        for name in dict.fromkeys(splits)
    ]
    values = {"parallel": "balance", "length": length, "chunk": chunk, "topk": topk, "results": results}
    finish(values, plot, as_json)
    return 0


def _of_folder(engine: EngineArgs, folder: Path, preset: str | None) -> EngineArgs:
    """The arguments for a model in a folder; a preset's config.json has its overrides in it."""
    return dataclasses.replace(engine, model=str(folder), hf_overrides=engine.hf_overrides if preset is None else None)


def _measure(plan: ParallelPlan, name: str) -> dict[str, Any]:
    """Run all layouts, and say so; returns what both commands print."""
    from longfill.bench.machine import describe_machine
    from longfill.bench.parallel import check_plan, run_layouts
    from longfill.bench.parallel_scaling import Scaling
    from longfill.models.config import ModelConfig

    model = ModelConfig.from_folder(plan.engine.model, plan.engine.hf_overrides)
    check_plan(plan, model)
    console, threads = stderr(), plan.engine.num_threads or 1
    most = max(layout.ranks for layout in plan.layouts) * threads
    if most > default_threads():
        console.print(
            f"longfill: {most} threads share {default_threads()} cores: their times say little", soft_wrap=True
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    scaling, dtype = Scaling(min(most, default_threads())), model.dtype

    def on_run(layout: Layout, length: int, run: Run) -> None:
        console.print(f"longfill: {layout.name}, {length:,} tokens: {duration_of(run.seconds)}", soft_wrap=True)

    results = [result.to_json() for result in run_layouts(plan, on_run, lambda: scaling.look(dtype))]
    return {
        "machine": describe_machine(),
        "load_average": load,
        "machine_scaling": scaling.to_json(),
        "model": name,
        "threads": threads,
        "repeats": plan.repeats,
        "layouts": [layout.name for layout in plan.layouts],
        "results": results,
    }


def duration_of(seconds: float) -> str:
    """`0.0123` -> `12.30 ms`; from a second on as elsewhere."""
    return duration(seconds) if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
