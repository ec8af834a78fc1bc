"""BOOT-01: ranks that a launcher starts find each other, or end in time with words that name rank and address."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.parallel import launched

from longfill.config import EngineArgs
from longfill.engine.executors import torchrun
from longfill.engine.executors.launch import Launch
from longfill.engine.executors.rendezvous import Hello
from longfill.models.config import ModelConfig
from longfill.models.hub import resolve_model

LIMIT = 3.0
START = 30.0
"""What starting Python and importing torch may take on a busy machine."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Rank:
    """One process: forked from one that has torch loaded, or, if `fresh`, as a launcher would start it."""

    def __init__(self, environment: dict[str, str], words: dict[str, Any], output: Path, *, fresh: bool) -> None:
        self._output = output
        self._process: subprocess.Popen[bytes] | BaseProcess
        if fresh:
            variables = os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
            with output.open("wb") as file:
                command = [sys.executable, launched.__file__, json.dumps(words)]
                self._process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
        else:
            forkserver = multiprocessing.get_context("forkserver")
            forkserver.set_forkserver_preload(["tests.parallel.processes", "tests.parallel.launched"])
            self._process = forkserver.Process(target=launched.run, args=(environment, words, str(output)))
            self._process.start()

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait(seconds)
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it does not end: {self.output}"
        return self._process.exitcode

    @property
    def output(self) -> str:
        return self._output.read_text().strip()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        self._process.kill()
        self.wait(10)


