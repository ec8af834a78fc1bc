"""`longfill bench serve`: load on a running OpenAI-compatible server, its figures, and whether they can be believed.

Imports the benchmark when it is run, and never longfill's own server. Invariant: flags have the names and meanings of
vLLM's `bench serve`; the exit code is 1 where a request failed or was of another length than asked for.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longfill.cli.bench import PlotFlag, check_plot, finish
from longfill.cli.bench_serve_progress import LoadProgress
from longfill.cli.console import plain, stderr
from longfill.cli.flags import JsonFlag
from longfill.errors import ConfigError

if TYPE_CHECKING:
    from longfill.bench.serve_plan import PromptClass

SERVER, PROMPTS, LOAD, RESULT = "Server", "Prompts and outputs", "Load", "Result"
INPUT_LEN, OUTPUT_LEN = 1024, 128


def serve(
    base_url: Annotated[
        str | None,
        typer.Option(help="Address of the server (default: http://HOST:PORT)", rich_help_panel=SERVER),
    ] = None,
    host: Annotated[str, typer.Option(help="Host of the server", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the server", min=1, max=65535, rich_help_panel=SERVER)] = 8000,
    endpoint: Annotated[
        str, typer.Option(help="/v1/completions or /v1/chat/completions", rich_help_panel=SERVER)
    ] = "/v1/completions",
    model: Annotated[
        str, typer.Option(help="Name of the model (default: the first of /v1/models)", rich_help_panel=SERVER)
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A header of every request; repeatable", rich_help_panel=SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            show_envvar=False,
            help="Bearer token (default: OPENAI_API_KEY of the environment)",
            rich_help_panel=SERVER,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request has failed", min=0.001, rich_help_panel=SERVER)
    ] = 21600.0,
    random_input_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt (default: 1024)", min=1, rich_help_panel=PROMPTS)
    ] = None,
    random_output_len: Annotated[
        int | None, typer.Option(help="Most tokens of an output (default: 128)", min=1, rich_help_panel=PROMPTS)
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROMPT:OUTPUT:WEIGHT",
            help="A class of requests: tokens of its prompts and outputs, and how often it comes; repeatable, "
            "instead of --random-input-len and --random-output-len",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths are drawn from (1 - ratio) to (1 + ratio) times those given",
            min=0.0,
            max=0.999,
            rich_help_panel=PROMPTS,
        ),
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts start with, before their own", min=0, rich_help_panel=PROMPTS)
    ] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Send random token ids below this to /v1/completions (default: as the server lists it; where it does "
            "not, random words)",
            min=1,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Outputs go on to their full length", rich_help_panel=PROMPTS)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature (default: the server's)", min=0.0, rich_help_panel=PROMPTS)
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="Further fields of every request, as JSON", rich_help_panel=PROMPTS)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of prompts and arrivals (default: drawn, so that no run finds the prompts of another cached)",
            min=0,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send", min=1, rich_help_panel=LOAD)] = 1000,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf: all at once", rich_help_panel=LOAD)
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Of arrivals: 1 is a Poisson process, less comes in bursts, more is more even", rich_help_panel=LOAD
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests in flight (default: no limit)", min=1, rich_help_panel=LOAD)
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(help="Requests before the run that do not count", min=0, rich_help_panel=LOAD)
    ] = 0,
    percentile_metrics: Annotated[
        str,
        typer.Option(help="Any of ttft, tpot, itl, e2el, client_queue_time", rich_help_panel=RESULT),
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles, separated by commas", rich_help_panel=RESULT)
    ] = "90,99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="Objectives such as ttft:500 (also tpot, e2el) that a request must meet to count as good; repeatable",
            rich_help_panel=RESULT,
        ),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write what --json prints to a file", rich_help_panel=RESULT)
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="Add every gap between tokens to what --json prints", rich_help_panel=RESULT
        ),
    ] = False,
    result_filename: Annotated[
        Path | None,
        typer.Option(help="File of --save-result (default: RATEqps-MODEL-TIME.json)", rich_help_panel=RESULT),
    ] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Send random prompts, long and short, to an OpenAI-compatible server, and measure its answers."""
    _require_httpx()
    check_plot(plot)

    from longfill.bench.serve import LoadPlan, run_load
    from longfill.bench.serve_client import CHAT, COMPLETIONS, Target
    from longfill.bench.serve_metrics import Wanted
    from longfill.bench.serve_plan import Workload
    from longfill.bench.serve_report import succeeded, to_values

    if endpoint not in (COMPLETIONS, CHAT):
        raise ConfigError(f"--endpoint {endpoint}: choose {COMPLETIONS} or {CHAT}")
    if vocab_size is not None and endpoint == CHAT:
        raise ConfigError("--vocab-size: chat messages are text; leave it out, or use --endpoint /v1/completions")
    _check_positive("--request-rate", request_rate)
    _check_positive("--burstiness", burstiness, most=1e6)
    wanted = Wanted(_metrics(percentile_metrics), _percentiles(metric_percentiles), _objectives(goodput or []))
    plan = LoadPlan(
        target=Target(
            base_url=(base_url or f"http://{host}:{port}").rstrip("/").removesuffix("/v1"),
            endpoint=endpoint,
            model=model,
            headers=_headers(header or [], api_key),
            fields=_fields(ignore_eos, temperature, extra_body),
            timeout=timeout,
        ),
        workload=Workload(
            classes=_classes(mix or [], random_input_len, random_output_len),
            num_prompts=num_prompts,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            prefix_len=random_prefix_len,
            range_ratio=random_range_ratio,
            request_rate=request_rate,
            burstiness=burstiness,
        ),
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        vocab_size=vocab_size,
    )
    plan.workload.jobs()  # a mistake in the mix is found before anything is sent
    _check_result_file(save_result, result_filename)
    with LoadProgress(stderr(), num_prompts) as progress:
        load = run_load(plan, progress.on_stage, progress.on_answer)
    values = to_values(plan, load, wanted, detailed=save_detailed)
    if save_result:
        _save(values, result_filename)
    finish(values, plot, as_json)
    _complain(values)
    return 0 if succeeded(values) else 1


