"""The socket that the server listens on."""

from __future__ import annotations

import socket

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
