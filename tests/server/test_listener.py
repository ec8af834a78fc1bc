"""The socket that the server listens on."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

from tests.server.running import running

from longfill.server.serve import _bind


def test_small_answers_are_sent_at_once():
    """The event loop turns Nagle's algorithm off for connections that say they are TCP, which they learn from the
    listener; else the body of an answer waits up to 40 ms for the client to acknowledge its headers.
    """
    listener = _bind("127.0.0.1", 0)
    listener.listen()
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.proto == socket.IPPROTO_TCP


def test_connections_are_not_bound_by_the_soft_limit_on_open_files(random_model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))  # which the server inherits
    try:
        with running(random_model, log=tmp_path / "log") as server, contextlib.ExitStack() as connections:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(200):
                connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            assert server.http.get("/health").status_code == 200
            assert "Too many open files" not in server.log
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
