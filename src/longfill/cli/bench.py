"""`longfill bench`: each kernel against this machine's ceilings, prefill against other engines, and saved reports.

Imports the benchmarks when one is run. Invariant: stdout carries the result alone; a picture is asked for before
anything is measured, so that an hour is not spent on one that cannot be drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfill.cli.console import duration, print_json, size, stderr
from longfill.cli.flags import JsonFlag, engine_flags
from longfill.config import EngineArgs, parse_bytes
from longfill.errors import ConfigError
from longfill.host import default_threads

if TYPE_CHECKING:
    from longfill.bench.kernels import KernelResult
    from longfill.bench.prefill import PrefillPlan, PrefillResult

QUICK = 16
"""What `--quick` divides long contexts and many rows by."""

PlotFlag = Annotated[Path | None, typer.Option(help="Draw a picture; a second one, NAME-dark, is for dark pages")]

app = typer.Typer(help="Measure kernels, prefill and decoding on this machine, and servers.", rich_markup_mode=None)


@app.command("kernels")
def kernels(
    threads: Annotated[
        str | None, typer.Option(help="Thread counts, separated by commas (default: 1 and the engine's own)")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeatable")] = None,
    case: Annotated[str, typer.Option(help="Only cases that have this in their name")] = "",
    repeats: Annotated[int, typer.Option(help="Calls of which the best and the median count", min=1)] = 5,
    isa: Annotated[str | None, typer.Option(help="One of this machine's instruction sets (default: the best)")] = None,
    with_torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Also time the same in torch")] = True,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Processor time over threads: for a machine shared with others")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short contexts and few rows: a look, not a figure")] = False,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Measure the machine's ceilings, then each kernel against the one that binds it, and against torch."""
    counts = parse_counts("--threads", threads) if threads else sorted({1, default_threads()})
    chosen = _isa(isa)
    check_plot(plot)

    from longfill.bench.ceilings import Machine
    from longfill.bench.kernels import choose_cases, run_cases
    from longfill.bench.machine import describe_machine
    from longfill.bench.timing import clock

    cases = choose_cases(kernel or [], case)
    ceilings: list[dict[str, Any]] = []
    results: list[KernelResult] = []
    console = stderr()
    for count in counts:
        machine = Machine(chosen, count, clock(count, processor_time=cpu_time))
        roofs = machine.all()
        ceilings.append(dataclasses.asdict(roofs))
        console.print(f"longfill: measuring on {count} thread{'s' if count > 1 else ''} ({chosen})")
        results += run_cases(
            cases,
            machine,
            roofs,
            repeats=repeats,
            shrink=QUICK if quick else 1,
            with_torch=with_torch,
            on_result=lambda r: console.print(f"{r.kernel}, {r.case}: {r.of_ceiling:.2f} of {r.limit}", soft_wrap=True),
        )
    values = {
        "machine": describe_machine(),
        "isa": chosen,
        "quick": quick,
        "cpu_time": cpu_time,
        "ceilings": ceilings,
        "kernels": [dataclasses.asdict(result) for result in results],
    }
    finish(values, plot, as_json)
    return 0


