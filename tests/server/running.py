"""A real `longfill serve` for tests: started on a free port, watched, and always ended.

For tests only. Invariant: no process outlives the context, and all waits are bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
END_SECONDS = 20.0


class Running:
    """A server that takes requests."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, http: httpx.Client | None = None) -> None:
        self.process = process
        self.url = url
        self.log_file = log
        self.http = http or httpx.Client(base_url=url, timeout=60)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """Of the engine's process: the child that has used most processor time."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return max(children, key=lambda child: child.memory_info().rss).pid

    def rss(self) -> int:
        """Bytes of memory of all its processes."""
        parent = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def frames(self, path: str, **body: Any) -> list[str]:
        """All lines of a stream that are not empty."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            return [line for line in response.iter_lines() if line]

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON of a stream's events; checks that [DONE] ends it."""
        lines = [line for line in self.frames(path, **body) if not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def requests(self) -> list[dict[str, Any]]:
        """Those that have not ended."""
        data: list[dict[str, Any]] = self.http.get("/v1/requests").json()["data"]
        return data

    def wait_for(self, what: str, timeout: float = 20.0) -> dict[str, Any]:
        """The first unfinished request in that state."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            for request in self.requests():
                if request["state"] == what:
                    return request
            time.sleep(0.01)
        raise AssertionError(f"no request came to state {what}: {self.requests()}\n{self.log[-2000:]}")

    def wait_until_idle(self, timeout: float = 20.0) -> float:
        """Wait until no request is left and no page is in use; returns the seconds that took."""
        began = time.monotonic()
        while time.monotonic() < began + timeout:
            if not self.requests() and self.pages_used() == 0:
                return time.monotonic() - began
            time.sleep(0.005)
        raise AssertionError(f"still busy: {self.requests()}, {self.pages_used()} pages\n{self.log[-2000:]}")

    def pages_used(self) -> int:
        text = self.http.get("/metrics").text
        found = re.search(r'^longfill:pages\{[^}]*state="used"[^}]*\} ([0-9.e+]+)$', text, re.M)
        assert found, text
        return int(float(found[1]))


@contextlib.contextmanager
def running(model: str | Path, *flags: str, log: Path) -> Iterator[Running]:
    """Start a server and end it."""
    code = "from longfill.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags]
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "peers"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        server = Running(process, _url(process, log), log)
        yield server
        server.http.close()
    finally:
        _end(process)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        found = re.search(r"serving \S+ at (http://\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS)
