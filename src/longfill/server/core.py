"""The engine's process: requests from a socket, steps, what they gave to a socket, and a heartbeat beside it.

May import the engine and messages. Invariant: between two steps every message that has come is handled, so an abort
takes effect within one step; and the process never outlives the one that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback

import msgspec
import numpy as np
import zmq

from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.engine.executors import executor_backend
from longfill.errors import ConfigError, LongfillError
from longfill.server.deltas import output_delta, step_record
from longfill.server.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    Ledger,
    RequestRefused,
    StepOutputs,
    Stop,
    ToEngine,
)

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_IDLE_POLL_MS = 500
"""An idle engine looks up so often, which its heartbeat shows."""
_PARENT_POLL = 0.5
_LINGER_MS = 2000
"""What the last words get to leave."""
_STALL_SLEEP = 0.002
"""Between looks where requests wait but no step can be made: a thread that spins would take a core from nothing."""


def run_engine(args: EngineArgs, to_engine: str, from_engine: str, log_level: str, parent: int) -> None:
    """The process: load, serve until told to stop, or until process `parent` is gone.

    `to_engine` and `from_engine` are addresses that the API process has bound.
    """
    threading.Thread(target=_end_with, args=(parent,), name="longfill-parent", daemon=True).start()
    # Ctrl-C and a supervisor's SIGTERM reach the whole group; the API process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s engine: %(message)s"
    )
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.set_hwm(0)
    inbox.connect(to_engine)
    outbox.connect(from_engine)
    core, code = None, 0
    try:
        core = EngineCore(args, inbox, outbox)
        threading.Thread(
            target=_beat, args=(core, context, from_engine), name="longfill-heartbeat", daemon=True
        ).start()
        core.serve()
    except BaseException as error:
        code = 1
        expected = isinstance(error, LongfillError)
        if not expected:
            logger.exception("the engine failed during a %s", "start" if core is None else "step")
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        failed = EngineFailed(message=message, expected=expected, traceback=traceback.format_exc())
        _send(outbox, failed)
    inbox.close(0)
    outbox.close()
    context.destroy(linger=_LINGER_MS)
    # Not by way of the interpreter's end, which takes apart a model of gigabytes while a thread still looks at it.
    sys.stderr.flush()
    os._exit(code)


class EngineCore:
    """The step loop over an engine, between two sockets."""

    def __init__(self, args: EngineArgs, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        if executor_backend(args) == "external_launcher":
            raise ConfigError(
                "--distributed-executor-backend external_launcher: a server starts its ranks itself; run it without "
                "torchrun, or give --distributed-executor-backend mp"
            )
        self.engine = LLMEngine(args)
        self.rounds = 0
        """Of the loop."""
        self._inbox = inbox
        self._outbox = outbox
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def serve(self) -> None:
        """Say that requests are taken, then take them until told to stop."""
        self._send(self._ready())
        while self._receive(wait=not self.engine.has_unfinished_requests):
            self.engine.executor.check()
            if self.engine.has_unfinished_requests:
                self._step()
            self.rounds += 1
        self.engine.close()

    @property
    def work(self) -> int:
        """Grows while anything is done."""
        return self.rounds + self.engine.work_done

    @property
    def ledger(self) -> Ledger:
        """What the engine holds now."""
        cache, scheduler = self.engine.cache, self.engine.scheduler
        used = cache.num_usable_pages - cache.num_free_pages
        return Ledger(used, cache.num_cached_pages, scheduler.num_running, scheduler.num_waiting)

    def _step(self) -> None:
        outputs = [output_delta(output) for output in self.engine.step()]
        step = None if self.engine.last_step is None else step_record(self.engine.last_step)
        if step is not None or outputs:
            self._send(StepOutputs(outputs=outputs, ledger=self.ledger, step=step))
        else:
            time.sleep(_STALL_SLEEP)

    def _receive(self, *, wait: bool) -> bool:
        """Handle all messages that are there, waiting a little for the first; False once told to stop."""
        timeout = _IDLE_POLL_MS if wait else 0
        while self._inbox.poll(timeout):
            head, *rest = self._inbox.recv_multipart(copy=False)
            message = self._decoder.decode(head.buffer)
            if isinstance(message, Stop):
                return False
            if isinstance(message, AddRequest):
                self._add(message, np.frombuffer(rest[0].buffer, dtype=np.int64))
            else:
                self._abort(message)
            timeout = 0
        return True

    def _add(self, message: AddRequest, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        try:
            self.engine.add_request(
                message.request_id,
                token_ids,
                message.params,
                cache_salt=message.cache_salt,
                priority=message.priority,
                tenant=message.tenant,
                kv_transfer_params=message.kv_transfer_params,
            )
        except LongfillError as error:
            self._send(RequestRefused(request_id=message.request_id, message=str(error)))

    def _abort(self, message: AbortRequests) -> None:
        outputs = [self.engine.abort_request(request_id) for request_id in message.request_ids]
        ended = [output_delta(output) for output in outputs if output is not None]
        if ended:
            self._send(StepOutputs(outputs=ended, ledger=self.ledger))

    def _ready(self) -> EngineReady:
        engine = self.engine
        worker = engine.worker
        return EngineReady(
            pid=os.getpid(),
            model=str(engine.folder),
            model_type=engine.model_config.model_type,
            max_model_len=worker.memory.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            num_pages=engine.cache.num_usable_pages,
            page_size=engine.cache.page_size,
            eos_token_ids=list(engine.scheduler.config.eos_token_ids),
            memory=worker.memory.report(),
            kernels=dict(worker.kernels.paths),
            num_threads=worker.num_threads,
        )

    def _send(self, message: FromEngine) -> None:
        _send(self._outbox, message)


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(msgspec.msgpack.encode(message), copy=False)


def _end_with(parent: int) -> None:
    """End the process soon after another one has ended."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL)
    os._exit(1)


def _beat(core: EngineCore, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """Tell every second what has been done."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    while True:
        try:
            _send(socket, Heartbeat(work=core.work, ledger=core.ledger))
        except zmq.ZMQError:  # the context is closed: the process ends
            return
        except Exception:
            # An engine that seems hung, and is not, would be restarted for nothing that anybody can find.
            logger.exception("the heartbeat has failed")
            os._exit(1)
        time.sleep(HEARTBEAT_SECONDS)
