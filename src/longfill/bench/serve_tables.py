"""Markdown tables of what `bench serve --json` printed.

Imports the other benchmarks' tables. Invariant: made from the values alone, so that a saved file gives them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longfill.bench.tables import table

LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "client_queue_time": "client queue"}


def markdown(values: Mapping[str, Any]) -> str:
    """The load, the figures of each class and of all, failures and checks."""
    rate, most = values["request_rate"], values["max_concurrency"]
    groups = [*values["classes"], {"name": "all"} | values["overall"]]
    groups = groups[1:] if len(groups) == 2 else groups
    lines = [
        f"{values['model']} at {values['base_url']}{values['endpoint']}: {values['num_prompts']:,} requests of "
        f"{values['prompts']}, seed {values['seed']}, "
        + ("all due at once" if rate is None or math.isinf(rate) else f"{rate:g} a second")
        + (f", at most {most:,} at a time" if most else "")
        + f"; {values['duration']:,.1f} s.",
        "",
        *table(*_totals(groups, goodput=bool(values["goodput"])), names=1),
        "",
        *table(*_times(groups, values["metrics"], values["percentiles"]), names=2),
    ]
    if values["failures"]:
        head = ("failed", "requests", "first message")
        rows = [(each["kind"], f"{each['count']:,}", each["message"]) for each in values["failures"]]
        lines += ["", *table(head, rows, names=1)]
    if values["checks"]:
        lines += ["", *(f"- {_mark(check)}{check['name']}: {check['message']}" for check in values["checks"])]
    return "\n".join(lines)


def _mark(check: Mapping[str, str]) -> str:
    return "" if check["level"] == "ok" else f"**{check['level'].upper()}** "


def _totals(groups: Sequence[Mapping[str, Any]], *, goodput: bool) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    head = ["prompts", "completed", "failed", "requests/s", *(["goodput/s"] if goodput else [])]
    head += ["input tokens", "output tokens", "output tokens/s", "tokens/s", "in flight, most (mean)"]
    rows = [
        [
            group["name"],
            f"{group['completed']:,}",
            f"{group['failed']:,}",
            f"{group['request_throughput']:,.2f}",
            *([f"{group['request_goodput']:,.2f}"] if goodput else []),
            f"{group['total_input_tokens']:,}",
            f"{group['total_output_tokens']:,}",
            f"{group['output_throughput']:,.1f}",
            f"{group['total_token_throughput']:,.0f}",
            f"{group['max_concurrent_requests']:,} ({group['mean_concurrent_requests']:.1f})",
        ]
        for group in groups
    ]
    return head, rows


def _times(
    groups: Sequence[Mapping[str, Any]], metrics: Sequence[str], percentiles: Sequence[float]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    names = ["mean", "median", *(f"p{place:g}" for place in percentiles)]
    head = ["ms", "prompts", *names]
    rows = [
        [LABELS[metric], group["name"], *(_milliseconds(group[f"{name}_{metric}_ms"]) for name in names)]
        for metric in metrics
        for group in groups
    ]
    return head, rows


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
