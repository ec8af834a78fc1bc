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

from longfill.engine.executors import Executor
from longfill.engine.live import LiveRequest
from longfill.engine.stats import SpecDecodingStats
from longfill.kernels.interface import ScreenCounts
from longfill.partition import StepPlan, StepRequest
from longfill.scheduler import Schedule, Scheduler
from longfill.worker.history import TokenHistory
from longfill.worker.prompt_logprobs import PromptLogprobs
from longfill.worker.sampler import SampledToken, SampleInput
from longfill.worker.structured import OutputForm, StructuredOutputs
from longfill.worker.worker import StepResult


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
    def comm(self) -> dict[str, int]:
        """Bytes sent to other ranks, of all calls, by what they were."""
        total: dict[str, int] = {}
        for result in self.results:
            for what, sent in result.comm.items():
                total[what] = total.get(what, 0) + sent
        return total

    @cached_property
    def rank_scored_pairs(self) -> tuple[int, ...]:
        """(row, key) pairs that each rank scores in a layer, of all calls."""
        return tuple(sum(pairs) for pairs in zip(*(plan.rank_scored_pairs for plan in self.plans), strict=True))

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


@dataclass
class _Past:
    """What a request's next token depends on besides its logits, as of one admission."""

    admission: int
    history: TokenHistory | None = None
    form: OutputForm | None = None


class StepComputer:
    """Computes schedules on an executor. `live` holds the unfinished requests by id; `forms` is None without a
    tokenizer, when no request asks for structured outputs."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, live: Mapping[str, LiveRequest],
        forms: StructuredOutputs | None, *, split_mixed_batch: bool,
    ) -> None:  # fmt: skip
        self._executor = executor
        self._worker = executor.worker
        self._scheduler = scheduler
        self._live = live
        self._forms = forms
        self._split = split_mixed_batch
        self._pasts: dict[str, _Past] = {}
        """By request id: no more than requests run, whoever waits."""

    def __call__(self, schedule: Schedule) -> StepOutcome:
        """Run a step. Requests that ended or were preempted since it was scheduled are left out."""
        start = time.perf_counter()
        self._worker.tails.keep(self._is_current)
        self._pasts = {name: past for name, past in self._pasts.items() if self._is_current(name, past.admission)}
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
        return self._executor.execute(plan, inputs, [given for given in prompts if given is not None])

    def _sample_input(self, scheduled: StepRequest, live: LiveRequest) -> SampleInput:
        position = scheduled.start + scheduled.query_len - scheduled.num_drafts
        params, past = live.request.params, self._pasts.get(scheduled.request_id)
        if not params.has_penalties and params.structured_outputs is None:
            return live.sample_input(position, None, None)
        if past is None or past.admission != scheduled.admission:
            # The first token of an admission: all before it are booked, and stay.
            prompt, outputs = np.split(live.request.token_ids[:position], [live.request.num_prompt_tokens])
            past = _Past(scheduled.admission)
            if params.has_penalties:
                past.history = TokenHistory(prompt, self._worker.config.vocab_size, outputs.tolist())
            if params.structured_outputs is not None and self._forms is not None:
                past.form = self._forms.begin(params.structured_outputs, outputs.tolist())
            self._pasts[scheduled.request_id] = past
        return live.sample_input(position, past.history, past.form)

    def _is_current(self, request_id: str, admission: int) -> bool:
        return self._scheduler.admission(request_id) == admission