@app.command("prefill")
@engine_flags(seed="Seed of the weights and of the prompt")
def prefill(
    engine: EngineArgs,
    preset: Annotated[
        str | None, typer.Option(help="A random model made here: toy or glm-width; or needle (instead of MODEL)")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Engines to compare with: transformers, llama.cpp, separated by commas; or none")
    ] = "transformers",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas")] = "1024,2048,4096",
    chunk: Annotated[int, typer.Option(help="Tokens of a call in the peers' chunked mode", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Runs of which the best counts; long prompts run once", min=1)] = 3,
    peer_timeout: Annotated[float, typer.Option(help="Seconds after which a peer is given up", min=1.0)] = 900.0,
    peer_memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a peer (default: 80% of the machine's)")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder where the preset's checkpoint stays for next time")] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Prefill the same random prompts with longfill and with other engines, each in a fresh process."""
    check_plot(plot)
    measured = parse_counts("--lengths", lengths)

    from longfill.bench.machine import describe_machine
    from longfill.bench.prefill import PrefillPlan, check_peers

    peers = check_peers([] if against == "none" else [name.strip() for name in against.split(",")])
    limits = {} if peer_memory_limit is None else {"peer_memory_limit": _size(peer_memory_limit)}
    with benchmark_model(engine, preset, keep, peers) as (name, folder, scratch):
        plan = PrefillPlan(
            folder=folder,
            engine=engine if preset is None else dataclasses.replace(engine, hf_overrides=None),
            threads=engine.num_threads or default_threads(),
            lengths=_possible(measured, folder, engine if preset is None else None),
            peers=peers,
            scratch=scratch,
            chunk=chunk,
            repeats=repeats,
            peer_timeout=peer_timeout,
            **limits,
        )
        results = _run_prefills(plan)
    values = {
        "machine": describe_machine(),
        "model": name,
        "threads": plan.threads,
        "chunk": chunk,
        "peer_memory_limit": plan.peer_memory_limit,
        "results": [result.to_json() for result in results],
    }
    finish(values, plot, as_json)
    return 0 if all(result.status == "ok" for result in results if result.engine == "longfill") else 1


@app.command("report")
def report(
    file: Annotated[
        Path,
        typer.Argument(help="What `bench kernels`, `prefill`, `decode`, `parallel` or `serve` printed with --json"),
    ],
    plot: PlotFlag = None,
) -> int:
    """Print a saved result as Markdown tables, and draw its picture again."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        text = _markdown(values)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} does not hold what `longfill bench ... --json` prints") from None
    _draw(values, plot)
    print(text)
    return 0


def parse_counts(flag: str, text: str, *, least: int = 1) -> list[int]:
    """`"1,2"` -> [1, 2], each once; raises ConfigError for anything but counts of at least `least`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise ConfigError(f"{flag}: expected counts such as 1,2, got {text!r}")
    return list(dict.fromkeys(int(part) for part in parts))


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError:
        raise ConfigError(f"--peer-memory-limit: cannot read {text!r}; write for example 8GiB") from None


def _isa(name: str | None) -> str:
    from longfill.kernels.cpu import isa_names, selected_isa

    if name is not None and name not in isa_names():
        raise ConfigError(f"--isa {name}: not available here; choose one of {', '.join(isa_names())}")
    return name or selected_isa()


def check_plot(plot: Path | None) -> None:
    """Raises ConfigError for a picture that could not be drawn, before anything is computed for it."""
    if plot is None:
        return
    from longfill.bench.plots import require_matplotlib

    require_matplotlib()
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}")


@contextlib.contextmanager
def benchmark_model(
    engine: EngineArgs, preset: str | None, keep: Path | None, peers: tuple[str, ...]
) -> Iterator[tuple[str, Path, Path]]:
    """(name, folder, scratch folder) of the model to measure; a preset's checkpoint is written unless it is there."""
    from longfill.bench.checkpoints import preset_config, write_checkpoint
    from longfill.models.hub import BUNDLED, resolve_model

    if preset is not None and engine.model != BUNDLED:
        raise ConfigError(f"--preset {preset} and the model {engine.model} are both given; give one")
    if engine.dtype != "auto" and peers:
        raise ConfigError("--dtype: peers run the checkpoint's own; leave it out, or give --against none")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = keep or Path(temporary)
        if preset is None or preset == BUNDLED:
            if engine.hf_overrides and peers:
                raise ConfigError("--hf-overrides: peers do not know them; give a preset, or --against none")
            yield engine.model, resolve_model(engine.model, engine.revision), scratch
            return
        raw = preset_config(preset, engine.hf_overrides)
        folder = scratch / f"{preset}-{engine.seed}"
        if not _holds(folder, raw):
            stderr().print(f"longfill: writing a random {preset} checkpoint")
            write_checkpoint(folder, raw, engine.seed)
        yield preset, folder, scratch


def _holds(folder: Path, raw: Mapping[str, Any]) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text()) == raw


def _possible(lengths: list[int], folder: Path, overridden: EngineArgs | None) -> tuple[int, ...]:
    """The lengths, the model's limit cut by the one token that is sampled; raises ConfigError for one beyond."""
    from longfill.models.config import ModelConfig

    overrides = None if overridden is None else overridden.hf_overrides
    limit = ModelConfig.from_folder(folder, overrides).max_position_embeddings
    for length in lengths:
        if length > limit:
            raise ConfigError(f"--lengths: {length:,} is more than the model's {limit:,} positions")
    return tuple(min(length, limit - 1) for length in lengths)


def _run_prefills(plan: PrefillPlan) -> list[PrefillResult]:
    from longfill.bench.prefill import run_prefills

    console = stderr()
    results = []
    for result in run_prefills(plan, lambda who, n: console.print(f"longfill: {n:,} tokens: {who.label} ...")):
        results.append(result)
        console.print(f"  {result.length:,} tokens, {_summary(result)}", soft_wrap=True)
    return results


def _summary(result: PrefillResult) -> str:
    who = f"{result.engine} {result.mode}".strip()
    if result.seconds is None or result.tokens_per_s is None:
        return f"{who}: {result.status}" + (f": {result.message}" if result.message else "")
    memory = f", peak {size(result.peak_rss_bytes)}" if result.peak_rss_bytes else ""
    return f"{who}: {duration(result.seconds)}, {result.tokens_per_s:,.0f} tokens/s{memory}"


def finish(values: dict[str, Any], plot: Path | None, as_json: bool) -> None:
    """Draw the picture and print the result."""
    _draw(values, plot)
    if as_json:
        print_json(values)
    else:
        print(_markdown(values))


def _markdown(values: Mapping[str, Any]) -> str:
    if "base_url" in values:
        from longfill.bench.serve_tables import markdown
    elif "parallel" in values:
        from longfill.bench.parallel_tables import markdown
    else:
        from longfill.bench.tables import markdown
    return markdown(values)


def _draw(values: Mapping[str, Any], plot: Path | None) -> None:
    if plot is None:
        return
    check_plot(plot)
    from longfill.bench.decode_plot import draw_decode
    from longfill.bench.parallel_plot import draw_parallel
    from longfill.bench.prefill_plot import draw_prefill
    from longfill.bench.roofline import draw_roofline
    from longfill.bench.serve_plot import draw_serve

    kinds = {"kernels": draw_roofline, "decodes": draw_decode, "base_url": draw_serve, "parallel": draw_parallel}
    draw = next((draw for key, draw in kinds.items() if key in values), draw_prefill)
    written = draw(values, plot)
    stderr().print(f"longfill: wrote {', '.join(str(path) for path in written)}", soft_wrap=True)
