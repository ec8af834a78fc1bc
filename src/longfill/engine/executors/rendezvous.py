"""How ranks that something else has started find each other, and make sure that they are the right ones.

May import parallel, models and errors. Invariant: every rank ends within its time limit with a reason that names the
rank and the address that are to blame, or all of them go on; rank 0 decides, and says so through the store.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

import longfill
from longfill.config import EngineArgs, flag_name
from longfill.engine.executors.launch import Launch
from longfill.errors import ParallelError
from longfill.kernels.cpu.extension import ISA_VARIABLE, describe
from longfill.models.config import ModelConfig
from longfill.models.hub import weights_revision

_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_VERDICT_SECONDS = 5.0
"""What rank 0's decision may take beyond its own time limit."""
_OWN = ("model", "tokenizer", "num_threads")
"""Knobs that may differ between ranks: where the files are, of which the model's are compared themselves and the
tokenizer's are rank 0's alone, and how many cores."""

_meetings = itertools.count()
"""Every rank of a program makes its engines in the same order."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself."""

    rank: int
    world: int
    host: str
    pid: int
    address: str
    """Where this rank listens."""
    versions: dict[str, str]
    kernels: str
    """Which native kernels it has; nothing where none are wanted."""
    config: str
    """Digest of the model's configuration."""
    weights: str
    args: dict[str, str]

    @classmethod
    def of(cls, launch: Launch, address: str, args: EngineArgs, folder: Path, config: ModelConfig) -> Hello:
        knobs = {name: repr(value) for name, value in vars(args).items() if name not in _OWN}
        return cls(
            launch.rank, launch.world, socket.gethostname(), os.getpid(), address,
            {"longfill": longfill.__version__, "torch": torch.__version__},
            "" if args.kernel_backend == "reference" else describe(),
            hashlib.sha256(repr(config).encode()).hexdigest(), weights_revision(folder), knobs,
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def difference(self, other: Hello) -> str | None:
        """Why the two cannot work together, if they cannot; it says what `other` has and then what this one has."""
        if other.world != self.world:
            return f"has WORLD_SIZE {other.world}, {self.name} has {self.world}: start all with the same"
        for package, version in self.versions.items():
            if other.versions.get(package) != version:
                theirs = other.versions.get(package)
                return f"runs {package} {theirs}, {self.name} runs {version}: install the same version everywhere"
        if other.kernels != self.kernels:
            return (
                f"computes with {other.kernels}, {self.name} with {self.kernels}, whose bits differ: install the same "
                f"everywhere, or set {ISA_VARIABLE} to what all have"
            )
        for knob in sorted({*self.args, *other.args}):
            mine, theirs = self.args.get(knob), other.args.get(knob)
            if mine != theirs:
                return f"was started with {flag_name(knob)} {theirs}, {self.name} with {mine}: give all the same"
        if other.config != self.config:
            return f"has another config.json than {self.name}: give all the same model"
        if other.weights != self.weights:
            return f"has other weights than {self.name}, with the same config.json: give all the same model"
        loopback = [hello for hello in (self, other) if hello.address.startswith("127.")]
        if other.host != self.host and loopback:
            return (
                f"is on another machine than {self.name}, and {loopback[0].name} would listen at "
                f"{loopback[0].address}: set MASTER_ADDR to an address that all machines reach"
            )
        return None


class Meeting:
    """One engine's ranks at the store."""

    def __init__(self, launch: Launch, time_limit: float) -> None:
        """Reach the store, or make it. Raises ParallelError where that takes longer than `time_limit` seconds."""
        self.launch = launch
        self._time_limit = time_limit
        self.me = f"rank {launch.rank} of {launch.world} ({socket.gethostname()})"
        has_store = launch.rank == 0 and not launch.store_is_elsewhere
        self.address = self._own_address() if has_store else self._reach()
        store = self._own_store() if has_store else self._other_store()
        self.store: Store = PrefixStore(f"longfill/{launch.attempt}/{next(_meetings)}", store)

    def introduce(self, hello: Hello) -> None:
        """Say who this rank is. Raises ParallelError where another process says that it is the same rank."""
        key = f"hello/{hello.rank}"
        if self._ask(lambda: self.store.add(f"count/{hello.rank}", 1)) > 1:
            other = Hello(**json.loads(self._ask(lambda: self.store.get(key))))
            raise ParallelError(
                f"rank {hello.rank} is there twice at {self.launch.place}: {other.name} and pid {hello.pid} on "
                f"{hello.host}; give every process a RANK of its own"
            )
        self._ask(lambda: self.store.set(key, json.dumps(asdict(hello))))

    def gather(self, mine: Hello) -> None:
        """Rank 0: wait for all others, and look whether they fit. Raises ParallelError, and tells all, if not."""
        try:
            until = time.monotonic() + self._time_limit
            for rank in range(1, self.launch.world):
                why = f"not there after {self._time_limit:g} s; start it, or look why it has ended"
                hello = Hello(**self._wait(f"hello/{rank}", until, f"rank {rank}", why))
                difference = mine.difference(hello)
                if difference is not None:
                    raise ParallelError(f"{hello.name} at {self.launch.place} {difference}")
        except ParallelError as error:
            verdict = json.dumps({"error": str(error)})
            self._ask(lambda: self.store.set("verdict", verdict))
            time.sleep(5 * _LOOK_SECONDS)  # the store may end with this rank: let the others look once more
            raise

    def invite(self, port: int, key: bytes) -> None:
        """Rank 0: tell all where the control connection is had."""
        self._ask(lambda: self.store.set("verdict", json.dumps({"port": port, "key": key.hex()})))

    def invitation(self) -> tuple[Hello, int, bytes]:
        """Another rank: rank 0, the port of its control connection and the key to it.

        Raises ParallelError with rank 0's reason where the ranks do not fit.
        """
        limit = self._time_limit
        why = f"not there after {limit:g} s; start it, or look whether this is the right address"
        first = Hello(**self._wait("hello/0", time.monotonic() + limit, "rank 0", why))
        # It waits for others no longer than its own limit, which it began after this rank at most.
        why = f"no decision within {limit:g} s"
        verdict = self._wait("verdict", time.monotonic() + limit + _VERDICT_SECONDS, first.name, why)
        if "error" in verdict:
            raise ParallelError(f"{self.me}: {first.name} has given up: {verdict['error']}")
        return first, verdict["port"], bytes.fromhex(verdict["key"])

    def _wait(self, key: str, until: float, whom: str, why: str) -> dict[str, Any]:
        while not self._ask(lambda: self.store.check([key])):
            if time.monotonic() > until:
                raise ParallelError(f"{self.me} waits for {whom} at {self.launch.place}: {why}")
            time.sleep(_LOOK_SECONDS)
        value: dict[str, Any] = json.loads(self._ask(lambda: self.store.get(key)))
        return value

    def _ask(self, question: Callable[[], Value]) -> Value:
        try:
            return question()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ParallelError(
                f"{self.me}: the store at {self.launch.place} is gone ({why}): rank 0 has ended"
            ) from None

    def _own_address(self) -> str:
        """The address of this machine from which `MASTER_ADDR` is reached."""
        host, port = self.launch.address, self.launch.port

        def look() -> str:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as end:
                end.connect(address)  # sends nothing
                return str(end.getsockname()[0])

        return self._retry(look)

    def _reach(self) -> str:
        """The same, once the store's host answers."""
        place = self.launch.address, self.launch.port

        def look() -> str:
            with socket.create_connection(place, timeout=min(self._time_limit, _CONNECT_SECONDS)) as end:
                return str(end.getsockname()[0])

        return self._retry(look)

    def _retry(self, look: Callable[[], str]) -> str:
        until = time.monotonic() + self._time_limit
        while True:
            try:
                return look()
            except OSError as error:
                if time.monotonic() > until:
                    raise ParallelError(
                        f"{self.me} does not reach rank 0 at {self.launch.place} within {self._time_limit:g} s: "
                        f"{error.strerror or error}; start rank 0 there, or look whether this is the right address"
                    ) from None
            time.sleep(_LOOK_SECONDS)

    def _own_store(self) -> TCPStore:
        try:
            return self._tcp_store(is_master=True)
        except RuntimeError as error:
            why = "the port is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise ParallelError(f"{self.me}: cannot have a store at {self.launch.place}: {why}") from None

    def _other_store(self) -> TCPStore:
        """Whatever else listens there may be mute, on which torch would wait without a limit: in a thread it may."""
        stores: list[TCPStore | RuntimeError] = []

        def connect() -> None:
            try:
                stores.append(self._tcp_store(is_master=False))
            except RuntimeError as error:
                stores.append(error)

        thread = threading.Thread(target=connect, name="longfill-store", daemon=True)
        thread.start()
        thread.join(self._time_limit)
        store = stores[0] if stores else None
        if not isinstance(store, TCPStore):
            raise ParallelError(
                f"{self.me}: what listens at {self.launch.place} does not answer as a store; look whether this is the "
                "right address"
            )
        return store

    def _tcp_store(self, *, is_master: bool) -> TCPStore:
        return TCPStore(
            self.launch.address, self.launch.port, is_master=is_master, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=self._time_limit),
        )  # fmt: skip
