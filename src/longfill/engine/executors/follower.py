"""A rank other than 0: loads its part of the model, then computes along with every step that rank 0 announces.

May import everything below the engine. Invariant: it ends soon after rank 0 has, whatever it is doing, and tells rank 0
why if it ends before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from longfill.engine.executors.messages import (
    Beat,
    Connecting,
    Done,
    Failed,
    FromFollower,
    Here,
    Ready,
    Step,
    Stop,
    ToFollower,
    beat_seconds,
)
from longfill.engine.executors.sockets import stop_receiving
from longfill.errors import LongfillError, ParallelError
from longfill.kernels.cpu.extension import tasks_done
from longfill.parallel import Mesh
from longfill.worker.worker import Worker

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
"""What a computing follower gets to notice by itself that rank 0 is gone."""


class Follower:
    """The follower's side of the control connection."""

    def __init__(self, connection: Connection, rank: int, *, time_limit: float) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._rank = rank
        self._beat_seconds = beat_seconds(time_limit)
        self._inbox: queue.SimpleQueue[ToFollower | Exception | None] = queue.SimpleQueue()
        """What rank 0 says; None once it is gone, an error where it cannot be read."""
        self._leaves = threading.Event()
        self._state = "starts"
        self._mesh: Mesh | None = None
        self._worker: Worker | None = None
        self.send(Here())
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._listen, self._beat)]
        for thread in self._threads:
            thread.start()

    def run(self, connect: Callable[[], Mesh], load: Callable[[Mesh], Worker]) -> int:
        """Connect with the other ranks, load, and follow until rank 0 says stop. Returns the process's exit code."""
        try:
            return self._follow(connect, load)
        except BaseException as error:
            expected = isinstance(error, LongfillError)
            message = str(error) if expected else f"{type(error).__name__}: {error}"
            logger.error("rank %d ends while it %s: %s", self._rank, self._state, message, exc_info=not expected)
            self.send(Failed(message, self._state, secondary=isinstance(error, ParallelError)))
            if isinstance(error, Exception):
                return 1
            raise
        finally:
            self._leave()

    def receive(self) -> ToFollower | None:
        """The next message of rank 0; None once it is gone. Raises LongfillError, of which rank 0 is told, for one that
        cannot be read."""
        message = self._inbox.get()
        if isinstance(message, Exception):
            why = f"it cannot read what rank 0 has sent: {type(message).__name__}: {message}"
            self.send(Failed(why, self._state, secondary=False))
            raise LongfillError(f"rank {self._rank}: {why}")
        if message is None:
            self._leaves.set()
            logger.error("rank %d ends, since rank 0 is gone", self._rank)
        return message

    def send(self, message: FromFollower) -> None:
        """Tell rank 0, or nobody if it is gone."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(message)

    def _follow(self, connect: Callable[[], Mesh], load: Callable[[Mesh], Worker]) -> int:
        self._state = "connects"
        self.send(Connecting())
        mesh = self._mesh = connect()
        self._state = "loads"
        worker = self._worker = load(mesh)
        self._state = "is idle"
        self.send(Ready())
        while isinstance(message := self.receive(), Step):
            self._state = "computes"
            comm = worker.follow(message.requests, message.prompts)
            self._state = "is idle"
            self.send(Done(comm))
        return 1 if message is None else 0

    def _leave(self) -> None:
        """End the threads: one that held the mesh last would take it apart while the interpreter ends, which aborts."""
        self._leaves.set()
        stop_receiving(self._connection)
        for thread in self._threads:
            thread.join(_LAST_WORDS_SECONDS)

    def _listen(self) -> None:
        """Take what rank 0 says, whatever the main thread does; end the process if rank 0 goes and nobody looks."""
        try:
            while True:
                message: ToFollower = self._connection.recv()
                self._inbox.put(message)
                if isinstance(message, Stop):
                    return
        except (EOFError, OSError):
            self._inbox.put(None)
        except Exception as error:
            self._inbox.put(error)  # what was sent does not unpickle here
            return
        if not self._leaves.wait(_LAST_WORDS_SECONDS):
            # In a kernel, or in a wait for a rank that will never answer.
            logger.error("rank %d ends while it %s, since rank 0 is gone", self._rank, self._doing())
            sys.stderr.flush()
            os._exit(1)

    def _beat(self) -> None:
        """Tell at intervals what has been done."""
        while not self._leaves.wait(self._beat_seconds):
            stages = 0 if self._worker is None else self._worker.decoder.stages_done
            self.send(Beat(tasks_done() + stages, self._doing()))

    def _doing(self) -> str:
        waits = None if self._mesh is None else self._mesh.comm.doing
        return self._state if waits is None else f"{self._state} ({waits[0]} since {waits[1]:.1f} s)"