class Program:
    """The ranks of one test."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.ranks: list[Rank] = []
        self._folder = folder

    def start(
        self, rank: int, world: int = 2, *, address: str = "127.0.0.1", port: int = 0, fresh: bool = False, **words: Any
    ) -> None:
        args = {"tensor_parallel_size": world, "distributed_timeout_seconds": 40.0} | words
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port or self.port),
        }
        self.ranks.append(Rank(environment, args, self._folder / f"{len(self.ranks)}.txt", fresh=fresh))

    def ends(self, *codes: int, seconds: float = 3 * LIMIT + START) -> list[str]:
        """What each has printed, in the order of their start, once all have ended with these codes."""
        until = time.monotonic() + seconds
        found = tuple(rank.wait(max(until - time.monotonic(), 0.1)) for rank in self.ranks)
        outs = [rank.output for rank in self.ranks]
        assert found == codes, outs
        return outs


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    for rank in program.ranks:
        rank.close()


def test_ranks_that_start_at_once_work_and_only_rank_0_goes_on(program: Program) -> None:
    for rank in range(3):
        program.start(rank, 3, fresh=True)
    outs = program.ends(0, 0, 0)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert outs == [f"3 ranks, {threads} threads", "", ""]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_rank_that_is_late_within_the_limit_is_waited_for(program: Program, order: tuple[int, int]) -> None:
    first, second = order
    program.start(first)
    time.sleep(3.0)
    program.start(second)
    outs = program.ends(0, 0)
    assert outs[order.index(0)].startswith("2 ranks")


def test_a_missing_rank_is_named_and_a_later_one_finds_rank_0_gone(program: Program) -> None:
    program.start(0, distributed_timeout_seconds=LIMIT)
    [out] = program.ends(2)
    assert f"rank 0 of 2 ({socket.gethostname()}) waits for rank 1 at 127.0.0.1:{program.port}" in out
    assert f"not there after {LIMIT:g} s; start it" in out
    program.start(1, distributed_timeout_seconds=LIMIT)
    _, out = program.ends(2, 2)
    assert f"rank 1 of 2 ({socket.gethostname()}) does not reach rank 0 at 127.0.0.1:{program.port}" in out
    assert "Connection refused" in out


def test_all_that_are_there_hear_who_is_missing(program: Program) -> None:
    program.start(0, 3, distributed_timeout_seconds=2 * LIMIT)
    program.start(2, 3, distributed_timeout_seconds=2 * LIMIT)
    first, other = program.ends(2, 2)
    for out in (first, other):
        assert f"waits for rank 1 at 127.0.0.1:{program.port}" in out
    assert other.startswith(f"ParallelError: rank 2 of 3 ({socket.gethostname()}): rank 0 (")
    assert "has given up" in other


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"world": 3}, "has WORLD_SIZE 3, rank 0"),
        ({"version": "9.9"}, "runs longfill 9.9, rank 0"),
        ({"max_num_seqs": 5}, "was started with --max-num-seqs 5, rank 0"),
    ],
    ids=str,
)
def test_a_rank_that_does_not_fit_is_named_by_all(program: Program, other: dict[str, Any], words: str) -> None:
    program.start(0)
    program.start(1, **other)
    for out in program.ends(2, 2):
        assert "rank 1 (" in out
        assert f"at 127.0.0.1:{program.port}" in out
        assert words in out


def test_an_address_without_a_name_a_listener_or_a_store_is_named(program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        late = {"distributed_timeout_seconds": LIMIT}
        program.start(1, address="nowhere.invalid", **late)
        program.start(0, address="nowhere.invalid", **late)
        program.start(1, port=free_port(), **late)
        program.start(1, port=mute.getsockname()[1], **late)
        no_name, no_name_of_own, nobody, no_store = program.ends(2, 2, 2, 2)
    for out in (no_name, no_name_of_own):
        assert f"does not reach rank 0 at nowhere.invalid:{program.port}" in out
    assert "Connection refused" in nobody
    assert "does not answer as a store" in no_store


def test_a_port_in_use_is_named(program: Program) -> None:
    with socket.create_server(("127.0.0.1", program.port)):
        program.start(0)
        [out] = program.ends(2)
    assert f"cannot have a store at 127.0.0.1:{program.port}" in out
    assert "the port is in use" in out


def test_two_processes_with_one_rank_are_named(program: Program) -> None:
    for rank in (0, 1, 1):
        program.start(rank, 3, distributed_timeout_seconds=2 * LIMIT)
    outs = program.ends(2, 2, 2)
    assert any(f"rank 1 is there twice at 127.0.0.1:{program.port}" in out for out in outs[1:])
    assert "waits for rank 2" in outs[0]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ((2, "5", "kill"), "died"),
        ((2, "5", "raise"), "failed while it computes: RuntimeError: the fake worker fails as it was told to"),
        ((2, "inside 5", "stop"), "no sign of life"),
    ],
    ids=str,
)
def test_a_lost_rank_ends_all(program: Program, trouble: tuple[int, str, str], words: str) -> None:
    for rank in range(3):
        program.start(rank, 3, trouble=trouble, distributed_timeout_seconds=3 * LIMIT)
    first, second, third = program.ranks
    assert first.wait(START + 6 * LIMIT) == 2
    out = first.output.splitlines()[-1]
    assert out.startswith("ParallelError: rank 2 (")
    assert words in out
    assert second.wait(LIMIT) == 1
    if trouble[2] == "stop":
        third.signal(signal.SIGCONT)
    assert third.wait(LIMIT) == (-9 if trouble[2] == "kill" else 1)


def test_followers_end_when_rank_0_is_killed(program: Program) -> None:
    for rank in range(3):
        program.start(rank, 3, trouble=(0, "5", "kill"), fresh=True)
    program.ends(-9, 1, 1)


def test_a_difference_between_two_ranks_is_said_whatever_it_is() -> None:
    folder = resolve_model("needle", None)
    config = ModelConfig.from_folder(folder, None)
    launch = Launch(0, 2, "10.0.0.1", 29500, 1, False, "0")
    first = Hello.of(launch, "10.0.0.1", EngineArgs(num_threads=3), folder, config)
    same = Hello.of(launch, "10.0.0.2", EngineArgs(num_threads=5, model=str(folder)), folder, config)
    same = dataclasses.replace(same, host="another", rank=1)
    assert first.difference(same) is None
    assert Hello(**json.loads(json.dumps(dataclasses.asdict(same)))) == same
    other_config = Hello.of(launch, "10.0.0.2", EngineArgs(), folder, dataclasses.replace(config, rms_norm_eps=0.5))
    assert "another config.json" in str(first.difference(other_config))
    assert "other weights" in str(first.difference(dataclasses.replace(same, weights="")))
    assert "torch 1.0" in str(first.difference(dataclasses.replace(same, versions=same.versions | {"torch": "1.0"})))
    other = dataclasses.replace(same, kernels="native CPU kernels (avx2)")
    assert "computes with native CPU kernels (avx2)" in str(first.difference(other))
    assert "set LONGFILL_ISA" in str(first.difference(other))
    lost = dataclasses.replace(first, address="127.0.1.1")
    assert "set MASTER_ADDR to an address that all machines reach" in str(lost.difference(same))


def strangers_are_refused(words: bytes) -> bool:
    """Whether somebody who says so is taken for a follower."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
        return torchrun._greet(ours, 5.0, b"the key")[1] is None


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(300)])
def test_a_stranger_at_the_control_port_is_no_follower(words: bytes) -> None:
    assert strangers_are_refused(words)
