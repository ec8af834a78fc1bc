"""The pictures of `bench parallel`: how much sooner each layout is done, and how evenly each split shares scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save


def draw_parallel(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `bench parallel ... --json` printed; returns the files."""
    return _draw_balance(values, path) if values["parallel"] == "balance" else _draw_layouts(values, path)


def _draw_layouts(values: Mapping[str, Any], path: Path) -> list[Path]:
    """A bar a layout: what the first rank computed, and what of its time it waited for others."""
    results: Sequence[Mapping[str, Any]] = values["results"]
    lengths = list(dict.fromkeys(result["length"] for result in results))
    decodes = values["parallel"] == "decode"

    def draw(figure: Any, _matplotlib: Any, theme: Theme) -> None:
        panels = figure.subplots(1, len(lengths), squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            own = [result for result in results if result["length"] == length]
            _bars(axes, own, theme, decodes=decodes)
            axes.set_xlabel(f"{values['context'] if decodes else length:,} tokens")
            quiet(axes, theme)
            axes.grid(False, axis="x")
        panels[0].set_ylabel("ms a token" if decodes else "seconds to the first token")
        panels[0].legend(frameon=False, labelcolor=theme.text, fontsize=8, loc="upper right")
        measured = None if decodes else values["tokens_measured"]
        part = "" if measured is None else f", last {measured:,} tokens"
        threads = f"{values['threads']} thread{'' if values['threads'] == 1 else 's'} a rank"
        figure.suptitle(
            f"{values['model']}, {values['parallel']}{part}, {threads}; above the bars: times one rank",
            color=theme.text, fontsize=9, x=0.01, ha="left",
        )  # fmt: skip

    return save(path, (max(5.5, 1.0 * len(results) + 1.5), 4.0), draw)


def _bars(axes: Any, results: Sequence[Mapping[str, Any]], theme: Theme, *, decodes: bool) -> None:
    places = range(len(results))
    units = [1e3 if decodes else 1.0 for _ in results]
    totals = [unit * result["seconds"] for unit, result in zip(units, results, strict=True)]
    waits = [
        unit * result["wait_seconds"] / (result["steps"] if decodes else 1)
        for unit, result in zip(units, results, strict=True)
    ]
    axes.bar(
        places, [t - w for t, w in zip(totals, waits, strict=True)], color=theme.series[0], width=0.7, label="at work"
    )
    axes.bar(
        places, waits, bottom=[t - w for t, w in zip(totals, waits, strict=True)], color=theme.series[1], width=0.7,
        label="waiting for other ranks",
    )  # fmt: skip
    for place, result, total in zip(places, results, totals, strict=True):
        if result["ratio"] is not None:
            axes.annotate(
                f"{result['ratio']:.2f}", (place, total), xytext=(0, 3), textcoords="offset points", ha="center",
                fontsize=8, color=theme.text,
            )  # fmt: skip
    axes.set_xticks(list(places), [result["layout"].replace("-", "\n") for result in results], fontsize=8)
    axes.set_ylim(0, 1.2 * max(totals))


def _draw_balance(values: Mapping[str, Any], path: Path) -> list[Path]:
    """A line a split: what scoring can gain in each step."""
    results: Sequence[Mapping[str, Any]] = values["results"]
    sizes = list(dict.fromkeys(result["ranks"] for result in results))

    def draw(figure: Any, matplotlib: Any, theme: Theme) -> None:
        panels = figure.subplots(1, len(sizes), squeeze=False)[0]
        for axes, ranks in zip(panels, sizes, strict=True):
            own = [result for result in results if result["ranks"] == ranks]
            for result, colour in zip(own, theme.series, strict=False):
                ends = [values["chunk"] * step for step in range(1, len(result["chunk_speedups"]) + 1)]
                axes.plot(ends, result["chunk_speedups"], color=colour, linewidth=1.8, label=result["split"])
            axes.set_ylim(1, ranks * 1.03)
            axes.set_xlabel(f"tokens of the prompt, {ranks} ranks")
            axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value / 1024:,.0f}K"))
            quiet(axes, theme)
        panels[0].set_ylabel("scoring in a step, times one rank, at most")
        panels[0].legend(frameon=False, labelcolor=theme.text, fontsize=8, loc="lower right")
        figure.suptitle(
            f"{values['length']:,} tokens in steps of {values['chunk']:,}, top-k {values['topk']:,}",
            color=theme.text, fontsize=9, x=0.01, ha="left",
        )  # fmt: skip

    return save(path, (4.2 * len(sizes), 3.6), draw)
