"""The picture of `bench decode`: where the time of a step goes in each setting, and how often drafts are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save


def draw_decode(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `bench decode --json` printed; returns the files."""
    results: Sequence[Mapping[str, Any]] = values["decodes"]
    # The acceptance does not depend on what is in flight, but for the last few tokens.
    drafting = list({result["drafts"]: result for result in reversed(results) if result["drafts"]}.values())[::-1]

    def draw(figure: Any, _matplotlib: Any, theme: Theme) -> None:
        widths = (max(4, len(results)), max(4, sum(result["drafts"] + 1 for result in drafting)))
        panels = figure.subplots(1, 2, width_ratios=widths) if drafting else [figure.subplots()]
        _steps(panels[0], results, theme)
        if drafting:
            _acceptance(panels[1], drafting, theme)
        for axes in panels:
            quiet(axes, theme)
            axes.grid(False, axis="x")
        threads = f"{values['threads']} thread{'s' if values['threads'] > 1 else ''}"
        title = f"{values['model']}, {threads}, {values['description'].split(':')[0]}"
        figure.suptitle(title, color=theme.text, fontsize=9, x=0.01, ha="left")

    return save(path, (9.0 if drafting else 5.5, 4.0), draw)


def _steps(axes: Any, results: Sequence[Mapping[str, Any]], theme: Theme) -> None:
    """A bar a setting: the model, the host that it waits for, and above the line of the step what overlap hides."""
    places = range(len(results))
    each = [result["per_step"] for result in results]
    model = [1e3 * step["compute"] for step in each]
    hidden = [1e3 * step["host"] * step["hidden"] for step in each]
    # What neither computes is the way between the two threads.
    exposed = [max(0.0, 1e3 * step["step"] - computed) for step, computed in zip(each, model, strict=True)]
    tops = [a + b for a, b in zip(model, exposed, strict=True)]
    axes.bar(places, model, color=theme.series[0], width=0.7, label="model")
    axes.bar(places, exposed, bottom=model, color=theme.series[1], width=0.7, label="waiting for the host")
    axes.bar(
        places, hidden, bottom=tops, width=0.7, label="host, hidden", facecolor="none", edgecolor=theme.series[1],
        hatch="////", linewidth=0.8,
    )  # fmt: skip
    for place, result, top in zip(places, results, [a + b for a, b in zip(tops, hidden, strict=True)], strict=True):
        axes.annotate(
            f"{result['tokens_per_s']:,.0f}", (place, top), xytext=(0, 3), textcoords="offset points", ha="center",
            fontsize=7, color=theme.text,
        )  # fmt: skip
    axes.set_xticks(list(places), [f"{result['depth']}\n{result['drafts']}" for result in results])
    axes.set_xlabel("steps in flight, and drafts below")
    axes.set_ylabel("ms of a step; above the bars tokens/s")
    axes.set_ylim(0, 1.25 * max(a + b for a, b in zip(tops, hidden, strict=True)))
    axes.legend(frameon=False, labelcolor=theme.text, fontsize=8, loc="upper left", ncols=3)


def _acceptance(axes: Any, results: Sequence[Mapping[str, Any]], theme: Theme) -> None:
    """A group of bars for each number of drafts, one bar a position."""
    ticks: dict[int, str] = {}
    for result, colour in zip(results, theme.series[2:], strict=False):
        shares = result["acceptance"]["per_position"]
        left = max(ticks, default=-2) + 2
        places = range(left, left + len(shares))
        ticks |= {place: str(position) for position, place in enumerate(places, 1)}
        axes.bar(
            places,
            shares,
            color=colour,
            width=0.8,
            label=f"{result['drafts']} draft{'s' if result['drafts'] > 1 else ''}",
        )
        for place, share in zip(places, shares, strict=True):
            axes.annotate(
                f"{share:.2f}", (place, share), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=7,
                color=theme.text,
            )  # fmt: skip
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_ylim(0, 1.15)
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("share of drafts that were right")
    axes.legend(frameon=False, labelcolor=theme.text, fontsize=8, loc="upper right")
