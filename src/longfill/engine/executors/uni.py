"""The one rank of an engine without others, in this process.

May import the worker. Invariant: nothing stands between the engine and the worker, and a failed step ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from longfill.engine.executors.leader import CLOSED
from longfill.errors import EngineDeadError
from longfill.kernels.cpu.extension import tasks_done
from longfill.partition import StepPlan
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.sampler import SampleInput
from longfill.worker.worker import StepResult, Worker


class UniExecutor:
    """An `Executor` of a single worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._closed = False

    @property
    def work_done(self) -> int:
        return tasks_done() + self.worker.decoder.stages_done

    def execute(self, plan: StepPlan, inputs: Sequence[SampleInput], prompts: Sequence[PromptInput] = ()) -> StepResult:
        self.check()
        return self.worker.execute(plan, inputs, prompts)

    def rank_comm(self) -> list[dict[str, int]]:
        return [{}]

    def check(self) -> None:
        if self._closed:
            raise EngineDeadError(CLOSED)

    def close(self) -> None:
        self._closed = True
