"""A rank that dies, stops or fails at any point ends the step with a reason, and leaves no process and no hang."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.parallel.fake_worker import ROUNDS, TROUBLE, FakeWorker, Trouble, plan_of
from tests.parallel.processes import rank_processes, wait_until_gone

from longfill.config import EngineArgs
from longfill.engine.executors import make_executor
from longfill.errors import ConfigError, EngineDeadError, ParallelError

LIMIT = 60.0
SOON = 15.0
"""Far less than the time limit: what ends so soon was not ended by it."""


KILLS = ((2, "begin", 3), (2, "0", 0), (1, "inside 4", 0), (1, "9", 3), (2, "inside 9", 0))


def start(ranks: int = 3, *, limit: float = LIMIT, **args: Any) -> Any:
    engine_args = EngineArgs(
        tensor_parallel_size=ranks, distributed_executor_backend="mp", distributed_timeout_seconds=limit, **args
    )
    return make_executor(engine_args, Path("nowhere"), None, FakeWorker)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def children() -> Iterator[list[psutil.Process]]:
    """Processes of ranks that a test has seen; neither they nor others may be left behind it."""
    seen: list[psutil.Process] = []
    yield seen
    gc.collect()
    wait_until_gone([*seen, *rank_processes()])


def pids(executor: Any) -> dict[int, int]:
    return {rank: peer.pid for rank, peer in executor._followers._peers.items()}


@pytest.fixture
def executor(children: list[psutil.Process]) -> Iterator[Any]:
    executor = start()
    children += rank_processes()
    yield executor
    executor.close()


def test_ranks_step_together_and_end_when_told_to(children: list[psutil.Process]) -> None:
    executor = start(3)
    children += rank_processes()
    assert len(children) == 3  # the one that forks, and the two followers
    assert executor.worker.pages == 100
    for number in range(3):
        assert executor.execute(plan_of(), (), ["a prompt"] * number) == [200 + n for n in range(ROUNDS)] + [number]
    work = executor.work_done
    assert work >= 3 * ROUNDS
    until = time.monotonic() + SOON
    while executor.work_done < 3 * 3 * ROUNDS:  # the followers tell of theirs once a second
        assert time.monotonic() < until
        time.sleep(0.05)
    executor.check()
    executor.close()
    wait_until_gone(children, 0.0)
    for use in (executor.check, lambda: executor.execute(plan_of(), ())):
        with pytest.raises(EngineDeadError, match="has been closed"):
            use()
    executor.close()


@pytest.mark.parametrize(("rank", "where"), [(1, "load"), (2, "loaded")])
def test_a_rank_killed_while_it_loads(monkeypatch: pytest.MonkeyPatch, rank: int, where: str) -> None:
    monkeypatch.setenv(TROUBLE, f"{rank}:{where}:kill")
    began = time.monotonic()
    with pytest.raises(ParallelError, match=rf"rank {rank} \(.*, pid \d+\) died \(signal 9\)"):
        start()
    assert time.monotonic() - began < SOON


def test_a_rank_killed_before_it_knows_what_to_do() -> None:
    killed: list[int] = []

    def kill_the_first_fork() -> None:
        until = time.monotonic() + SOON
        while time.monotonic() < until and not killed:
            for child in [each for each in rank_processes() if each.parent() != psutil.Process()][:1]:
                child.kill()
                killed.append(child.pid)

    thread = threading.Thread(target=kill_the_first_fork)
    thread.start()
    with pytest.raises(ParallelError, match=r"rank \d.* died \(signal 9\)"):
        start()
    thread.join()
    assert killed


def test_a_rank_that_fails_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TROUBLE, "2:load:raise")
    with pytest.raises(
        ParallelError, match=r"rank 2 \(.*\) failed while it loads: RuntimeError: the fake worker fails"
    ):
        start()


def test_rank_0_that_fails_while_it_loads_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TROUBLE, "0:load:raise")
    with pytest.raises(RuntimeError, match="the fake worker fails as it was told to"):
        start()


def dead_for(executor: Any, reason: str) -> None:
    """Every later call gives the first reason, and all ranks are gone."""
    for use in (executor.check, lambda: executor.execute(plan_of(), ())):
        with pytest.raises(EngineDeadError) as caught:
            use()
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "where", "steps"),
    [
        (1, "begin", 0), (2, "inside 4", 3), (1, "end", 3),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in KILLS),
    ],
)  # fmt: skip
def test_a_rank_killed_in_a_step(
    executor: Any, children: list[psutil.Process], rank: int, where: str, steps: int
) -> None:
    for _ in range(steps):
        executor.execute(plan_of(), ())
    pid, began = pids(executor)[rank], time.monotonic()
    if where == "end":  # behind its last exchange: it is missed in the next step, or before it
        executor.execute(plan_of(Trouble(rank, where, "kill")), ())
    with pytest.raises((EngineDeadError, ParallelError)) as caught:
        executor.execute(plan_of(Trouble(rank, where, "kill")), ())
    assert f"rank {rank} (" in str(caught.value)
    assert f"pid {pid}) died (signal 9)" in str(caught.value)
    assert time.monotonic() - began < SOON
    dead_for(executor, f"pid {pid}) died (signal 9)")
    wait_until_gone(children, 1.0)


def look_until_it_fails(executor: Any) -> None:
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        executor.check()
        time.sleep(0.01)


def test_a_rank_killed_while_idle_is_noticed_by_whoever_looks(executor: Any) -> None:
    executor.execute(plan_of(), ())
    pid = pids(executor)[2]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"pid {pid}\) died \(signal 9\)"):
        look_until_it_fails(executor)


def test_a_rank_killed_while_the_engine_closes(executor: Any, children: list[psutil.Process]) -> None:
    for pid in pids(executor).values():
        os.kill(pid, signal.SIGSTOP)  # so that it is still there
    killer = threading.Timer(0.3, os.kill, (pids(executor)[2], signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < SOON
    wait_until_gone(children, 0.0)


@pytest.mark.parametrize(("rank", "where"), [(1, "begin"), (2, "inside 4")])
def test_a_stopped_rank_ends_the_step_within_the_time_limit(
    children: list[psutil.Process], rank: int, where: str
) -> None:
    executor, limit = start(limit=3.0), 3.0
    children += rank_processes()
    pid, began = pids(executor)[rank], time.monotonic()
    with pytest.raises(ParallelError) as caught:
        executor.execute(plan_of(Trouble(rank, where, "stop")), ())
    assert limit <= time.monotonic() - began < limit + SOON
    assert f"rank {rank} (" in str(caught.value)
    assert f"pid {pid}): no sign of life for " in str(caught.value)
    dead_for(executor, "no sign of life")
    wait_until_gone(children, 1.0)


def test_a_rank_stopped_while_idle_is_noticed_within_the_time_limit(children: list[psutil.Process]) -> None:
    executor = start(limit=2.0)
    children += rank_processes()
    os.kill(pids(executor)[1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* no sign of life for [23]\.\d s \(stopped\?\)"):
        look_until_it_fails(executor)


def test_a_rank_that_is_slow_but_alive_is_waited_for(executor: Any) -> None:
    assert len(executor.execute(plan_of(Trouble(1, "5", "sleep")), ())) == ROUNDS + 1
    executor.check()


def test_a_rank_that_is_slower_than_the_time_limit_is_named_with_what_it_does(
    children: list[psutil.Process],
) -> None:
    executor = start(limit=0.4)
    children += rank_processes()
    with pytest.raises(ParallelError) as caught:
        executor.execute(plan_of(Trouble(1, "5", "sleep")), ())
    text = str(caught.value)
    assert "waits for rank 1: no answer within 0.4 s" in text
    assert f"rank 1 ({os.uname().nodename}, pid {pids(executor)[1]}) computes" in text
    assert "if a rank is only slow, raise --distributed-timeout-seconds" in text


def test_ranks_that_are_idle_for_longer_than_the_time_limit_stay(children: list[psutil.Process]) -> None:
    executor = start(limit=1.0)
    children += rank_processes()
    time.sleep(3.0)
    assert len(executor.execute(plan_of(), ())) == ROUNDS + 1
    executor.close()


class Unreadable:
    """Pickles here, and nowhere else."""

    def __reduce__(self) -> Any:
        return _only_here, (os.getpid(),)


def _only_here(pid: int) -> None:
    if os.getpid() != pid:
        raise LookupError("the fake worker's argument cannot be read")


def test_a_message_that_a_rank_cannot_read_is_said_and_waited_for_by_none() -> None:
    with pytest.raises(ParallelError, match=r"rank 1 .* cannot read what rank 0 has sent: LookupError: the fake"):
        make_executor(
            EngineArgs(tensor_parallel_size=2, distributed_timeout_seconds=LIMIT),
            Unreadable(),
            None,
            FakeWorker,  # type: ignore[arg-type]
        )


def test_a_word_of_a_rank_that_rank_0_cannot_read_is_a_failure(executor: Any) -> None:
    peer = executor._followers._peers[1]
    peer.connection.recv = lambda: _only_here(0)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* it says what cannot be read: LookupError"):
        look_until_it_fails(executor)


def test_every_ranks_bytes_are_counted(executor: Any) -> None:
    assert executor.rank_comm() == [{}, {}, {}]
    for _ in range(3):
        executor.execute(plan_of(), ())
    kv = 3 * ROUNDS * 2 * 1000 * 3 * 8
    assert executor.rank_comm() == [{"kv": kv}, {"kv": kv, "logits": 12}, {"kv": kv, "logits": 12}]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_followers_own_error_is_the_reason_that_is_given(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    executor = start()
    with pytest.raises(ParallelError) as caught:
        executor.execute(plan_of(Trouble(rank, "5", "raise")), ())
    assert f"rank {rank} (" in str(caught.value)
    assert "failed while it computes: RuntimeError: the fake worker fails as it was told to" in str(caught.value)
    error = capfd.readouterr().err
    assert f"ERROR rank {rank}: " in error
    assert "Traceback" in error
    dead_for(executor, "the fake worker fails")


def test_a_follower_that_exits_is_named_with_its_code(executor: Any) -> None:
    with pytest.raises(ParallelError, match=r"rank 1 .* died \(exit code 3\)"):
        executor.execute(plan_of(Trouble(1, "5", "exit")), ())


@pytest.mark.parametrize(("what", "error"), [("raise", RuntimeError), ("interrupt", KeyboardInterrupt)])
def test_an_error_or_ctrl_c_on_rank_0_is_raised_as_it_is_and_ends_all(
    executor: Any, children: list[psutil.Process], what: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        executor.execute(plan_of(Trouble(0, "5", what)), ())
    dead_for(executor, f"rank 0 failed: {error.__name__}")
    wait_until_gone(children, 1.0)


def test_followers_leave_ctrl_c_and_sigterm_to_rank_0(executor: Any, children: list[psutil.Process]) -> None:
    for child in children:
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)
    time.sleep(0.2)
    assert executor.execute(plan_of(), ())


def test_an_executor_that_nobody_refers_to_ends_its_ranks(children: list[psutil.Process]) -> None:
    executor = start(2)
    children += rank_processes()
    assert children
    del executor
    gc.collect()
    wait_until_gone(children, 1.0)


def test_two_executors_live_side_by_side(executor: Any) -> None:
    other = start(2)
    try:
        assert other.execute(plan_of(), ())[0] == 100
        assert executor.execute(plan_of(), ())[0] == 200
        with pytest.raises(ParallelError):
            other.execute(plan_of(Trouble(1, "3", "kill")), ())
        assert executor.execute(plan_of(), ())[0] == 200
    finally:
        other.close()


def test_the_ranks_are_forked_from_a_process_without_threads(executor: Any) -> None:
    [forks] = [each for each in rank_processes() if each.parent() == psutil.Process()]
    assert forks.num_threads() == 1
    assert {child.pid for child in forks.children()} == set(pids(executor).values())


def test_threads_are_shared_out_among_the_ranks_of_a_machine() -> None:
    executor = start(2)
    try:
        assert executor.worker.num_threads == max(1, len(os.sched_getaffinity(0)) // 2)
    finally:
        executor.close()


def test_what_contradicts_the_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**args: Any) -> None:
        make_executor(EngineArgs(**args), Path("nowhere"), None, FakeWorker)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"--distributed-executor-backend uni .* --tensor-parallel-size 2 .* need 2"):
        make(tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="external_launcher: RANK, WORLD_SIZE"):
        make(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="--decode-context-parallel-size"):
        make(decode_context_parallel_size=2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 3, but --tensor-parallel-size 2 and .* need 2 ranks"):
        make(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 3, but .* need 1 ranks"):
        make()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is 3 and WORLD_SIZE 3"):
        make(tensor_parallel_size=3)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="RANK is 'one'"):
        make(tensor_parallel_size=3)
