"""Rank 0 with followers in other processes, however these were started.

May import everything below the engine. Invariant: every rank computes the same steps in the same order, and after the
first failure of any of them none computes another one.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from longfill.engine.executors.followers import Followers
from longfill.engine.executors.messages import Setup, Step
from longfill.errors import EngineDeadError, ParallelError
from longfill.kernels.cpu.extension import tasks_done
from longfill.parallel import Mesh
from longfill.partition import StepPlan
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.sampler import SampleInput
from longfill.worker.worker import StepResult, Worker

CLOSED = "the engine has been closed; make a new one to go on"


class RanksExecutor:
    """An `Executor` whose rank 0 is in this process."""

    def __init__(
        self, followers: Followers, connect: Callable[[], Mesh], load: Callable[[Mesh], Worker], *,
        setup: Setup | None = None,
    ) -> None:  # fmt: skip
        """Connect with the followers and load along with them. Raises ParallelError where one of them cannot.

        `setup` is for followers that do not know yet what they are to be.
        """
        self._followers = followers
        self._closed = False
        self._steps = 0
        self._comm: Counter[str] = Counter()
        # Registered last, it runs first when the process ends; finalize alone would run at a moment of its own.
        self._finalizer = weakref.finalize(self, _end, followers, os.getpid())
        atexit.register(self._finalizer)
        try:
            if setup is not None:
                followers.send(setup)
            # Gloo connects with a limit only: it is begun once all others are known to be there.
            followers.wait_until_connecting()
            mesh = connect()
            self.worker = load(mesh)
            followers.wait_until_ready()
        except BaseException as error:
            raise self._give_up(error) from None

    @property
    def work_done(self) -> int:
        return tasks_done() + self.worker.decoder.stages_done + self._followers.work_done

    def execute(self, plan: StepPlan, inputs: Sequence[SampleInput], prompts: Sequence[PromptInput] = ()) -> StepResult:
        self.check()
        try:
            self._followers.send(Step(plan.requests, tuple(prompts)))
            self._steps += 1
            result = self.worker.execute(plan, inputs, prompts)
        except BaseException as error:
            raise self._give_up(error) from None
        self._comm.update(result.comm)
        return result

    def rank_comm(self) -> list[dict[str, int]]:
        self.check()
        return [dict(self._comm), *self._followers.comm(self._steps)]

    def check(self) -> None:
        if self._closed:
            raise EngineDeadError(CLOSED)
        if self._followers.failure is not None:
            raise EngineDeadError(f"the engine has failed: {self._followers.failure}")

    def close(self) -> None:
        self._closed = True
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _give_up(self, error: BaseException) -> BaseException:
        """End all ranks; returns the error to raise, which is the reason where `error` is only what it led to."""
        if isinstance(error, ParallelError):
            symptom = str(error)
            reason = self._followers.explain(symptom)
            return ParallelError(reason if symptom in reason else f"{reason}; {symptom}")
        self._followers.fail(f"rank 0 failed: {type(error).__name__}: {error}")
        return error


def _end(followers: Followers, owner: int) -> None:
    """End the followers, unless this is a fork of the process that they follow."""
    if os.getpid() == owner:
        followers.close()
