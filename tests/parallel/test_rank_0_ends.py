"""Whatever ends rank 0's program, no process of its ranks is left: kill -9 at any point, an error, or its last line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.parallel.fake_worker import TROUBLE, FakeWorker, plan_of
from tests.parallel.processes import wait_until_gone

from longfill.config import EngineArgs
from longfill.engine.executors import make_executor

SCRIPT = Path(__file__).with_name("script.py")
SOON = 3.0


@contextmanager
def program(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process that forks and the followers, once they are there."""
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        found = psutil.Process(process.pid).children(recursive=True)
        if len(found) == 3:
            return found
        time.sleep(0.01)
    raise AssertionError(f"the ranks do not start: {process.communicate()}")


@pytest.mark.parametrize("where", ["load", "loaded"])
def test_rank_0_killed_while_it_loads(where: str) -> None:
    with program("none", "wait", **{TROUBLE: f"0:{where}:kill"}) as process:
        ranks = ranks_of(process)
        assert process.wait(60) == -signal.SIGKILL
        wait_until_gone(ranks, SOON)


@pytest.mark.parametrize(
    "where", ["inside 4", *(pytest.param(where, marks=pytest.mark.slow) for where in ("begin", "0", "inside 9", "end"))]
)
def test_rank_0_killed_in_a_step(where: str) -> None:
    with program(f"0:{where}:kill", "wait") as process:
        ranks = ranks_of(process)
        assert process.wait(60) == -signal.SIGKILL
        wait_until_gone(ranks, SOON)


def test_rank_0_killed_while_a_follower_computes_and_looks_at_nothing() -> None:
    with program("1:5:sleep", "wait") as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.kill()
        wait_until_gone(ranks, SOON)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_rank_0_ended_by_a_signal_while_idle(number: int) -> None:
    with program("none", "wait") as process:
        ranks = ranks_of(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == -number
        wait_until_gone(ranks, SOON)


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("raise", 1), ("exit", 7)])
def test_a_program_without_a_guard_ends_as_it_would_alone(end: str, code: int) -> None:
    with program("none", end) as process:
        ranks = ranks_of(process)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "ready\n"), error
        assert ("ValueError: the program fails" in error) == (end == "raise")
        wait_until_gone(ranks, 0.5)


def test_a_program_whose_rank_dies_says_why_and_ends() -> None:
    with program("2:5:kill", "return") as process:
        ranks = ranks_of(process)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        last = error.strip().splitlines()[-1]
        assert "ParallelError: rank 2 (" in last
        assert "died (signal 9)" in last
        assert "gather_rows" in last or "start_gather" in last
        wait_until_gone(ranks, 0.5)


def in_a_daemon(results: Any) -> None:
    args = EngineArgs(tensor_parallel_size=2, distributed_timeout_seconds=60.0)
    executor = make_executor(args, Path("nowhere"), None, FakeWorker)  # type: ignore[arg-type]
    results.put(executor.execute(plan_of(), ())[0])
    time.sleep(600)


def test_ranks_can_be_had_in_a_daemon_of_multiprocessing_and_end_with_it() -> None:
    """As the server's engine is one."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=in_a_daemon, args=(results,), daemon=True)
    process.start()
    try:
        assert results.get(timeout=60) == 100
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) == 2
    finally:
        process.kill()
        process.join()
    wait_until_gone(ranks, SOON)
