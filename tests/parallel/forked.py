"""Ranks that start in a tenth of a second: forked from a process that has torch, kept for as long as the tests run.

For tests only. Everything behind the start is the executor's own; how it starts ranks itself is tested elsewhere.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.reduction import DupFd
from typing import Any

from longfill.engine.executors import spawn

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["longfill.engine.executors.spawn"])


class ForkedProcesses(spawn.Processes):
    """`Processes` that forks what it would run anew."""

    def _start(self, files: list[int], time_limit: float) -> None:
        self._forked = _CONTEXT.Process(target=_Serve(files, time_limit))
        self._forked.start()

    def end(self) -> None:
        self.notices.close()
        self._forked.join(10)
        self._forked.kill()
        self._forked.join()


class _Serve:
    """The child's target, which takes its files along."""

    def __init__(self, files: list[int], time_limit: float) -> None:
        self._files: list[Any] = files
        self._time_limit = time_limit

    def __getstate__(self) -> dict[str, Any]:
        return {"files": [DupFd(file) for file in self._files], "time_limit": self._time_limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._files = state["files"]
        self._time_limit = state["time_limit"]

    def __call__(self) -> None:
        spawn.serve_ranks([file.detach() for file in self._files], self._time_limit)
