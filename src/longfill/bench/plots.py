"""What both pictures share: matplotlib only when a picture is asked for, two themes, quiet axes.

Imports matplotlib lazily; it comes with the extra `bench`. Invariant: a picture is drawn from the values that `--json`
prints, so it can be drawn again from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfill.errors import ConfigError


@dataclass(frozen=True)
class Theme:
    """Colours of one background."""

    background: str
    text: str
    faint: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#3b4048", "#d9dce1",
    ("#2563c9", "#c8511b", "#14877a", "#8a4fbf", "#a8791a", "#c2397a", "#5b6675", "#5c8a2b"),
)  # fmt: skip
DARK = Theme(
    "#0f1217", "#c6ccd5", "#31373f",
    ("#6ea3ff", "#f0884d", "#3fc1b0", "#bd8bf0", "#d9a83f", "#ef74ab", "#98a3b3", "#a3c76a"),
)  # fmt: skip

Draw = Callable[[Any, Any, Theme], None]
"""Draws into (pyplot-free figure, matplotlib module, theme)."""


def require_matplotlib() -> Any:
    """The module; raises ConfigError that says how to get it. Called before measuring, which may take an hour."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'longfill[bench]'") from None
    return matplotlib


def save(path: Path, size: tuple[float, float], draw: Draw) -> list[Path]:
    """Write the picture for light backgrounds to `path`, and beside it NAME-dark for dark ones; returns both."""
    matplotlib = require_matplotlib()
    written = []
    for theme, target in ((LIGHT, path), (DARK, path.with_stem(f"{path.stem}-dark"))):
        settings = {"font.size": 9, "text.color": theme.text, "axes.titlelocation": "left", "svg.fonttype": "none"}
        with matplotlib.rc_context(settings):
            figure = matplotlib.figure.Figure(figsize=size, layout="constrained", facecolor=theme.background)
            draw(figure, matplotlib, theme)
            try:
                figure.savefig(target, dpi=160)
            except ValueError as error:
                raise ConfigError(f"--plot {path}: {error}") from None
        written.append(target)
    return written


def quiet(axes: Any, theme: Theme) -> None:
    """Leave two thin axes and faint grid lines."""
    axes.set_facecolor(theme.background)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)
    axes.tick_params(colors=theme.text, which="both", length=0, pad=5)
    axes.xaxis.label.set_color(theme.text)
    axes.yaxis.label.set_color(theme.text)
    axes.grid(True, which="major", color=theme.faint, linewidth=0.5)
    axes.set_axisbelow(True)


def thousands(value: float, _position: object = None) -> str:
    """Axis label of a count: `4096` -> `4K`, `1048576` -> `1M` where it is whole, else with separators."""
    for unit, step in (("M", 2**20), ("K", 2**10)):
        if value >= step and value % step == 0:
            return f"{value / step:,.0f}{unit}"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
