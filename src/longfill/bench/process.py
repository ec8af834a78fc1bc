"""Starts a measuring process, watches its memory and its time, and reads what it reports.

May import psutil. Invariant: whatever happens to the process, the caller gets one `Outcome`, and no process is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import psutil

from longfill import ONEDNN_LIMIT
from longfill.bench.child import ChildRequest

Status = Literal["ok", "not installed", "out of memory", "timed out", "failed"]

POLL_SECONDS = 0.02


@dataclass
class Outcome:
    """What one process said. `runs` are its `prefill` events, best first."""

    status: Status
    message: str = ""
    load_seconds: float | None = None
    loaded_rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        return self.runs[0]["seconds"] if self.runs else None


def run_child(
    module: str, request: ChildRequest, *, timeout: float | None = None, memory_limit: int | None = None
) -> Outcome:
    """Run `python -m module` on the request. Beyond `memory_limit` bytes resident or `timeout` seconds it is ended."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as question:
        question.write(request.to_json().encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(request.threads),
        )
        try:
            return _follow(process, errors, timeout, memory_limit)
        finally:
            process.kill()
            process.wait()


def _environment(threads: int) -> Mapping[str, str]:
    """This process's, with the thread count set and modules searched where this process searches them."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Other engines may use what longfill keeps away from for the sake of its bits.
    own = {name: value for name, value in os.environ.items() if name != ONEDNN_LIMIT}
    return own | counts | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def _follow(
    process: subprocess.Popen[bytes], errors: IO[bytes], timeout: float | None, memory_limit: int | None
) -> Outcome:
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    reader = threading.Thread(target=_read_events, args=(process.stdout, events), daemon=True)
    reader.start()
    deadline = None if timeout is None else time.monotonic() + timeout
    sampled, ended = 0, ""
    while process.poll() is None and not ended:
        rss = _rss(process.pid)
        if any(event["event"] == "ready" for event in events):
            sampled = max(sampled, rss)
        if memory_limit is not None and rss > memory_limit:
            ended = f"more than {memory_limit:,} bytes resident"
        elif deadline is not None and time.monotonic() > deadline:
            ended = f"no result within {timeout:,.0f} seconds"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
    timed_out = ended.startswith("no result")
    process.kill()
    code = process.wait()
    reader.join()
    outcome = _outcome(events, sampled)
    if ended:
        outcome.status, outcome.message = ("timed out" if timed_out else "out of memory"), ended
    elif outcome.status == "failed" and code == -signal.SIGKILL:
        outcome.status, outcome.message = "out of memory", "ended by the system"
    elif outcome.status == "failed":
        outcome.message = _last_line(errors) or f"exit code {code}"
        if "failed to allocate" in outcome.message:  # what llama.cpp says before it aborts
            outcome.status = "out of memory"
    return outcome


def _read_events(stream: IO[bytes], events: list[dict[str, Any]]) -> None:
    with stream:
        events.extend(json.loads(line) for line in stream)


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _outcome(events: list[dict[str, Any]], sampled: int) -> Outcome:
    outcome = Outcome("failed")
    for event in events:
        kind = event.pop("event")
        if kind == "missing":
            outcome.status, outcome.message = "not installed", f"{event['package']} is missing"
        elif kind == "out_of_memory":
            outcome.status, outcome.message = "out of memory", event["message"]
        elif kind == "ready":
            outcome.load_seconds, outcome.loaded_rss_bytes = event["load_seconds"], event["rss_bytes"]
        elif kind == "prefill":
            outcome.runs.append(event)
        elif kind == "done":
            outcome.status, outcome.answer = "ok", event
    peaks = [run["peak_rss_bytes"] for run in outcome.runs if run["peak_rss_bytes"] is not None]
    # What was sampled from outside counts where the system keeps no peak, and may fall between two samples.
    outcome.peak_rss_bytes = max([*peaks, sampled]) or None
    outcome.runs.sort(key=lambda run: float(run["seconds"]))
    return outcome


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
