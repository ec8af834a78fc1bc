"""A rank that dies or is late ends the operation of those that wait for it, with words that name all of them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.parallel.processes import Ranks, mesh_of

from longfill.errors import ParallelError
from longfill.parallel import Link

LIMIT = 2.0


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(3, timeout=LIMIT)
    yield ranks
    ranks.close()


def gather(link: Link) -> tuple[str, float]:
    """What is said, and after how long."""
    mesh, began = mesh_of(link, tp=3), time.monotonic()
    with pytest.raises(ParallelError) as caught:
        mesh.tp.gather_rows("kv", torch.zeros(1000, 100), [1000] * 3)
    assert mesh.comm.doing is None
    assert mesh.comm.seconds["kv"] > 0
    return str(caught.value), time.monotonic() - began


def test_a_killed_rank_is_known_at_once(ranks: Ranks) -> None:
    host = socket.gethostname()
    ranks.run(mesh_rank)
    for rank in (0, 2):
        ranks.start(rank, gather)
    time.sleep(0.2)
    os.kill(ranks.processes[1].pid or 0, signal.SIGKILL)
    for rank in (0, 2):
        message, seconds = ranks.result(rank)
        assert message.startswith(f"rank {rank} of 3 ({host}): gather_rows 'kv' waits for rank 1: connection lost: ")
        assert "Connection closed by peer" in message
        assert seconds < LIMIT


def test_a_stopped_rank_is_late_after_the_time_limit(ranks: Ranks) -> None:
    ranks.run(mesh_rank)
    os.kill(ranks.processes[2].pid or 0, signal.SIGSTOP)
    for rank in (0, 1):
        ranks.start(rank, gather)
    for rank in (0, 1):
        message, seconds = ranks.result(rank)
        assert message.endswith(f"gather_rows 'kv' waits for rank 2: no answer within {LIMIT:g} s")
        assert LIMIT <= seconds < LIMIT + 5


def mesh_rank(link: Link) -> int:
    return mesh_of(link, tp=3).rank


def watched(link: Link) -> list[str]:
    """What another thread reads of an operation that waits for half a second."""
    mesh, seen = mesh_of(link, tp=3), []
    if link.rank == 1:
        time.sleep(0.5)
    else:

        def look() -> None:
            time.sleep(0.25)
            seen.append(mesh.comm.doing)

        threading.Thread(target=look).start()
    mesh.tp.gather_rows("kv", torch.zeros(3, 1), [3] * 3)
    assert mesh.comm.doing is None
    waited = mesh.comm.take_seconds()["kv"]
    assert (waited < 0.4) == (link.rank == 1)
    return seen


def test_what_a_rank_waits_for_and_since_when_can_be_seen(ranks: Ranks) -> None:
    ranks.run(mesh_rank)  # all are up
    for [(words, seconds)] in (ranks.run(watched)[0], ranks.run(watched)[2]):
        assert words == "gather_rows 'kv' waits for rank 1"
        assert 0 < seconds < 0.5
