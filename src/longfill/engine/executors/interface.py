"""What the engine asks of whatever runs its steps.

May import the worker. Invariant: the engine knows nothing else of ranks and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from longfill.partition import StepPlan
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.sampler import SampleInput
from longfill.worker.worker import StepResult, Worker


class Executor(Protocol):
    """One rank or many."""

    @property
    def worker(self) -> Worker:
        """Rank 0: its memory, layout, kernels and tails, and what makes plans."""
        ...

    @property
    def work_done(self) -> int:
        """Grows while a step is computed, on whatever rank. May be read from any thread."""
        ...

    def execute(self, plan: StepPlan, inputs: Sequence[SampleInput], prompts: Sequence[PromptInput] = ()) -> StepResult:
        """Run a plan, as `Worker.execute` does, on all ranks.

        Raises ParallelError, which names the rank and what it did, where one of them is lost; then, or after any other
        failure of a step on many ranks, all of them are ended.
        """
        ...

    def rank_comm(self) -> list[dict[str, int]]:
        """Bytes that each rank has sent to others in all steps so far, by what they were.

        Raises ParallelError or EngineDeadError where a rank is lost.
        """
        ...

    def check(self) -> None:
        """Raise EngineDeadError once no step can be run any more: a rank is gone, or `close` was called."""
        ...

    def close(self) -> None:
        """End all other ranks. May be called again."""
        ...