def _require_httpx() -> None:
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError("bench serve needs httpx: pip install 'longfill[server]'") from None


def _classes(mix: list[str], input_len: int | None, output_len: int | None) -> tuple[PromptClass, ...]:
    from longfill.bench.serve_plan import PromptClass, parse_mix

    if mix and (input_len or output_len):
        raise ConfigError("--mix and --random-input-len or --random-output-len are both given; give one")
    return parse_mix(mix) if mix else (PromptClass(input_len or INPUT_LEN, output_len or OUTPUT_LEN),)


def _check_positive(flag: str, value: float, most: float = math.inf) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{flag} {value:g}: must be above 0" + ("" if math.isinf(most) else f", at most {most:g}"))


def _metrics(text: str) -> tuple[str, ...]:
    from longfill.bench.serve_metrics import METRICS

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics {name}: choose from {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        places = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        places = ()
    if not places or not all(0 <= place <= 100 for place in places):
        raise ConfigError(f"--metric-percentiles {text}: expected numbers from 0 to 100, such as 90,99")
    return places


def _objectives(specs: list[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]`, or both in one text with a space or comma between, as vLLM's flag takes them."""
    from longfill.bench.serve_metrics import OBJECTIVES

    limits = {}
    for spec in " ".join(specs).replace(",", " ").split():
        metric, _, text = spec.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if metric not in OBJECTIVES or not limit >= 0:
            raise ConfigError(
                f"--goodput {spec}: expected METRIC:MILLISECONDS, the metric one of {', '.join(OBJECTIVES)}"
            )
        limits[metric] = limit
    return limits


def _headers(specs: list[str], api_key: str | None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for spec in specs:
        key, equals, value = spec.partition("=")
        if not key or not equals:
            raise ConfigError(f"--header {spec}: expected KEY=VALUE")
        headers[key.lower()] = value
    return headers


def _fields(ignore_eos: bool, temperature: float | None, extra_body: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if extra_body is not None:
        try:
            fields = json.loads(extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body: not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body: expected a JSON object, got {extra_body}")
    if ignore_eos:
        fields["ignore_eos"] = True
    if temperature is not None:
        fields["temperature"] = temperature
    return fields


def _check_result_file(save_result: bool, path: Path | None) -> None:
    if path is None:
        return
    if not save_result:
        raise ConfigError("--result-filename without --save-result")
    if not path.parent.is_dir():
        raise ConfigError(f"--result-filename {path}: there is no folder {path.parent}")


def _save(values: dict[str, Any], path: Path | None) -> None:
    if path is None:
        model = values["model"].rstrip("/").rsplit("/", 1)[-1]
        path = Path(f"{values['request_rate']:g}qps-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.write_text(json.dumps(plain(values), allow_nan=False) + "\n", encoding="utf-8")
    stderr().print(f"longfill: wrote {path}", soft_wrap=True)


def _complain(values: dict[str, Any]) -> None:
    """What is wrong, where people look last."""
    console = stderr()
    for check in values["checks"]:
        if check["level"] != "ok":
            console.print(f"longfill: {check['level']}: {check['name']}: {check['message']}", soft_wrap=True)
    for failure in values["failures"]:
        console.print(f"longfill: {failure['count']:,} failed: {failure['kind']}: {failure['message']}", soft_wrap=True)
