"""Progress of `bench serve`: how many requests are done, in flight and failed, and how fast they are.

Imports rich. Invariant: writes to the console it was given and nowhere else; without a terminal a plain line every few
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from longfill.cli.console import duration

if TYPE_CHECKING:
    from longfill.bench.serve_metrics import Answer


class LoadProgress:
    """Used as a context manager; `on_stage` and `on_answer` are what `run_load` calls."""

    def __init__(
        self, console: Console, total: int, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total
        self._interval = interval
        self._clock = clock
        self._started: float | None = None
        self._last_line = 0.0
        self._sent = self._done = self._failed = self._tokens = 0
        self._live = Live(self, console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def on_stage(self, stage: str) -> None:
        """Says what is being done before the run."""
        self._console.print(f"longfill: {stage}", soft_wrap=True)

    def on_answer(self, answer: Answer | None) -> None:
        """Counts an answer, or with None a request that was sent."""
        if self._started is None:
            self._started = self._last_line = self._clock()
            if self._live is not None:
                self._live.start()
        if answer is None:
            self._sent += 1
            return
        self._done += 1
        self._failed += answer.failure is not None
        self._tokens += answer.output_tokens + (answer.prompt_tokens or 0)
        if self._live is None and (self._clock() - self._last_line >= self._interval or self._done == self._total):
            self._last_line = self._clock()
            self._console.print(self.line(), soft_wrap=True)

    def line(self) -> str:
        """All in words."""
        gone = 0.0 if self._started is None else self._clock() - self._started
        parts = [
            f"{self._done:,} of {self._total:,} requests",
            f"{self._sent - self._done:,} in flight",
            f"{self._failed:,} failed" if self._failed else "",
            f"{self._tokens / gone:,.0f} tokens/s" if self._tokens and gone > 0 else "",
            duration(gone),
        ]
        return " · ".join(part for part in parts if part)

    def __rich__(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=self._total, completed=self._done, width=36), self.line())
        return bar
