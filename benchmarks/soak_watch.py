"""The server under soak: started, watched from outside, stopped; and whether what was seen is flat.

Imports psutil and httpx. Invariant: the server's processes are gone when the context is left, whatever happened in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 120.0
STOP_SECONDS = 60.0
SERVING = re.compile(r"serving .* at (https?://\S+)")


@dataclass(frozen=True)
class Sample:
    """The server at a moment. Seconds are from the start of the traffic."""

    seconds: float
    api_rss_bytes: int
    engine_rss_bytes: int
    api_fds: int
    pages_used: int
    pages_cached: int
    running: int
    waiting: int
    queued: int
    health: int
    """Status code of /health; 0 where it did not answer."""
    health_seconds: float
    tokens: int
    """Of the traffic, so far."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class SoakServer:
    """A `longfill serve` of our own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._api = psutil.Process(process.pid)
        self._http = httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False)

    async def sample(self, seconds: float, tokens: int) -> Sample:
        """How it is now."""
        began = time.perf_counter()
        try:
            health = (await self._http.get("/health")).status_code
        except httpx.HTTPError:
            health = 0
        took = time.perf_counter() - began
        metrics = await self.metrics()
        return Sample(
            seconds=seconds,
            api_rss_bytes=self._api.memory_info().rss,
            engine_rss_bytes=max((child.memory_info().rss for child in self._api.children(recursive=True)), default=0),
            api_fds=self._api.num_fds(),
            pages_used=metrics['longfill:pages{state="used"}'],
            pages_cached=metrics['longfill:pages{state="cached"}'],
            running=metrics["vllm:num_requests_running"],
            waiting=metrics["vllm:num_requests_waiting"],
            queued=metrics["longfill:queued_requests"],
            health=health,
            health_seconds=took,
            tokens=tokens,
        )

    async def metrics(self) -> dict[str, int]:
        """/metrics by name and state."""
        text = (await self._http.get("/metrics")).raise_for_status().text
        found = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                state = re.search(r'state="\w+"', name)
                found[name.partition("{")[0] + (f"{{{state[0]}}}" if state else "")] = int(float(value))
        return found

    async def model(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        entry: dict[str, Any] = (await self._http.get("/v1/models")).raise_for_status().json()["data"][0]
        return entry

    async def aclose(self) -> None:
        """Close the connection for watching."""
        await self._http.aclose()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def soak_server(flags: Sequence[str]) -> Iterator[SoakServer]:
    """A server on a free port. Raises RuntimeError, with its log, where it does not start."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from longfill.cli.main import main; main()", "serve", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", "0", "--log-level", "warning"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment,
            )  # fmt: skip
        children: list[psutil.Process] = []
        try:
            url = _wait(process, log)
            children = psutil.Process(process.pid).children(recursive=True)
            yield SoakServer(process, url, log)
        finally:
            process.kill()
            process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        found = SERVING.search(log.read_text(errors="replace").replace("\n", " "))
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")


async def settled(server: SoakServer, pages: int, seconds: float = 30.0) -> Sample:
    """A sample once nothing runs and the pages in use are so many; else the last one after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        sample = await server.sample(0.0, 0)
        if (sample.pages_used, sample.running, sample.waiting, sample.queued) == (pages, 0, 0, 0):
            return sample
        if time.monotonic() > until:
            return sample
        await asyncio.sleep(0.2)


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """How much the second half of a series grows, as a share of its mean: the slope of its regression line times its
    length. A step between halves is warm-up; a leak goes on.
    """
    half = [(t, v) for t, v in zip(times, values, strict=True) if t >= (times[0] + times[-1]) / 2]
    mean_t = sum(t for t, _ in half) / len(half)
    mean_v = sum(v for _, v in half) / len(half)
    spread = sum((t - mean_t) ** 2 for t, _ in half)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in half) / spread
    return slope * (half[-1][0] - half[0][0]) / mean_v
