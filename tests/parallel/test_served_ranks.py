"""A server over several ranks: it answers as with one, says 5xx when one is lost, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.parallel.processes import wait_until_gone
from tests.server.running import Running, running

FLAGS = (
    "--max-model-len", "8192", "--max-num-batched-tokens", "128", "--num-threads", "1", "--memory-budget", "2GiB",
    "--prefill-context-parallel-size", "2", "--distributed-timeout-seconds", "60",
)  # fmt: skip
LONG = " ".join(f"The access code of amber falcon is {n:05d}." for n in range(200))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running("needle", *FLAGS, log=tmp_path / "log") as server:
        yield server


def all_processes(server: Running) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def follower(server: Running) -> psutil.Process:
    """The forked rank: its parent is a process of ranks too."""
    ranks = [each for each in all_processes(server) if any("serve_ranks" in word for word in each.cmdline())]
    [found] = [each for each in ranks if each.ppid() in {other.pid for other in ranks}]
    return found


class Asking(threading.Thread):
    """A client that keeps what it gets."""

    def __init__(self, server: Running, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self._body = {"prompt": LONG, "max_tokens": 40, "ignore_eos": True, "cache_salt": uuid.uuid4().hex, **body}
        self.status, self.text = 0, ""
        self.start()

    def run(self) -> None:
        with (
            httpx.Client(base_url=self._url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            self.status = response.status_code
            for part in response.iter_text():
                self.text += part

    def code(self) -> str:
        """Of the error that ends it."""
        self.join(30)
        assert not self.is_alive(), "no answer"
        if not self._body.get("stream"):
            return str(json.loads(self.text)["error"]["code"])
        *_, error, done = [line.removeprefix("data: ") for line in self.text.splitlines() if line]
        assert done == "[DONE]"
        return str(json.loads(error)["error"]["code"])


def test_when_a_rank_is_killed_in_a_step_clients_get_5xx_with_its_name_in_the_log(server: Running) -> None:
    decoding = Asking(server, stream=True, prompt="The access code", max_tokens=5000)
    server.wait_for("decode")
    waiting = Asking(server)
    server.wait_for("prefill")
    processes, rank = all_processes(server), follower(server)
    rank.kill()
    assert waiting.code() == decoding.code() == "engine_dead"
    assert waiting.status == 500
    assert server.process.wait(20) == 1
    assert f"pid {rank.pid}) died (signal 9)" in server.log
    wait_until_gone(processes, 3.0)


def test_a_rank_killed_while_nothing_is_asked_ends_the_server(server: Running) -> None:
    assert server.post("/v1/completions", prompt="The access code", max_tokens=3).status_code == 200
    processes, rank = all_processes(server), follower(server)
    rank.kill()
    assert server.process.wait(20) == 1
    assert f"rank 1 ({os.uname().nodename}, pid {rank.pid}) died (signal 9)" in server.log
    wait_until_gone(processes, 3.0)


def test_sigterm_lets_requests_finish_and_leaves_no_process(server: Running) -> None:
    asking = Asking(server)
    server.wait_for("prefill")
    processes = all_processes(server)
    assert len(processes) >= 3
    server.process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert asking.status == 200
    assert server.process.wait(20) == 0
    wait_until_gone(processes, 1.0)


@pytest.mark.parametrize("whom", ["server", "engine"])
def test_kill_9_of_the_server_or_its_engine_leaves_no_process(server: Running, whom: str) -> None:
    asking = threading.Thread(target=_ask_whatever_comes, args=(server,), daemon=True)
    asking.start()
    server.wait_for("prefill")
    processes = all_processes(server)
    if whom == "server":
        server.process.kill()
    else:
        parent = follower(server).parent()
        assert parent is not None
        os.kill(parent.ppid(), signal.SIGKILL)
        assert server.process.wait(20) == 1
    wait_until_gone(processes, 5.0)
    server.process.wait(5)
    time.sleep(0.1)


def _ask_whatever_comes(server: Running) -> None:
    try:
        server.post("/v1/completions", prompt=LONG, max_tokens=2000, ignore_eos=True)
    except httpx.HTTPError:
        return
