"""A worker that computes nothing but exchanges as a model does, and fails where it is told to.

For tests only. Invariant: every step is ten rounds of exchanges, of which each rank checks the results.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from longfill.parallel import Mesh

ROUNDS = 10
TROUBLE = "LONGFILL_TEST_TROUBLE"
"""`rank:where:what` for what is to happen before the first step."""


@dataclass(frozen=True)
class Trouble:
    """Something that befalls one rank in a step."""

    rank: int
    where: str
    """`begin`, a round's number, `compute` (between two rounds) or `end`."""
    what: str
    """`kill`, `stop`, `raise`, `interrupt`, `sleep` or `exit`."""

    def strike(self, rank: int, where: str) -> None:
        if (rank, where) != (self.rank, self.where):
            return
        if self.what == "raise":
            raise RuntimeError("the fake worker fails as it was told to")
        if self.what == "interrupt":
            raise KeyboardInterrupt
        if self.what == "exit":
            os._exit(3)
        if self.what == "sleep":
            time.sleep(1.0)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.what])


NONE = Trouble(-1, "", "")


def _trouble_at_start() -> Trouble:
    text = os.environ.get(TROUBLE)
    if text is None:
        return NONE
    rank, where, what = text.split(":")
    return Trouble(int(rank), where, what)


class Result(list[int]):
    """What the exchanges of a step have brought, and the bytes that it has sent."""

    comm: dict[str, int]


class FakeWorker:
    """What executors use of a worker."""

    def __init__(self, args: Any, _folder: Any, _config: Any, mesh: Mesh) -> None:
        self.args = args
        self.mesh = mesh
        self.num_threads = args.num_threads
        self.decoder = SimpleNamespace(stages_done=0)
        trouble = _trouble_at_start()
        trouble.strike(mesh.rank, "load")
        self.pages = mesh.world.smallest("pages", 100 + mesh.rank)
        trouble.strike(mesh.rank, "loaded")

    def execute(self, plan: Any, _inputs: Any, prompts: Any = ()) -> Result:
        self.mesh.comm.take()
        result = Result(self._step(plan.requests, prompts))
        result.comm = self.mesh.comm.take()
        return result

    def follow(self, requests: tuple[Trouble, ...], prompts: Any = ()) -> dict[str, int]:
        self.mesh.comm.take()
        self._step(requests, prompts)
        return self.mesh.comm.take()

    def _step(self, requests: tuple[Trouble, ...], prompts: Any) -> list[int]:
        world = self.mesh.world
        trouble = requests[0] if requests else NONE
        trouble.strike(world.rank, "begin")
        seen = []
        for number in range(ROUNDS):
            trouble.strike(world.rank, str(number))
            mine = torch.full((1000, 3), world.rank * 100 + number)
            pending = world.start_gather("kv", mine, [1000] * world.size)
            trouble.strike(world.rank, f"inside {number}")
            rows = pending.wait()
            assert rows[::1000, 0].tolist() == [rank * 100 + number for rank in world.ranks]
            self.decoder.stages_done += 1
            seen.append(int(rows[-1, 0]))
        total = world.to_first("logits", torch.ones(1, 1), [1] * world.size)
        trouble.strike(world.rank, "end")
        assert (total is None) == (world.rank > 0)
        return [*seen, len(prompts)]


def plan_of(trouble: Trouble = NONE) -> Any:
    return SimpleNamespace(requests=(trouble,))
