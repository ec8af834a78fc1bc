"""Ranks in processes of this machine: one process imports the engine and forks once for each of them.

May import messages, the follower and parallel. Invariant: when rank 0's process ends, in whatever way, the process made
here ends all ranks that it has forked, and then itself.

It is no context of `multiprocessing`: those run the user's script again in every child unless it is guarded, forbid a
daemon (which the server's engine is) to have children, and share one fork server with whatever else the user does. A
fork of a process without threads that has torch loaded takes milliseconds, and shares its memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from longfill.config import EngineArgs
from longfill.engine.executors.follower import Follower
from longfill.engine.executors.followers import Followers
from longfill.engine.executors.leader import RanksExecutor
from longfill.engine.executors.messages import Exited, MakeWorker, Setup
from longfill.engine.executors.sockets import limit_sends
from longfill.models.config import ModelConfig
from longfill.parallel import Link, Mesh
from longfill.partition.mesh import MeshShape

LOOPBACK = "127.0.0.1"
_END_SECONDS = 5.0

_MAIN = (
    "import json, sys; path, files, limit = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from longfill.engine.executors.spawn import serve_ranks; serve_ranks(files, limit)"
)


def spawn(
    args: EngineArgs, folder: Path, config: ModelConfig, shape: MeshShape, make_worker: MakeWorker
) -> RanksExecutor:
    """Start all ranks but 0 on this machine. Raises ParallelError where one of them cannot be started or load."""
    limit = args.distributed_timeout_seconds
    # Only this machine is to reach the store; torch would let all.
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    processes = Processes(shape.world, time_limit=limit)
    followers = Followers(processes.connections, time_limit=limit, notices=processes.notices, end=processes.end)

    def connect() -> Mesh:
        return Mesh(shape, 0, Link(store, 0, shape.world, timeout=limit, address=LOOPBACK))

    setup = Setup(args, folder, config, shape, make_worker, port, logging.getLogger().getEffectiveLevel())
    return RanksExecutor(followers, connect, lambda mesh: make_worker(args, folder, config, mesh), setup=setup)


class Processes:
    """The processes of ranks 1 to `size` - 1, from rank 0's side."""

    def __init__(self, size: int, *, time_limit: float) -> None:
        """Start them. `time_limit` bounds how long a message to one of them may take."""
        pairs = [socket.socketpair() for _ in range(size)]
        self._start([theirs.fileno() for _, theirs in pairs], time_limit)
        for ours, theirs in pairs:
            theirs.close()
            limit_sends(ours, time_limit)
        self.notices, *ranks = [Connection(ours.detach()) for ours, _ in pairs]
        """Brings `Exited`. Closing it ends all."""
        self.connections = dict(enumerate(ranks, start=1))

    def _start(self, files: list[int], time_limit: float) -> None:
        # NumPy's BLAS would start a thread, which no fork takes along, and which no kernel here uses.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps([sys.path, files, time_limit])],
            stdin=subprocess.DEVNULL, pass_fds=files, env=environment,
            process_group=0,  # of its own: Ctrl-C is for rank 0 to decide on, and one signal can end all of them
        )  # fmt: skip

    def end(self) -> None:
        """End those that are left, and reap them all."""
        self.notices.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve_ranks(files: list[int], time_limit: float) -> None:
    """The process: fork the ranks and say how each of them ended; end them once rank 0 is gone.

    `files` are the ends of rank 0's connections: one for notices, then one for each rank.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what rank 0 prints is for pipes to read
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    ranks: dict[int, int] = {}
    for rank, file in enumerate(files[1:], start=1):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, Connection(file), [files[0], *files[rank + 1 :], woken, waker], time_limit)
        ranks[pid] = rank
        os.close(file)
    _report_ends(Connection(files[0]), woken, ranks)


def _report_ends(notices: Connection, woken: int, ranks: dict[int, int]) -> None:
    """Say of each rank (by process id) how it ended; end them all once rank 0 is gone."""
    while ranks:
        ready = wait([notices, woken])
        if notices in ready:  # rank 0 says nothing here: it is gone, or wants an end
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        if woken in ready:
            os.read(woken, 4096)
        for pid in list(ranks):
            ended, status = os.waitpid(pid, 0 if notices in ready else os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    notices.send(Exited(ranks.pop(pid), os.waitstatus_to_exitcode(status)))


def _run_rank(rank: int, connection: Connection, not_own: list[int], time_limit: float) -> NoReturn:
    """One forked rank, which closes what is not its own of the files that it has inherited."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in not_own:
            os.close(file)
        follower = Follower(connection, rank, time_limit=time_limit)
        setup = follower.receive()
        if isinstance(setup, Setup):
            code = _follow(follower, rank, setup)
    except BaseException:
        traceback.print_exc()
    # Not by way of the interpreter's end, which takes apart a model of gigabytes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow(follower: Follower, rank: int, setup: Setup) -> int:
    logging.basicConfig(
        stream=sys.stderr, level=setup.log_level, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
    )

    def connect() -> Mesh:
        limit = setup.args.distributed_timeout_seconds
        store = TCPStore(LOOPBACK, setup.store_port, is_master=False, timeout=timedelta(seconds=limit))
        return Mesh(setup.shape, rank, Link(store, rank, setup.shape.world, timeout=limit, address=LOOPBACK))

    return follower.run(connect, lambda mesh: setup.make_worker(setup.args, setup.folder, setup.config, mesh))
