"""The picture of `bench serve`: how long first tokens and gaps took, by class, and when each request was what.

May import the plot helpers. Invariant: drawn from what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save, thousands

PANELS = (("ttft", "time to first token"), ("itl", "gap between tokens"))
MOST_BARS = 400
"""Requests whose bars can be told apart."""


def draw_serve(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `bench serve --json` printed; returns the files."""
    groups: Sequence[Mapping[str, Any]] = values["classes"]
    panels = [(metric, name) for metric, name in PANELS if any(group["curves"].get(metric) for group in groups)]

    def draw(figure: Any, matplotlib: Any, theme: Theme) -> None:
        axes = figure.subplots(1, len(panels) + 1, width_ratios=[*(1.0 for _ in panels), 1.5], squeeze=False)[0]
        for each, (metric, name) in zip(axes, panels, strict=False):
            _curves(each, groups, metric, name, theme)
            _log_ticks(each, matplotlib)
        _timeline(axes[-1], values, theme)
        for each in axes:
            quiet(each, theme)
        title = f"{values['model']}, {values['num_prompts']:,} requests of {values['prompts']}"
        figure.suptitle(title, color=theme.text, fontsize=9, x=0.01, ha="left")

    return save(path, (3.6 * len(panels) + 4.6, 3.8), draw)


def _curves(axes: Any, groups: Sequence[Mapping[str, Any]], metric: str, name: str, theme: Theme) -> None:
    """A line a class: which share was done within a time."""
    for kind, group in enumerate(groups):
        times = [max(value, 1e-3) for value in group["curves"].get(metric, [])]
        if times:
            shares = [place / (len(times) - 1) for place in range(len(times))]
            axes.plot(times, shares, color=_colour(kind, theme), linewidth=1.5, label=group["name"])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{name}, ms")
    axes.set_ylabel("share of requests" if metric == "ttft" else "share of gaps")
    if len(groups) > 1:
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=7, loc="upper left")


def _log_ticks(axes: Any, matplotlib: Any) -> None:
    """A logarithmic axis of at least a decade, with whole numbers at its ticks."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    room = max(1.0, (10 * low / high) ** 0.5)
    axes.set_xlim(low / room, high * room)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(thousands))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _timeline(axes: Any, values: Mapping[str, Any], theme: Theme) -> None:
    """A bar a request in the order of sending: pale until its first token, then full; failed ones are crosses."""
    requests = sorted(values["requests"], key=lambda request: request["start"])[:MOST_BARS]
    for kind in range(len(values["classes"])):
        own = [(row, each) for row, each in enumerate(requests) if each["class"] == kind]
        good = [(row, each) for row, each in own if each["failure"] is None]
        rows = [row for row, _ in good]
        first = [each["e2el"] if each["ttft"] is None else each["ttft"] for _, each in good]
        starts = [each["start"] for _, each in good]
        colour = _colour(kind, theme)
        axes.barh(rows, first, left=starts, height=1.0, color=colour, alpha=0.3, linewidth=0)
        axes.barh(
            rows, [each["e2el"] - wait for (_, each), wait in zip(good, first, strict=True)], height=1.0, color=colour,
            left=[start + wait for start, wait in zip(starts, first, strict=True)], linewidth=0,
        )  # fmt: skip
        failed = [(row, each["start"] + each["e2el"]) for row, each in own if each["failure"] is not None]
        axes.plot([when for _, when in failed], [row for row, _ in failed], "x", color=theme.text, markersize=4)
    axes.set_ylim(len(requests), -1)
    axes.set_xlabel("seconds; pale: before the first token")
    axes.set_ylabel("requests" if len(requests) == len(values["requests"]) else f"the first {MOST_BARS} requests")
    axes.grid(False, axis="y")


def _colour(kind: int, theme: Theme) -> str:
    return theme.series[kind % len(theme.series)]
