"""Ranks that torchrun (or whatever sets the same environment) has started, each with the same program.

May import everything of the executors. Invariant: only rank 0 returns from here; the others follow it until it stops,
and end.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore

from longfill.config import EngineArgs
from longfill.engine.executors.follower import Follower
from longfill.engine.executors.followers import Followers
from longfill.engine.executors.launch import Launch
from longfill.engine.executors.leader import RanksExecutor
from longfill.engine.executors.messages import MakeWorker
from longfill.engine.executors.rendezvous import Hello, Meeting
from longfill.engine.executors.sockets import limit_receives, limit_sends
from longfill.errors import ParallelError
from longfill.models.config import ModelConfig
from longfill.parallel import Link, Mesh
from longfill.partition.mesh import MeshShape
from longfill.worker.worker import Worker

logger = logging.getLogger(__name__)

_GREETING_SECONDS = 5.0
"""What a connection gets to show that it has the key."""


def join(
    launch: Launch, args: EngineArgs, folder: Path, config: ModelConfig, shape: MeshShape, make_worker: MakeWorker
) -> RanksExecutor:
    """Rank 0's executor. All other ranks end here with SystemExit: 0 if rank 0 told them to stop, else 1.

    Raises ParallelError where the ranks do not find each other, or are no match.
    """
    limit = args.distributed_timeout_seconds
    meeting = Meeting(launch, limit)
    hello = Hello.of(launch, meeting.address, args, folder, config)
    meeting.introduce(hello)

    def connect() -> Mesh:
        store = PrefixStore("gloo", meeting.store)
        return Mesh(shape, launch.rank, Link(store, launch.rank, launch.world, timeout=limit, address=meeting.address))

    def load(mesh: Mesh) -> Worker:
        return make_worker(args, folder, config, mesh)

    if launch.rank:
        follower = Follower(_call(meeting, limit), launch.rank, time_limit=limit)
        raise SystemExit(follower.run(connect, load))
    meeting.gather(hello)
    return RanksExecutor(Followers(_answer_calls(meeting, limit), time_limit=limit), connect, load)


def _call(meeting: Meeting, limit: float) -> Connection:
    """A follower's control connection to rank 0."""
    first, port, key = meeting.invitation()
    try:
        with socket.create_connection((first.address, port), timeout=limit) as end:
            end.settimeout(None)
            connection = _connection(end, limit)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send(meeting.launch.rank)
            limit_receives(end, 0)
    except (OSError, EOFError, AuthenticationError) as error:
        raise ParallelError(
            f"{meeting.me} cannot connect with {first.name} at {first.address}:{port}: {error}"
        ) from None
    return connection


def _answer_calls(meeting: Meeting, limit: float) -> dict[int, Connection]:
    """Rank 0's control connections, by rank."""
    key, until = secrets.token_bytes(32), time.monotonic() + limit
    connections: dict[int, Connection] = {}
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    with socket.create_server((meeting.address, 0), family=family) as server:
        meeting.invite(server.getsockname()[1], key)
        while len(connections) < meeting.launch.world - 1:
            server.settimeout(max(until - time.monotonic(), 0.001))
            try:
                end, _ = server.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, meeting.launch.world) if rank not in connections]
                raise ParallelError(
                    f"{meeting.me}: no connection from rank {', '.join(missing)} at {meeting.address} within {limit:g} "
                    "s, though it was there before"
                ) from None
            with end:
                rank, connection = _greet(end, limit, key)
            if connection is not None:
                connections[rank] = connection
    return connections


def _greet(end: socket.socket, limit: float, key: bytes) -> tuple[int, Connection | None]:
    """A caller's rank and connection; none for a stranger."""
    connection = _connection(end, limit)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank: int = connection.recv()
    except (OSError, EOFError, AuthenticationError) as error:
        logger.warning("a connection that is not from a follower: %s", error)
        return -1, None
    limit_receives(end, 0)
    return rank, connection


def _connection(end: socket.socket, limit: float) -> Connection:
    """A connection over a socket, which may then be closed. Receives are limited for now."""
    limit_sends(end, limit)
    limit_receives(end, _GREETING_SECONDS)
    # A machine that is switched off says nothing.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(os.dup(end.fileno()))
