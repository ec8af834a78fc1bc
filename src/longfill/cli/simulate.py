"""`longfill simulate`: a trace through the real scheduler and page bookkeeping on a virtual clock.

Imports the simulator when one is run. Invariant: no model and no torch; stdout carries the result alone, and it says
that its times are virtual.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from longfill.cli.bench import PlotFlag, check_plot
from longfill.cli.console import print_json, stderr, stdout
from longfill.cli.flags import JsonFlag, engine_flags, knob_value
from longfill.config import EngineArgs, default_limits, flag_name, parse_bytes
from longfill.errors import ConfigError

if TYPE_CHECKING:
    from longfill.simulate import StepCost, TraceRequest

PANEL = "Virtual machine"
KNOBS = (
    "seed",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "watermark",
    "scheduler_reserve_full_isl",
    "scheduling_policy",
    "prefill_policy",
    "decode_share",
    "ttft_target",
    "progress_timeout",
    "async_scheduling",
    "max_concurrent_batches",
    "speculative_config",
    "block_size",
    "enable_prefix_caching",
)
"""Engine flags that change what is scheduled; the others have no meaning without a model."""


@engine_flags(
    positional_model=False,
    only=KNOBS,
    seed="Seed of random arrivals and of which drafts are right",
    max_model_len="Longest prompt plus output (default: the trace's longest) (tokens)",
)
def simulate(
    engine: EngineArgs,
    context: typer.Context,
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", help="JSON lines, one request each; - is stdin", show_default=False)
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(help="Instead of TRACE: groups such as 'long=1x500000, short=30x200 at 1s every 0.5s'")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Run once for each value of an engine flag: prefill-policy=ordered,fair")
    ] = None,
    num_pages: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Pages of the KV pool, the null page included (default: so many that nobody is preempted)",
            rich_help_panel=PANEL,
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Tokens of a step and requests, where not given, as on an accelerator with this memory (80GiB)",
            rich_help_panel=PANEL,
        ),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="Time of a step, whatever it holds (default: 25e-3)", rich_help_panel=PANEL)
    ] = None,
    token_seconds: Annotated[
        float | None, typer.Option(help="Time of each row in it (default: 8e-6)", rich_help_panel=PANEL)
    ] = None,
    pair_seconds: Annotated[
        float | None,
        typer.Option(help="Time of each pair of a row and a key that it sees (default: 5e-12)", rich_help_panel=PANEL),
    ] = None,
    draft_acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Probability that a draft is right (default: 0.7)", rich_help_panel=PANEL),
    ] = None,
    eos_token_id: Annotated[
        list[int] | None, typer.Option(help="An output that ends a request; repeatable", rich_help_panel=PANEL)
    ] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Run a trace of requests through the scheduler on a virtual clock, without a model."""
    from longfill.simulate import StepCost, simulate

    check_plot(plot)
    if device_memory is not None:
        limits = dataclasses.asdict(default_limits(parse_bytes(device_memory, "--device-memory")))
        sources = {knob: context.get_parameter_source(knob) for knob in limits}
        unsaid = {knob for knob, source in sources.items() if source is None or source.name == "DEFAULT"}
        engine = dataclasses.replace(engine, **{knob: limits[knob] for knob in unsaid})
    flag, variants = ("", {"": engine}) if compare is None else _variants(engine, compare)
    if draft_acceptance is not None and all(args.speculation is None for args in variants.values()):
        raise ConfigError("--draft-acceptance: nothing drafts; give --speculative-config too")
    costs = {"step_seconds": step_seconds, "token_seconds": token_seconds, "pair_seconds": pair_seconds}
    cost = StepCost(**{name: seconds for name, seconds in costs.items() if seconds is not None})
    requests = _read(trace, synthetic, engine.seed)
    options: dict[str, Any] = {"cost": cost, "num_pages": num_pages, "eos_token_ids": eos_token_id or ()}
    if draft_acceptance is not None:
        options["draft_acceptance"] = draft_acceptance
    runs = {name: simulate(requests, args, **options).to_json() for name, args in variants.items()}
    values: dict[str, Any] = {"clock": "virtual", "cost": dataclasses.asdict(cost)}
    if compare is None:
        values |= runs[""]
    else:
        values |= {"compare": flag, "runs": [{"name": name} | run for name, run in runs.items()]}
    if plot is not None:
        from longfill.simulate.plot import draw_simulation

        written = draw_simulation(values, plot)
        stderr().print(f"longfill: wrote {', '.join(str(path) for path in written)}", soft_wrap=True)
    if as_json:
        print_json(values)
    else:
        _show(flag, runs, cost, stdout())
    return 0


