"""Ranks in processes that stay, and run functions that tests name.

For tests only. Invariant: every wait has a limit, and no process outlives its `Ranks`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

from longfill.parallel import Link, Mesh
from longfill.partition.mesh import MeshShape

WAIT = 60.0


class Ranks:
    """`size` processes connected by a link, each of which runs what `start` asks for."""

    def __init__(self, size: int, *, timeout: float) -> None:
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(["tests.parallel.processes"])
        pipes = [forkserver.Pipe() for _ in range(size)]
        self.processes = [
            forkserver.Process(target=_serve, args=(theirs, rank, size, self._store.port, timeout), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self._pipes = [ours for ours, _ in pipes]
        for _, theirs in pipes:
            theirs.close()

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((function, args))

    def result(self, rank: int) -> Any:
        assert self._pipes[rank].poll(WAIT), f"rank {rank} gives no result"
        failed, value = self._pipes[rank].recv()
        if failed:
            raise AssertionError(f"rank {rank}: {value}")
        return value

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Results of `function(mesh, *args)` on the first `size` ranks, in a mesh of its own over them."""
        ranks = range(self.size if size is None else size)
        for rank in ranks:
            self.start(rank, function, *args)
        return [self.result(rank) for rank in ranks]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(WAIT)


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT))
    link = Link(store, rank, size, timeout=timeout, address="127.0.0.1")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(link, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def mesh_of(link: Link, **axes: int) -> Mesh:
    return Mesh(MeshShape(**axes), link.rank, link)


def rank_processes() -> list[psutil.Process]:
    """Descendants of this process that an executor has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("serve_ranks" in word for word in child.cmdline()):
                found.append(child)
    return found


def wait_until_gone(processes: list[psutil.Process], seconds: float = 10.0) -> None:
    """Fail unless all processes end by themselves in time; zombies of others' count as ended."""
    until = time.monotonic() + seconds
    while left := [process for process in processes if process.is_running() and process.status() != "zombie"]:
        assert time.monotonic() < until, left
        time.sleep(0.02)
