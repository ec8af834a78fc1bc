"""The picture of a simulation: tokens of each step, pages in use, and every request's wait, over virtual time.

Imports what the benchmarks' pictures share. Invariant: it is drawn from what `--json` prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longfill.bench.plots import Theme, quiet, save, thousands

_MOST_COLOURS = 6
_OWN_COLOUR = 0.05
"""Share of all prompt tokens from which on a prompt gets a colour of its own."""
_MOST_LINES = 80
"""Requests beyond which their waits would be a blur."""
_MOST_EDGES = 250
"""Steps beyond which the lines between them would hide the steps."""


def draw_simulation(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `simulate --json` printed, runs that were compared side by side; returns the files."""
    runs = values.get("runs", [values])
    requests = len(runs[0]["requests"])
    heights = [2.0, 0.9, *([0.5 + requests / 30] if requests <= _MOST_LINES else [])]

    def draw(figure: Any, matplotlib: Any, theme: Theme) -> None:
        grid = figure.subplots(len(heights), len(runs), sharex=True, sharey="row", squeeze=False)
        for column, run in enumerate(runs):
            axes = grid[:, column]
            _steps(axes[0], run, theme)
            _pages(axes[1], run, theme)
            if len(axes) == 3:
                _waits(axes[2], run, theme)
            for each in axes:
                quiet(each, theme)
            axes[0].yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(thousands))
            axes[0].set_title(
                f"{values['compare']} {run['name']}" if "runs" in values else "", color=theme.text, fontsize=9
            )
            legend = axes[0].legend(frameon=False, labelcolor=theme.text, fontsize=8, loc="upper right")
            for text in legend.get_texts():
                text.set_parse_math(False)  # an id may hold dollar signs
            axes[-1].set_xlabel("virtual seconds")
            axes[0].set_xlim(left=0)
        labels = ("tokens of a step", "pages in use", "requests")
        for each, label in zip(grid[:, 0], labels, strict=False):
            each.set_ylabel(label)
        if len(heights) == 3:
            grid[2, 0].set_yticks([])
        grid[0, 0].get_gridspec().set_height_ratios(heights)

    return save(path, (3.0 + 4.5 * len(runs), 1.0 + 1.7 * sum(heights)), draw)


def _steps(axes: Any, run: Mapping[str, Any], theme: Theme) -> None:
    """Each step as a bar as wide as it took: decode rows below, prompts stacked above."""
    steps = run["steps"]
    edges, places = _edges(steps)
    bottom = np.zeros(edges.size - 1)
    for (label, heights), colour in zip(_series(run), theme.series, strict=False):
        top = bottom.copy()
        top[places] += heights
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, linewidth=0, label=label)
        bottom = top
    if len(steps) <= _MOST_EDGES:
        axes.vlines([step["time_s"] for step in steps], 0, bottom[places], color=theme.background, linewidth=0.6)


def _edges(steps: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Bounds of all steps and of the idle times between them, and which of these intervals are the steps."""
    edges, places = [0.0], []
    for step in steps:
        if step["time_s"] > edges[-1]:
            edges.append(step["time_s"])
        places.append(len(edges) - 1)
        edges.append(max(edges[-1], step["time_s"] + step["seconds"]))
    if not places:  # every request was refused
        edges.append(1.0)
    return np.array(edges), places


def _series(run: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Labels and rows by step: decodes, each long prompt, all other prompts together."""
    steps = run["steps"]
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update(step["prefills"])
    least = _OWN_COLOUR * totals.total()
    long = [name for name, tokens in totals.most_common(_MOST_COLOURS) if tokens >= least]
    series = [("decode", [sum(s["scheduled"].values()) - sum(s["prefills"].values()) for s in steps])]
    series += [(name, [s["prefills"].get(name, 0) for s in steps]) for name in long]
    others = len(totals) - len(long)
    if others:
        rest = [sum(n for name, n in s["prefills"].items() if name not in long) for s in steps]
        series.append((f"{others} {'other' if long else ''} prompts".replace("  ", " "), rest))
    return series


def _pages(axes: Any, run: Mapping[str, Any], theme: Theme) -> None:
    edges, places = _edges(run["steps"])
    pages = np.zeros(edges.size - 1)
    pages[places] = [step["pages_in_use"] for step in run["steps"]]
    axes.stairs(pages, edges, fill=True, color=theme.series[0], alpha=0.35, linewidth=0)
    axes.axhline(run["summary"]["num_pages"], color=theme.text, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)


def _waits(axes: Any, run: Mapping[str, Any], theme: Theme) -> None:
    """One line a request: its wait for the first token in full colour, then faintly to its end."""
    records = sorted(run["requests"].values(), key=lambda record: -record["arrival_s"])
    for row, record in enumerate(records):
        first, last = record["first_token_s"], record["finished_s"]
        if last is not None:
            axes.hlines(row, record["arrival_s"], last, color=theme.faint, linewidth=2.0)
        if first is not None:
            axes.hlines(row, record["arrival_s"], first, color=theme.series[1], linewidth=2.0)
    axes.set_ylim(-1, len(records))
    axes.set_title("wait for the first token", color=theme.text, fontsize=8)
