"""One server's life: bind, load, serve, drain, end; and what each way to end returns.

May import the server's other files and uvicorn. Invariant: the address is bound before the model is loaded, and
connections are taken only once requests are; the process ends within seconds of its engine, with a code other than 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from longfill.config import EngineArgs
from longfill.engine.token_bytes import structured_outputs
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError, StoppingError
from longfill.server.admission import Admission
from longfill.server.app import make_app
from longfill.server.args import ServerArgs
from longfill.server.cache_report import CacheReports
from longfill.server.client import EngineClient
from longfill.server.http_head import HeadLimit
from longfill.server.metrics import Metrics
from longfill.server.routes_system import effective_config
from longfill.server.state import AppState

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
"""What handlers get to answer with 5xx once the engine has failed."""
_IDLE_SECONDS = 75
"""A connection without a request stays open so long: longer than clients (httpx: 5 s) and proxies (60 s) keep one, as a
server that closes first may do so just when the next request is on its way."""
_SHORT_ANSWER_SECONDS = 0.1
"""And where everything is to end at once."""
_CLOSE_SECONDS = 2
"""What connections get to close at the end."""
_OPEN_FILES = 65536

EXIT_ENGINE_DEAD = 1


def run_server(args: EngineArgs, server_args: ServerArgs, *, on_ready: Callable[[AppState, str], None]) -> int:
    """Serve until a signal or the engine's end; returns the exit code. `on_ready` gets the state and the URL.

    Raises LongfillError, before any connection is taken, where the address or the model cannot be had.
    """
    logging.basicConfig(
        stream=sys.stderr, level=server_args.log_level.upper(), format="%(asctime)s %(levelname)s api: %(message)s"
    )
    _raise_file_limit()
    _check_certificate(server_args)
    listener = _bind(server_args.host, server_args.port)
    # A thread that computes (JSON, templates) hands over after this long, so that the event loop never waits for more
    # than a few of these.
    sys.setswitchinterval(0.001)
    return asyncio.run(_serve(args, server_args, listener, on_ready))


def _raise_file_limit() -> None:
    """Take as many open files as the system grants: each connection is one, and the usual 1024 are soon gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_certificate(args: ServerArgs) -> None:
    """Raise ConfigError for files that HTTPS cannot be served with, before the model is loaded."""
    if args.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")  # never ask the terminal
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {args.ssl_certfile} --ssl-keyfile {args.ssl_keyfile}: {error.strerror or error}; give a "
            "certificate and its key, both in PEM, the key without a passphrase"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    """Take the address, without listening: until the model is there, a client's connection is refused."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio sets TCP_NODELAY on connections: without it an answer waits some 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise _taken(host, port, error) from None
    return listener


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"--host {host} --port {port}: cannot be had ({error.strerror or error}); choose another, or end what uses it"
    )


async def _serve(
    args: EngineArgs, server_args: ServerArgs, listener: socket.socket, on_ready: Callable[[AppState, str], None]
) -> int:
    client = EngineClient(args, heartbeat_timeout=server_args.heartbeat_timeout, log_level=server_args.log_level)
    with _interrupts() as interrupted:
        try:
            began = time.monotonic()
            await _or_interrupt(client.start(), interrupted)
            loaded = asyncio.to_thread(_state, client, args, server_args, time.monotonic() - began)
            state = await _or_interrupt(loaded, interrupted)
            server = _Server(state, listener, on_ready)
            return await server.run()
        except _InterruptedError:
            return 0
        finally:
            await client.stop()
            listener.close()


def _state(client: EngineClient, args: EngineArgs, server_args: ServerArgs, load_seconds: float) -> AppState:
    ready = client.ready
    folder = args.tokenizer or ready.model
    tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_folder(folder)
    forms = None if tokenizer is None else structured_outputs(tokenizer, ready.eos_token_ids, ready.vocab_size)
    admission = Admission(
        max_num_queued_reqs=server_args.max_num_queued_reqs, max_num_queued_tokens=server_args.max_num_queued_tokens
    )
    state = AppState(
        client=client, tokenizer=tokenizer, forms=forms, args=args, server_args=server_args, admission=admission,
        metrics=Metrics((server_args.served_model_name or (args.model,))[0], ready), load_seconds=load_seconds,
        cache_reports=CacheReports(
            page_size=ready.page_size,
            enabled=args.enable_prefix_caching,
            decode=None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        ),
    )  # fmt: skip
    client.on_step += [state.metrics.on_step, lambda step: admission.prefilled(step.num_prompt_tokens)]
    client.on_delta.append(state.metrics.on_delta)
    return state


class _InterruptedError(Exception):
    """A signal came while the model was loaded."""


@contextlib.contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """SIGINT and SIGTERM as an event, until somebody else takes them."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _or_interrupt(work: Coroutine[Any, Any, T], event: asyncio.Event) -> T:
    """The result of `work`. Raises _InterruptedError where the event comes first."""
    task, waits = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
    waits.cancel()
    if not task.done():
        task.cancel()
        raise _InterruptedError
    return task.result()


class _Server(uvicorn.Server):
    """uvicorn, with our signals: the first drains, the second ends at once."""

    def __init__(self, state: AppState, listener: socket.socket, on_ready: Callable[[AppState, str], None]) -> None:
        args = state.server_args
        config = uvicorn.Config(
            make_app(state),
            http=HeadLimit,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
        )
        super().__init__(config)
        self._state = state
        self._listener = listener
        self._on_ready = on_ready
        self._signals = 0
        self._code = 0

    async def run(self) -> int:  # type: ignore[override]
        """Serve to the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        client = self._state.client
        client.on_failure = self._engine_failed
        if client.failure is not None:
            self._engine_failed()
        logger.info("configuration: %s", json.dumps(effective_config(self._state), default=str))
        try:
            self._listener.listen(self.config.backlog)
        except OSError as error:  # two servers can bind one address, until one of them listens
            raise _taken(self._state.server_args.host, self._state.server_args.port, error) from None
        await self.serve(sockets=[self._listener])
        self._state.stopped = True
        return self._code

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers are not wanted."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        args = self._state.server_args
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if args.ssl_certfile is None else "https"
        self._on_ready(self._state, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    def _signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("second signal: ending at once")
            self._state.client.end_streams(StoppingError("the server was stopped at once"))
            self._stop_now = asyncio.create_task(self._answered(_SHORT_ANSWER_SECONDS, force=True))
            return
        self._state.draining = True
        waiting = len(self._state.admission.tickets)
        logger.info(
            "draining: %d requests get up to %g s; a second signal ends at once",
            waiting, self._state.server_args.shutdown_timeout,
        )  # fmt: skip
        self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        until = time.monotonic() + self._state.server_args.shutdown_timeout
        tickets = self._state.admission.tickets
        while tickets and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if tickets:
            logger.warning("%d requests are not done after --shutdown-timeout and are aborted", len(tickets))
            self._state.client.end_streams(StoppingError("the server stops: --shutdown-timeout has passed"))
            await asyncio.sleep(_ANSWER_SECONDS)
        self._end()

    def _engine_failed(self) -> None:
        self._code = EXIT_ENGINE_DEAD
        self._failed = asyncio.create_task(self._answered(_ANSWER_SECONDS))

    async def _answered(self, seconds: float, *, force: bool = False) -> None:
        """End once handlers have had a moment to say why."""
        await asyncio.sleep(seconds)
        self._end(force=force)

    def _end(self, *, force: bool = False) -> None:
        self._state.stopped = True
        self.should_exit = True
        self.force_exit = force or self.force_exit
