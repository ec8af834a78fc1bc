"""Where things are printed and how numbers look.

Imports rich. Invariant: stdout carries results only (with --json exactly one JSON value); everything else is stderr.
"""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console


def stderr() -> Console:
    """The console for everything that is not a result."""
    return Console(stderr=True, highlight=False, markup=False)


def stdout() -> Console:
    """The console for results meant for people; long lines are left to the terminal."""
    return Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints one JSON value, ASCII only, on one line; numbers that JSON lacks (inf, nan) become null."""
    print(json.dumps(plain(value), allow_nan=False))


def plain(value: Any) -> Any:
    """The value as JSON has it: numbers that JSON lacks (inf, nan) become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return plain(value.item())  # a NumPy scalar


def size(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def duration(seconds: float) -> str:
    """`0.42` -> `0.4 s`, `75` -> `1m 15s`, `3700` -> `1h 01m`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
