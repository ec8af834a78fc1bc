"""One prefill measurement in a process of its own: a JSON request on standard input, JSON lines on standard output.

Standard library only, since every engine's process runs it beside that engine. Invariant: standard output carries the
protocol alone; whatever a library prints there goes to standard error.

Events, each an object with `event`:

| event | fields |
|---|---|
| `missing` | `package`: the engine is not installed |
| `ready` | `load_seconds`, `rss_bytes`: loaded, and a short prompt has been run |
| `prefill` | `seconds`, `peak_rss_bytes` (null where the system keeps no peak), and what the engine adds |
| `done` | `logits` or `logprobs` of the last token |
| `out_of_memory` | `message` |
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

LONGEST_SECONDS = 20.0
"""A prompt is not run again once its runs have taken this long together."""

PROC = Path("/proc/self")


@dataclass(frozen=True)
class ChildRequest:
    """What a measuring process is asked to do."""

    folder: str
    token_ids: list[int]
    mode: str
    threads: int
    repeats: int
    warm_up: int
    """Tokens of the prompt that are run first, unmeasured."""
    chunk: int = 0
    """Tokens of a step, where the mode has steps."""
    memory_limit: int | None = None
    """Bytes of private memory that the system refuses to exceed."""
    options: dict[str, Any] = field(default_factory=dict)
    """What one engine alone understands."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChildRequest:
        return cls(**json.loads(text))


class Engine(Protocol):
    """A loaded engine, as the measurement drives it."""

    def prefill(self, token_ids: list[int]) -> None:
        """Run a prompt from nothing up to its last token's logits."""

    def figures(self) -> dict[str, Any]:
        """What the engine says about the last prompt; not timed."""

    def answer(self) -> dict[str, Any]:
        """{"logits": [...]} or {"logprobs": {token: ...}} of the last prompt's last token."""


Load = Callable[[ChildRequest], Engine]


def serve(load: Load, package: str) -> None:
    """Answer the request on standard input with the engine that `load` makes; `package` is what it needs installed."""
    request = ChildRequest.from_json(sys.stdin.read())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if request.memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request.memory_limit, request.memory_limit))
    try:
        _measure(request, load, out)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package:
            raise
        _emit(out, "missing", package=package)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _emit(out, "out_of_memory", message=str(error)[:300])


def _measure(request: ChildRequest, load: Load, out: TextIO) -> None:
    begin = time.perf_counter()
    engine = load(request)
    engine.prefill(request.token_ids[: request.warm_up])
    _emit(out, "ready", load_seconds=time.perf_counter() - begin, rss_bytes=rss_bytes())
    spent, runs, longest = 0.0, 0, 0.0
    while runs < request.repeats and (runs == 0 or spent + longest < LONGEST_SECONDS):
        counts = reset_peak()
        begin = time.perf_counter()
        engine.prefill(request.token_ids)
        seconds = time.perf_counter() - begin
        peak = peak_rss_bytes() if counts else None
        spent, runs, longest = spent + seconds, runs + 1, max(longest, seconds)
        _emit(out, "prefill", seconds=seconds, peak_rss_bytes=peak, **engine.figures())
    _emit(out, "done", **engine.answer())


def _emit(out: TextIO, event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), file=out, flush=True)


def _is_out_of_memory(error: Exception) -> bool:
    """torch's allocator raises a RuntimeError with this text."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "not enough memory" in text or "can't allocate" in text


def rss_bytes() -> int:
    """Resident memory of this process."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Most resident memory since `reset_peak`, or since the start where that is not possible."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Start counting the peak anew; False where the system cannot."""
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    # Some systems take the command and do nothing.
    return peak_rss_bytes() <= rss_bytes() + 64 * 2**20


def _status_bytes(name: str) -> int:
    for line in (PROC / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
