"""The engine as the API process sees it: requests in, streams of deltas out, and whether it is alive.

May import messages, streams and zmq, and core in the process that it starts. Invariant: every stream ends, with a last
delta or with an exception, whatever happens to the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from longfill.config import EngineArgs
from longfill.errors import ConfigError, EngineDeadError, LongfillError, RequestError, StoppingError
from longfill.request import TokenIds
from longfill.server.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    Ledger,
    OutputDelta,
    RequestRefused,
    StepOutputs,
    StepRecord,
    Stop,
    ToEngine,
)
from longfill.server.streams import RequestStream

logger = logging.getLogger(__name__)

KEPT_STEPS = 300
_DIES_WITHIN = 3.0
"""Seconds that a process which was told to stop, or has failed, gets before it is killed."""

StepListener = Callable[[StepRecord], None]
DeltaListener = Callable[[RequestStream, OutputDelta], None]


def _sockets_folder() -> str:
    """A folder that only this user can open. Raises ConfigError where there can be none, or none with a short name."""
    try:
        folder = tempfile.mkdtemp(prefix="longfill-")
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: the engine's sockets need a temporary folder, and there is none ({error})"
        ) from None
    if len(os.fsencode(f"{folder}/from")) > zmq.IPC_PATH_MAX_LEN:
        os.rmdir(folder)
        raise ConfigError(
            f"TMPDIR: {tempfile.gettempdir()} is too long a name for sockets in it (at most {zmq.IPC_PATH_MAX_LEN} "
            "bytes with theirs); set TMPDIR to a shorter one"
        )
    return folder


def _run_engine(*args: Any) -> None:
    """The engine, and torch with it, is imported in its own process only: this one stays small and starts quickly."""
    from longfill.server.core import run_engine

    run_engine(*args)


class EngineClient:
    """Starts the engine's process and talks to it, all in one event loop."""

    def __init__(self, args: EngineArgs, *, heartbeat_timeout: float, log_level: str) -> None:
        self.ready: EngineReady
        """Once `start` has returned."""
        self.streams: dict[str, RequestStream] = {}
        """Unfinished requests by id, oldest first."""
        self.steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.ledger = Ledger()
        """The newest."""
        self.on_step: list[StepListener] = []
        self.on_delta: list[DeltaListener] = []
        self.on_failure: Callable[[], None] | None = None
        """Called once, if the engine ends without having been told to."""
        self._args = args
        self._timeout = heartbeat_timeout
        self._log_level = log_level
        self._advanced = time.monotonic()
        """When a heartbeat last showed that work was done."""
        self._work = -1
        self._failure: str | None = None
        self._stopping = False
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._folder = _sockets_folder()
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: BaseProcess | None = None

    async def start(self) -> None:
        """Load the model in the engine's process. Raises LongfillError, with the engine's own words, if it cannot."""
        self._inbox, from_engine = self._bind(zmq.PULL, "from")
        self._outbox, to_engine = self._bind(zmq.PUSH, "to")
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=_run_engine,
            args=(self._args, to_engine, from_engine, self._log_level, os.getpid()),
            name="longfill-engine",
            daemon=True,
        )
        self._process.start()
        # It ignores the SIGTERM that multiprocessing sends at exit, and would then wait for.
        atexit.register(self._process.kill)
        died = asyncio.get_running_loop().create_task(self._died())
        first = asyncio.ensure_future(self._first_words())
        await asyncio.wait({died, first}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            # What it had to say may have come together with its end.
            await asyncio.wait({first}, timeout=0.2)
        message = first.result() if first.done() else None
        if not isinstance(message, EngineReady):
            died.cancel()
            first.cancel()
            if isinstance(message, EngineFailed):
                raise LongfillError(message.message if message.expected else f"{message.message}\n{message.traceback}")
            raise LongfillError(f"the engine's process ended while it started ({self._exit_words()})")
        self.ready = message
        self._advanced = time.monotonic()
        self._tasks = [died, asyncio.create_task(self._listen())]

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self.ready.pid

    @property
    def failure(self) -> str | None:
        """Why there is no engine any more."""
        return self._failure

    @property
    def hung_for(self) -> float:
        """Seconds in which no work was done that a heartbeat told of."""
        return time.monotonic() - self._advanced

    @property
    def is_alive(self) -> bool:
        """Whether the engine's process is there and does something: computes, or waits for requests."""
        return self._failure is None and self.hung_for < self._timeout

    def free_id(self, wanted: str) -> str:
        """`wanted`, or that with a number behind it where a request of this name has not ended."""
        names = (wanted, *(f"{wanted}~{number}" for number in range(2, len(self.streams) + 3)))
        return next(name for name in names if name not in self.streams)

    def add(self, request: AddRequest, token_ids: TokenIds) -> RequestStream:
        """Queue a request. Raises EngineDeadError, and RequestError for an id that is in use."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if request.request_id in self.streams:
            raise RequestError(f"request {request.request_id}: another request with this id has not ended yet")
        stream = RequestStream(request, int(token_ids.size), self._abort)
        self._send(request, token_ids.tobytes())
        self.streams[request.request_id] = stream
        return stream

    async def stop(self) -> None:
        """End the engine's process, by force if need be; streams that are left end with StoppingError."""
        self._stopping = True
        if self._process is not None and self._failure is None:
            if self._tasks:
                with contextlib.suppress(zmq.ZMQError):
                    self._send(Stop())
            else:  # it loads the model, and reads nothing before that is done
                self._process.kill()
        await self._wait_for_exit()
        self.end_streams(StoppingError("the server has stopped"))
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _bind(self, kind: int, name: str) -> tuple[zmq.asyncio.Socket, str]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder}/{name}"
        socket.bind(address)
        return socket, address

    def _send(self, message: ToEngine, *frames: bytes) -> None:
        # Without a limit on what is queued a send never waits, and the parent class's send is no coroutine.
        parts = [msgspec.msgpack.encode(message), *frames]
        zmq.Socket.send_multipart(zmq.Socket.shadow(self._outbox), parts, zmq.NOBLOCK, copy=False)

    def _abort(self, request_id: str) -> None:
        if self._failure is None and not self._stopping:
            self._send(AbortRequests([request_id]))

    async def _receive(self) -> FromEngine:
        return self._decoder.decode(await self._inbox.recv())

    async def _first_words(self) -> FromEngine:
        """What the engine says first; its heartbeat has a socket of its own, and may come before."""
        while isinstance(message := await self._receive(), Heartbeat):
            pass
        return message

    async def _listen(self) -> None:
        """Book what the engine says until it fails."""
        try:
            while self._failure is None:
                self._hear(await self._receive())
        except Exception as error:
            # Nobody would hear the engine any more, and clients would wait for ever.
            logger.exception("what the engine said could not be booked")
            self._fail(f"what the engine said could not be booked ({type(error).__name__}: {error})")

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._book(message)
        elif isinstance(message, Heartbeat):
            if message.work != self._work:
                self._work, self._advanced = message.work, time.monotonic()
            self.ledger = message.ledger
        elif isinstance(message, RequestRefused):
            stream = self.streams.pop(message.request_id, None)
            if stream is not None:
                stream.fail(RequestError(message.message))
        elif isinstance(message, EngineFailed):
            self._fail(message.message)

    def _book(self, message: StepOutputs) -> None:
        self.ledger = message.ledger
        if message.step is not None:
            self._advanced = time.monotonic()
            self.steps.append(message.step)
            for progress in message.step.requests:
                stream = self.streams.get(progress.request_id) or self._parent(progress.request_id)
                if stream is not None:
                    stream.observe(progress)
            for step_listener in self.on_step:
                step_listener(message.step)
        for delta in message.outputs:
            stream = self.streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.finished:
                del self.streams[delta.request_id]
            stream.put(delta)
            for delta_listener in self.on_delta:
                delta_listener(stream, delta)

    def _parent(self, request_id: str) -> RequestStream | None:
        """The request that one of several completions, named `i_ID`, belongs to."""
        return self.streams.get(request_id.partition("_")[2])

    async def _died(self) -> None:
        """Wait for the process to end; without having been told to, that is a failure."""
        assert self._process is not None
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        handle = os.dup(self._process.sentinel)  # readable once the process is gone
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        # Its last words may still be on their way.
        await asyncio.sleep(0.1)
        self._fail(f"the engine's process has ended ({self._exit_words()})")

    def _fail(self, why: str) -> None:
        if self._failure is not None or self._stopping:
            return
        self._failure = why
        logger.error("the engine has failed: %s", why)
        self.end_streams(EngineDeadError(why))
        if self.on_failure is not None:
            self.on_failure()

    def end_streams(self, error: LongfillError) -> None:
        """Have every stream end with an error."""
        for stream in self.streams.values():
            stream.fail(error)
        self.streams.clear()

    def _exit_words(self) -> str:
        assert self._process is not None
        self._process.join(timeout=1)
        code = self._process.exitcode
        if code is None:
            return "still running"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    async def _wait_for_exit(self) -> None:
        process = self._process
        if process is None:
            return
        until = time.monotonic() + _DIES_WITHIN
        while process.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if process.is_alive():
            logger.warning("the engine's process does not end; killing it")
            process.kill()
            await asyncio.to_thread(process.join, 2)