def _read(trace: str | None, synthetic: str | None, seed: int) -> list[TraceRequest]:
    from longfill.simulate import read_trace, synthetic_trace

    if (trace is None) == (synthetic is None):
        raise ConfigError("give either TRACE (a file of JSON lines, or -) or --synthetic, and not both")
    if synthetic is not None:
        return synthetic_trace(synthetic, seed)
    name = "standard input" if trace == "-" else str(trace)
    try:
        data = sys.stdin.buffer.read() if trace == "-" else Path(name).read_bytes()
        return read_trace(data.decode("utf-8").split("\n"), name)  # other line ends may stand in an id
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from None


def _variants(engine: EngineArgs, compare: str) -> tuple[str, dict[str, EngineArgs]]:
    """`prefill-policy=ordered,fair` -> the flag, and the arguments of each run by its value."""
    flag, _, values = compare.partition("=")
    knob = flag.strip().removeprefix("--").replace("-", "_")
    if knob not in KNOBS or knob == "speculative_config" or not values:
        flags = ", ".join(flag_name(name)[2:] for name in KNOBS if name != "speculative_config")
        raise ConfigError(f"--compare: expected FLAG=VALUE,VALUE with one of {flags}; got {compare!r}")
    names = [value.strip() for value in values.split(",")]
    return flag_name(knob)[2:], {name: dataclasses.replace(engine, **{knob: knob_value(knob, name)}) for name in names}


def _show(flag: str, runs: dict[str, dict[str, Any]], cost: StepCost, console: Console) -> None:
    """The figures as a table, a column for each run."""
    console.print(
        f"Virtual time: {cost.step_seconds * 1e3:g} ms a step + {cost.token_seconds * 1e6:g} us a token + "
        f"{cost.pair_seconds * 1e12:g} ps a (query, key) pair; no model ran"
    )
    table = Table(box=None, padding=(0, 2), show_header=len(runs) > 1)
    table.add_column(flag, no_wrap=True)
    for name in runs:
        table.add_column(name, justify="right")
    columns = [_rows(run["summary"]) for run in runs.values()]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)
    for name, run in runs.items():
        for record in run["requests"].values():
            if record["message"] is not None:
                console.print(f"{name} {record['finish_reason']}: {record['message']}".strip(), markup=False)


def _rows(summary: dict[str, Any]) -> dict[str, str]:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary["finish_reasons"].items())
    rows = {
        "requests": f"{summary['requests']:,} ({reasons})",
        "steps": f"{summary['steps']:,}",
        "virtual seconds": f"{summary['seconds']:,.3f}",
        "computed tokens": _rate(summary["computed_tokens"], summary["computed_tokens_per_s"]),
        "output tokens": _rate(summary["output_tokens"], summary["output_tokens_per_s"]),
        "prefix hits": f"{summary['hit_tokens']:,} tokens",
        "preemptions": f"{summary['preemptions']:,}",
        f"pages of {summary['block_size']} used": f"{summary['most_pages_in_use']:,} of {summary['num_pages']:,}",
    }
    if summary["drafts"]:
        rows["drafts accepted"] = f"{summary['accepted_drafts']:,} of {summary['drafts']:,}"
    for label, figures in (("time to first token", summary["ttft_s"]), ("between tokens", summary["itl_s"])):
        for name in ("p50", "p90", "p99", "max") if figures else ():
            rows[f"{label}, {name}"] = _seconds(figures[name])
    return rows


def _rate(count: int, rate: float | None) -> str:
    return f"{count:,}" if rate is None else f"{count:,} ({rate:,.0f}/s)"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"
