"""Time limits and ends for the sockets under control connections, which know neither.

Imports the standard library only. Invariant: what is set here holds for the socket, whoever else has a handle of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing.connection import Connection


def limit_sends(end: socket.socket, seconds: float) -> None:
    """Have a send fail with OSError that waits for so long for the other side to read; 0 is no limit."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _interval(seconds))


def limit_receives(end: socket.socket, seconds: float) -> None:
    """Have a receive fail with OSError that waits for so long; 0 is no limit."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _interval(seconds))


def hang_up(connection: Connection) -> None:
    """End a connection for both sides. Its number stays taken: another thread may be about to write to it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def stop_receiving(connection: Connection) -> None:
    """Have whoever receives find the connection closed; what was sent still arrives."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RD)


def _interval(seconds: float) -> bytes:
    """The kernel's `struct timeval`."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
