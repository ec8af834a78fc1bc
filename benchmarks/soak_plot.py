"""The picture of a soak: memory of both processes, pages, and tokens a second, over time.

Imports the plot helpers of the benchmarks. Invariant: drawn from what `--json` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save

MIB = 2**20
WINDOW = 10
"""Samples over which tokens a second are taken."""


def draw_soak(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw it; returns the files."""
    samples: Sequence[Mapping[str, Any]] = values["samples"]
    minutes = [sample["seconds"] / 60 for sample in samples]

    def draw(figure: Any, _matplotlib: Any, theme: Theme) -> None:
        memory, pages, speed = figure.subplots(1, 3)
        for name, colour in (("engine", theme.series[0]), ("api", theme.series[1])):
            used = [sample[f"{name}_rss_bytes"] / MIB for sample in samples]
            label = f"{name}, {values['growth'][name]:+.1%} in the second half"
            memory.plot(minutes, used, color=colour, linewidth=1.2, label=label)
        memory.set_ylabel("resident memory, MiB")
        memory.set_ylim(bottom=0)
        memory.legend(frameon=False, labelcolor=theme.text, fontsize=7, loc="lower right")
        for name, colour in (("used", theme.series[0]), ("cached", theme.series[2])):
            pages.plot(minutes, [s[f"pages_{name}"] for s in samples], color=colour, linewidth=0.8, label=name)
        pages.set_ylabel("KV pages")
        pages.set_ylim(bottom=0)
        pages.legend(frameon=False, labelcolor=theme.text, fontsize=7, loc="upper right")
        marks = samples[::WINDOW]
        rates = [(b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]) for a, b in pairwise(marks)]
        speed.plot([mark["seconds"] / 60 for mark in marks[1:]], rates, color=theme.series[3], linewidth=1.2)
        speed.set_ylabel("tokens/s of answered requests")
        speed.set_ylim(bottom=0)
        for axes in (memory, pages, speed):
            axes.set_xlabel("minutes")
            quiet(axes, theme)

    return save(path, (11.0, 3.4), draw)
