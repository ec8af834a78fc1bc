"""The engine's process and its client: what is asked for ends, whatever happens to either of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from longfill.config import EngineArgs
from longfill.errors import EngineDeadError, LongfillError, RequestError
from longfill.request import RequestOutputKind, SamplingParams, TokenIds
from longfill.server.client import EngineClient
from longfill.server.messages import AddRequest, Ledger, StepRecord
from longfill.server.streams import RequestStream

LONG = 12_000


def prompt(length: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(300, 500, length)


@asynccontextmanager
async def started(*, timeout: float = 8.0, **args: Any) -> AsyncIterator[EngineClient]:
    given: dict[str, Any] = {"max_model_len": 20_000, "max_num_batched_tokens": 256, "num_threads": 1}
    given["memory_budget"] = "2GiB"
    client = EngineClient(EngineArgs(model="needle", **(given | args)), heartbeat_timeout=timeout, log_level="warning")
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


def request(name: str, **params: Any) -> AddRequest:
    fields = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return AddRequest(request_id=name, params=SamplingParams(**(fields | params)))


async def rest(stream: RequestStream) -> list[int]:
    """Tokens to the end."""
    tokens: list[int] = []
    while True:
        delta = await asyncio.wait_for(stream.next(), 60)
        tokens += [token for part in delta.completions for token in part.token_ids]
        if delta.finished:
            return tokens


async def end(stream: RequestStream) -> None:
    """Take deltas until an exception ends them; fails the test where none does."""
    while True:
        await asyncio.wait_for(stream.next(), 5)


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until it holds; fails the test where it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


def test_the_engines_death_ends_every_request_and_refuses_others() -> None:
    async def body() -> None:
        async with started() as client:
            told: list[None] = []
            client.on_failure = lambda: told.append(None)
            streams = [client.add(request(f"r{i}"), prompt(LONG, i)) for i in range(3)]
            await until(lambda: streams[0].state == "prefill", 30)
            os.kill(client.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="killed by signal 9"):
                    await end(stream)
            assert not client.is_alive
            assert told == [None]
            with pytest.raises(EngineDeadError):
                client.add(request("late"), prompt(9))
            assert client.streams == {}

    run(body)


def test_a_hung_engine_is_not_alive_within_ten_seconds_and_alive_again_once_it_goes_on() -> None:
    async def body() -> None:
        async with started() as client:
            stream = client.add(request("r"), prompt(LONG))
            await until(lambda: stream.state == "prefill", 30)
            os.kill(client.pid, signal.SIGSTOP)
            try:
                assert await until(lambda: not client.is_alive, 10) > 5
                assert client.failure is None
            finally:
                os.kill(client.pid, signal.SIGCONT)
            await until(lambda: client.is_alive, 5)
            assert len(await rest(stream)) == 4

    run(body)


def test_a_step_longer_than_the_timeout_is_alive_and_so_is_an_idle_engine() -> None:
    """API-12: what is watched is the kernels' work, not the end of steps."""

    async def body() -> None:
        timeout = 2.5
        async with started(timeout=timeout, max_model_len=66_000, max_num_batched_tokens=65_536) as client:
            dead_at: list[float] = []
            stream = client.add(request("r"), prompt(60_000))
            task = asyncio.create_task(rest(stream))
            while not task.done():
                if not client.is_alive:
                    dead_at.append(time.monotonic())
                await asyncio.sleep(0.05)
            assert len(task.result()) == 4
            assert max(step.seconds["step"] for step in client.steps) > timeout
            assert not dead_at
            await asyncio.sleep(timeout + 1)
            assert client.is_alive

    run(body)


def test_an_error_that_belongs_to_no_request_ends_the_engine_with_its_words() -> None:
    async def body() -> None:
        async with started() as client:
            stream = client.add(request("r"), prompt(LONG))
            await until(lambda: stream.state == "prefill", 30)
            zmq.Socket.send(zmq.Socket.shadow(client._outbox), b"no message of ours")
            with pytest.raises(EngineDeadError, match="ValidationError"):
                await end(stream)
            process = client._process
            assert process is not None
            await until(lambda: process.exitcode == 1, 5)

    run(body)


def test_an_engine_that_cannot_start_says_why_and_is_gone() -> None:
    async def body() -> None:
        client = EngineClient(EngineArgs(model="/nowhere/at/all"), heartbeat_timeout=8, log_level="warning")
        with pytest.raises(LongfillError, match="/nowhere/at/all"):
            await client.start()
        await client.stop()
        assert client._process is not None
        assert client._process.exitcode == 1

    run(body)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_in_any_phase_gives_all_pages_back(phase: str, n: int) -> None:
    async def body() -> None:
        async with started(max_num_seqs=4) as client:
            assert client.ledger == Ledger()
            params = {"n": n, "temperature": 1.0 if n > 1 else 0.0, "max_tokens": 5000}
            others = []
            if phase == "waiting":
                others = [client.add(request(f"o{i}", max_tokens=5000), prompt(LONG, i)) for i in range(4)]
            with client.add(request("r", **params), prompt(300 if phase == "decode" else LONG, 9)) as stream:
                if phase == "waiting":
                    await until(lambda: client.ledger.num_waiting > 0, 30)
                else:
                    await until(lambda: stream.state == phase, 30)
            for other in others:
                other.abort()
            for ended in (*others, stream):
                await rest(ended)
            left = client.ledger
            assert left.pages_used == left.num_running == left.num_waiting == 0

    run(body)


def test_a_listener_that_raises_ends_all_requests_rather_than_leaving_them_to_wait() -> None:
    def broken(_: StepRecord) -> None:
        raise ValueError("counters can only grow")

    async def body() -> None:
        async with started() as client:
            told: list[None] = []
            client.on_failure = lambda: told.append(None)
            client.on_step.append(broken)
            stream = client.add(request("r"), prompt(3))
            with pytest.raises(EngineDeadError, match="counters can only grow"):
                await end(stream)
            assert told == [None]
            assert not client.is_alive

    run(body)


def test_what_the_engine_refuses_is_the_requests_own_error_and_ids_are_taken_once() -> None:
    async def body() -> None:
        async with started() as client:
            refused = client.add(request("r"), prompt(20_000))
            with pytest.raises(RequestError, match="20,000"):
                await asyncio.wait_for(refused.next(), 10)
            stream = client.add(request("r"), prompt(3))
            with pytest.raises(RequestError, match="has not ended"):
                client.add(request("r"), prompt(3))
            assert len(await rest(stream)) == 4

    run(body)


_PARENT = """
import asyncio, sys
from longfill.config import EngineArgs
from longfill.server.client import EngineClient

async def main():
    client = EngineClient(EngineArgs(model="needle", max_model_len=4096), heartbeat_timeout=8, log_level="warning")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_engine_does_not_outlive_a_killed_parent(tmp_path: Any) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([engine], timeout=10)
    if alive:
        engine.kill()
    assert not alive
