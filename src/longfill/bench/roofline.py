"""The roofline picture of `bench kernels`: on the left what each case reaches under the machine's roofs, on the right
each as a share of the roof that binds it.

Source of the model: Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill.bench.plots import Theme, quiet, save

INTENSITIES = (0.25, 4096.0)


def draw_roofline(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what `bench kernels --json` printed, a row of two panels for each thread count; returns the files."""
    rooms = values["ceilings"]
    cases = [[case for case in values["kernels"] if case["threads"] == roofs["threads"]] for roofs in rooms]
    heights = [max(4.2, 0.21 * len(rows) + 1.0) for rows in cases]
    kernels = list(dict.fromkeys(case["kernel"] for case in values["kernels"]))

    def draw(figure: Any, matplotlib: Any, theme: Theme) -> None:
        grid = figure.add_gridspec(len(rooms), 2, width_ratios=(1.15, 1.0), height_ratios=heights)
        colours = {kernel: theme.series[i % len(theme.series)] for i, kernel in enumerate(kernels)}
        for row, (roofs, own) in enumerate(zip(rooms, cases, strict=True)):
            _roofs(figure.add_subplot(grid[row, 0]), matplotlib, theme, roofs, own, colours)
            _shares(figure.add_subplot(grid[row, 1]), matplotlib, theme, own, colours)
        figure.suptitle(values["machine"]["processor"], x=0.01, ha="left", color=theme.text, fontsize=9)

    return save(path, (12.0, sum(heights)), draw)


def _roofs(
    axes: Any, matplotlib: Any, theme: Theme, roofs: Mapping[str, Any], cases: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
) -> None:  # fmt: skip
    low, high = INTENSITIES
    highest = max(roofs["bf16"], roofs["fp32"])
    for name, style in (("read", "-"), ("copy", ":")):
        ends = [low, highest / roofs[name]]
        axes.plot(ends, [end * roofs[name] / 1e9 for end in ends], style, color=theme.text, linewidth=1)
    middle = highest / roofs["read"] / 4
    axes.annotate(
        f"read {roofs['read'] / 1e9:.0f} GB/s", (middle, middle * roofs["read"] / 1e9), xytext=(-8, 3),
        textcoords="offset points", ha="right", fontsize=8, color=theme.text,
    )  # fmt: skip
    # One line where bf16 is computed in fp32.
    for name in ("bf16", "fp32") if roofs["bf16"] != roofs["fp32"] else ("fp32",):
        height, above = roofs[name] / 1e9, roofs[name] == highest
        axes.plot([roofs[name] / roofs["read"], high], [height] * 2, "-", color=theme.text, linewidth=1)
        axes.annotate(
            f"{name} {height:,.0f} GFLOP/s", (high, height), xytext=(0, 3 if above else -3), ha="right",
            va="bottom" if above else "top", textcoords="offset points", fontsize=8, color=theme.text,
        )  # fmt: skip
    for kernel, colour in colours.items():
        points = [(c["intensity"], c["flops_per_s"] / 1e9) for c in cases if c["kernel"] == kernel and c["flops"]]
        if points:
            axes.scatter(*zip(*points, strict=True), s=34, color=colour, label=kernel, linewidths=0, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low * roofs["read"] / 1e9, 2 * highest / 1e9)
    axes.set_xlabel("FLOP per byte of memory")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_title(f"{roofs['threads']} thread{'s' if roofs['threads'] > 1 else ''}", color=theme.text)
    axes.set_box_aspect(1.2)
    axes.set_anchor("N")
    quiet(axes, theme)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=theme.text, loc="lower right", fontsize=8)


def _shares(
    axes: Any, matplotlib: Any, theme: Theme, cases: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> None:
    at = range(len(cases))
    shares = [case["of_ceiling"] for case in cases]
    axes.barh(at, shares, height=0.62, color=[colours[case["kernel"]] for case in cases])
    for y, share, case in zip(at, shares, cases, strict=True):
        axes.text(share + 0.01, y, f"{share:.0%} of {case['limit']}", va="center", fontsize=7.5, color=theme.text)
    axes.set_yticks(at, [f"{case['kernel']}  {case['case']}" for case in cases], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.15, max(shares, default=0) + 0.15))
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.set_title("share of the ceiling that binds", color=theme.text)
    quiet(axes, theme)
    axes.grid(False, axis="y")
