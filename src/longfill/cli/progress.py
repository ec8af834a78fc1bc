"""Live progress of a run: each prompt's computed tokens chasing its tokens, speed, time left, pages and memory.

Imports the engine's step record and rich. Invariant: writes to the console it was given and nowhere else, and costs
nothing that grows with the context.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from longfill.cli.console import duration, size
from longfill.cli.eta import TimeLeft

if TYPE_CHECKING:
    from longfill.engine.stats import StepStats

SHOWN_PROMPTS = 8
"""Bars shown at once; further prompts are counted in one line."""

RATE_WINDOW = 8.0
"""Seconds over which tokens/s is measured."""


class ProgressView:
    """Shows the steps of a run on `console`: live bars on a terminal, else a plain line every `interval` seconds.

    Used as a context manager; `on_step` is what `LLM.generate` calls after each step.
    """

    def __init__(
        self,
        console: Console,
        *,
        memory_budget: int,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._memory_budget = memory_budget
        self._interval = interval
        self._clock = clock
        self._time_left = TimeLeft()
        self._progress: dict[str, tuple[int, int]] = {}
        self._stats: StepStats | None = None
        self._preemptions = 0
        self._peak_pages = 0
        self._started = self._last_step = self._last_line = clock()
        self._recent: deque[tuple[float, int]] = deque()
        self._live = Live(self, console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> ProgressView:
        self._started = self._last_step = self._last_line = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._stats is not None:
            self._print_line()

    def on_step(self, stats: StepStats) -> None:
        """Takes one step's record in."""
        now = self._clock()
        # A request that ended in this step is no longer known to the ledger: its length is what was computed.
        progress = {request: (done, max(done, total)) for request, (done, total) in stats.progress.items()}
        self._time_left.observe(progress, stats.num_tokens, now - self._last_step)
        self._recent.append((self._last_step, stats.num_tokens))
        while len(self._recent) > 1 and now - self._recent[1][0] > RATE_WINDOW:
            self._recent.popleft()
        self._last_step = now
        self._preemptions += len(stats.preempted)
        self._peak_pages = max(self._peak_pages, stats.pages_used)
        # A new dict, never a changed one: the live display reads it from its own thread.
        self._progress = {**self._progress, **progress}
        self._stats = stats
        if self._live is None and now - self._last_line >= self._interval:
            self._last_line = now
            self._print_line()

    def tokens_per_second(self) -> float:
        """Computed tokens a second over the last few seconds."""
        if not self._recent:
            return 0.0
        span = self._last_step - self._recent[0][0]
        return sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0

    def pace(self) -> str:
        """Time gone, speed, time left, and how many prompts wait or were preempted."""
        left = self._time_left.seconds()
        num_waiting = self._stats.num_waiting if self._stats else 0
        parts = [
            duration(self._clock() - self._started),
            f"{self.tokens_per_second():,.0f} tokens/s",
            f"{duration(left)} left" if left else "",
            f"{num_waiting} waiting" if num_waiting else "",
            f"{self._preemptions} preempted" if self._preemptions else "",
        ]
        return " · ".join(part for part in parts if part)

    def room(self) -> str:
        """KV pages and memory in use, each against what there is, and the most so far."""
        if self._stats is None:
            return ""
        return (
            f"KV pages {self._stats.pages_used:,} of {self._stats.pages_total:,} (peak {self._peak_pages:,}) · "
            f"memory {size(self._stats.rss_bytes)} of {size(self._memory_budget)}"
        )

    def __rich__(self) -> RenderableType:
        bars = Table.grid(padding=(0, 1))
        progress = self._progress
        unfinished = [item for item in progress.items() if item[1][0] < item[1][1]]
        shown = (unfinished or list(progress.items())[-1:])[:SHOWN_PROMPTS]
        for request, (computed, total) in shown:
            bars.add_row(
                f"prompt {request}",
                ProgressBar(total=total, completed=computed, width=36),
                Text(f"{computed:,} / {total:,} tokens", justify="right"),
                f"{computed / total:6.1%}",
            )
        hidden = len(progress) - len(shown)
        more = [Text(f"and {hidden} more prompts")] if hidden else []
        return Group(bars, *more, Text(self.pace()), Text(self.room()))

    def _print_line(self) -> None:
        computed = sum(done for done, _ in self._progress.values())
        total = sum(tokens for _, tokens in self._progress.values())
        share = f"{computed / total:.1%}" if total else "0%"
        self._console.print(
            f"{computed:,} / {total:,} tokens ({share}) · {self.pace()} · {self.room()}", soft_wrap=True
        )
