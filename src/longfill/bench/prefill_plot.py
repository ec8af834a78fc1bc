"""The picture of `bench prefill`: tokens a second against the prompt's length, and the peak memory below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save, thousands

_MARKERS = ("o", "s", "D", "^", "v")


def draw_prefill(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `bench prefill --json` printed; returns the files."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for result in values["results"]:
        lines.setdefault(label(result), []).append(result)

    def draw(figure: Any, matplotlib: Any, theme: Theme) -> None:
        speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1.7, 1.0))
        for i, (name, results) in enumerate(lines.items()):
            style: dict[str, Any] = {
                "color": theme.series[i % len(theme.series)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "markersize": 5,
                "linewidth": 2.2 if i == 0 else 1.3,
                "label": name,
            }
            _line(speed, results, "tokens_per_s", 1.0, style)
            _line(memory, results, "peak_rss_bytes", 2**30, style)
            _mark_end(speed, results, style["color"])
        for axes in (speed, memory):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(thousands))
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.4g}"))
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            quiet(axes, theme)
        speed.set_ylabel("prompt tokens/s")
        memory.set_ylabel("peak memory, GiB")
        memory.set_xlabel("prompt tokens")
        title = f"{values['model']}, {values['threads']} threads, {values['machine']['processor']}"
        speed.set_title(title, color=theme.text, fontsize=9)
        speed.legend(frameon=False, labelcolor=theme.text, fontsize=8)

    return save(path, (7.5, 7.0), draw)


def label(result: Mapping[str, Any]) -> str:
    """Engine and mode, as tables and the picture name them."""
    return f"{result['engine']}, {result['mode']}" if result["mode"] else str(result["engine"])


def _line(axes: Any, results: Sequence[Mapping[str, Any]], field: str, unit: float, style: Mapping[str, Any]) -> None:
    done = [result for result in results if result["status"] == "ok" and result[field]]
    axes.plot([result["length"] for result in done], [result[field] / unit for result in done], **style)


def _mark_end(axes: Any, results: Sequence[Mapping[str, Any]], colour: str) -> None:
    """Say at the first length that failed why the line ends, below its last point."""
    ended = next((result for result in results if result["status"] in ("out of memory", "timed out")), None)
    if ended is None:
        return
    done = [result["tokens_per_s"] for result in results if result["tokens_per_s"]]
    height = done[-1] / 2 if done else 1.0
    axes.plot([ended["length"]], [height], marker="x", markersize=8, markeredgewidth=1.8, color=colour, linewidth=0)
    axes.annotate(
        ended["status"], (ended["length"], height), xytext=(7, 0), textcoords="offset points", va="center",
        fontsize=8, color=colour,
    )  # fmt: skip
