"""One scheduled step on the worker: unknowns filled in, planned, run in one call or in two, results put together.

Imports the scheduler's message and the worker. Invariant: it runs in the worker's thread, reads of the requests only
what no later step changes, and computes nothing for a request that was preempted or has ended meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from longfill.engine.live import LiveRequest
from longfill.engine.stats import SpecDecodingStats
from longfill.kernels.interface import ScreenCounts
from longfill.partition import StepPlan, StepRequest
from longfill.scheduler import Schedule, Scheduler
from longfill.worker.history import TokenHistory
from longfill.worker.prompt_logprobs import PromptLogprobs
from longfill.worker.sampler import SampledToken, SampleInput
from longfill.worker.worker import StepResult, Worker


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave: one plan and one result for each call of the model."""

    plans: tuple[StepPlan, ...]
    results: tuple[StepResult, ...]
    plan_seconds: float

    @cached_property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Request id -> the tokens that it sampled."""
        return {name: tuple(token.token_id for token in tokens) for name, tokens in self.sampled.items()}

    @cached_property
    def sampled(self) -> dict[str, tuple[SampledToken, ...]]:
        return {name: tokens for result in self.results for name, tokens in result.sampled.items()}

    @cached_property
    def logits(self) -> dict[str, Tensor]:
        """Request id -> fp32 [tokens it sampled, vocabulary]."""
        return {name: rows for result in self.results for name, rows in result.logits.items()}

    @cached_property
    def failed(self) -> dict[str, str]:
        return {name: why for result in self.results for name, why in result.failed.items()}

    @cached_property
    def prompt_logprobs(self) -> dict[str, PromptLogprobs]:
        """Request id -> log-probabilities of the prompt tokens that its rows say something of, where wanted."""
        return {name: found for result in self.results for name, found in result.prompt_logprobs.items()}

    @cached_property
    def screen(self) -> ScreenCounts:
        counts = ScreenCounts()
        for result in self.results:
            counts += result.screen
        return counts

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Stage -> seconds, of all calls."""
        total: dict[str, float] = {"plan": self.plan_seconds}
        for result in self.results:
            for stage, seconds in result.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    def spec(self, booked: Container[str]) -> SpecDecodingStats:
        """What became of its drafts, for the requests in `booked`: a step behind a request's end counts for nothing."""
        stats = SpecDecodingStats()
        for plan in self.plans:
            for request in plan.requests:
                if request.num_drafts and request.request_id in booked:
                    stats.observe(request.num_drafts, len(self.sampled[request.request_id]) - 1)
        return stats


class StepComputer:
    """Computes schedules on a worker. `live` holds the unfinished requests by id."""

    def __init__(
        self, worker: Worker, scheduler: Scheduler, live: Mapping[str, LiveRequest], *, split_mixed_batch: bool
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._live = live
        self._split = split_mixed_batch
        self._histories: dict[str, tuple[int, TokenHistory]] = {}
        """By request id, with the admission that it is of: no more than requests run, whoever waits."""

    def __call__(self, schedule: Schedule) -> StepOutcome:
        """Run a step. Requests that ended or were preempted since it was scheduled are left out."""
        start = time.perf_counter()
        self._worker.tails.keep(self._is_current)
        self._histories = {name: of for name, of in self._histories.items() if self._is_current(name, of[0])}
        live: dict[str, LiveRequest] = {}
        requests: list[StepRequest] = []
        for scheduled in schedule.requests:
            request, owner = self._worker.tails.resolve(scheduled), self._live.get(scheduled.request_id)
            if request is not None and owner is not None and self._is_current(request.request_id, request.admission):
                requests.append(request)
                live[request.request_id] = owner
        plans = tuple(self._worker.plan(part) for part in self._parts(requests))
        planned = time.perf_counter() - start
        results = tuple(self._run(plan, live) for plan in plans)
        return StepOutcome(plans, results, planned)

    def _parts(self, requests: list[StepRequest]) -> list[list[StepRequest]]:
        """What is run in one call: everything, or decode rows and prompts apart."""
        if not self._split:
            return [requests] if requests else []
        decodes = [request for request in requests if request.has_one_row]
        prompts = [request for request in requests if not request.has_one_row]
        return [part for part in (decodes, prompts) if part]

    def _run(self, plan: StepPlan, live: Mapping[str, LiveRequest]) -> StepResult:
        inputs = [self._sample_input(r, live[r.request_id]) for r in plan.requests if r.samples]
        prompts = [live[r.request_id].prompt_input(r.start, r.seq_len) for r in plan.requests]
        return self._worker.execute(plan, inputs, [given for given in prompts if given is not None])

    def _sample_input(self, scheduled: StepRequest, live: LiveRequest) -> SampleInput:
        position, history = scheduled.start + scheduled.query_len - scheduled.num_drafts, None
        if live.request.params.has_penalties:
            admission, history = self._histories.get(scheduled.request_id, (None, None))
            if history is None or admission != scheduled.admission:
                # The first token of an admission: all before it are booked, and stay.
                prompt, outputs = np.split(live.request.token_ids[:position], [live.request.num_prompt_tokens])
                history = TokenHistory(prompt, self._worker.config.vocab_size, outputs.tolist())
                self._histories[scheduled.request_id] = scheduled.admission, history
        return live.sample_input(position, history)

    def _is_current(self, request_id: str, admission: int) -> bool:
        return self._scheduler.admission(request_id) == admission
