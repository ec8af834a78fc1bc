"""Who gets how many tokens in the next step, first come first served.

Imports the cache bookkeeping and Request; pure Python, no tensors. Invariant: there are no phases, only a ledger: each
request's `num_computed_tokens` chases its `num_tokens`; chunks, prefix hits and preemptions are starts and strides.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping

from longfill.cache import KVCacheManager
from longfill.errors import ConfigError, RequestError
from longfill.request import FinishReason, Request, RequestStatus
from longfill.scheduler.schedule import Schedule, ScheduledRequest
from longfill.units import pages_for

logger = logging.getLogger(__name__)


class Scheduler:
    """Plans steps over the requests that it holds, and books their results.

    A step is `schedule()`, then the model, then `update()`; `add_request`, `abort`, `finish` and `preempt` may come
    at any moment in between. Units: tokens for `max_model_len` (prompt and outputs of one request) and for
    `max_num_batched_tokens` (one step), requests for `max_num_seqs` (running at once).
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        limits = {"max-num-batched-tokens": max_num_batched_tokens, "max-num-seqs": max_num_seqs}
        for flag, value in limits.items():
            if value < 1:
                raise ConfigError(f"--{flag}: must be at least 1, got {value}")
        if max_model_len < 2:
            raise ConfigError(
                f"--max-model-len: must hold a prompt token and an output, so at least 2, got {max_model_len}"
            )
        self.cache = cache
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = frozenset(eos_token_ids)
        self.requests: dict[str, Request] = {}
        """Every request that is waiting or running, by id, oldest first."""
        self._running: dict[str, Request] = {}  # in order of admission
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # preempted ones in front
        self._admissions: dict[str, int] = {}  # of the running requests
        self._next_admission = itertools.count()
        self._next_step = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue: new ones and preempted ones."""
        return len(self._waiting)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, for one that could never be finished."""
        if request.request_id in self.requests:
            raise RequestError(f"request {request.request_id}: another request with this id has not ended yet")
        self._refuse_what_never_fits(request)
        self.requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; no token reaches it any more. Returns it, or None if it has ended already."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """End a request for `reason` and free its pages. Returns it, or None if it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._running.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._admissions.pop(request_id, None)
        self.cache.free(request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        return request

    def preempt(self, request_id: str) -> None:
        """Take all pages from a running request and put it at the front of the queue, to be computed again.

        Its published pages stay findable until reused. Raises RequestError if the request is not running.
        """
        request = self._running.pop(request_id, None)
        if request is None:
            raise RequestError(f"request {request_id} is not running, so it cannot be preempted")
        del self._admissions[request_id]
        self.cache.free(request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        logger.info(
            "preempted request %s: %d computed tokens dropped, preemption %d of it",
            request_id,
            request.num_computed_tokens,
            request.num_preemptions,
        )
        request.num_computed_tokens = 0
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)

    def schedule(self) -> Schedule:
        """Plan the next step and move the ledger as if it were computed.

        Running requests come first, in order; one that gets no page preempts the last of them, in the end itself.
        Then requests are admitted from the queue, unless this step preempted. With no token to compute or no page to
        do it in, the schedule is empty.
        """
        scheduled: list[ScheduledRequest] = []
        preempted: list[str] = []
        budget = self.max_num_batched_tokens
        for request in list(self._running.values()):
            if request.request_id not in self._running:
                break  # preempted in this step, as is everything behind it
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens == 0:
                continue
            if not self._make_room(request, request.num_computed_tokens + num_tokens, preempted):
                break
            scheduled.append(self._grant(request, num_tokens))
            budget -= num_tokens
        if not preempted:
            self._admit(budget, scheduled)
        return Schedule(next(self._next_step), tuple(scheduled), tuple(preempted))

    def retract(self, schedule: Schedule) -> None:
        """Take back a step that was not computed: its requests start over, and nothing of it can be found later."""
        for scheduled in reversed(schedule.requests):
            if self._is_current(scheduled):
                self.preempt(scheduled.request_id)

    def update(self, schedule: Schedule, sampled: Mapping[str, int], failed: Collection[str] = ()) -> list[Request]:
        """Book a step's results; steps must come in the order they were scheduled.

        `sampled` holds a token id for each request of the step that `samples`, but for those in `failed`, which end
        with an error. Returns the requests that got their token or failed, in the step's order, those that it finished
        among them. A request that was preempted or ended while the step ran gets nothing.
        """
        advanced: list[Request] = []
        for scheduled in schedule.requests:
            request_id = scheduled.request_id
            if not self._is_current(scheduled):
                continue
            request = self.requests[request_id]
            if request_id in failed:
                self.finish(request_id, FinishReason.ERROR)
                advanced.append(request)
                continue
            self.cache.publish(request, scheduled.start + scheduled.num_tokens)
            if scheduled.samples:
                self._append(request, sampled[request_id])
                advanced.append(request)
        return advanced

    def _is_current(self, scheduled: ScheduledRequest) -> bool:
        """Whether the request still runs under the admission that was scheduled."""
        return self._admissions.get(scheduled.request_id) == scheduled.admission

    def _refuse_what_never_fits(self, request: Request) -> None:
        name, prompt = f"request {request.request_id}", request.num_prompt_tokens
        if prompt >= self.max_model_len:
            raise RequestError(
                f"{name}: the prompt has {prompt:,} tokens; with max_model_len {self.max_model_len:,} at most "
                f"{self.max_model_len - 1:,} leave room for an output; shorten it or raise --max-model-len"
            )
        max_tokens = request.params.max_tokens
        total = self.max_model_len if max_tokens is None else min(prompt + max_tokens, self.max_model_len)
        page_size, usable = self.cache.page_size, self.cache.num_usable_pages
        needed = pages_for(total, page_size)
        if needed > usable:
            raise RequestError(
                f"{name}: {prompt:,} prompt tokens and up to {total - prompt:,} outputs need {needed:,} pages of "
                f"{page_size} tokens, but the whole KV pool has {usable:,} ({usable * page_size:,} tokens); lower "
                "max_tokens, shorten the prompt or raise --memory-budget"
            )

    def _make_room(self, request: Request, num_tokens_total: int, preempted: list[str]) -> bool:
        """Allocate for a running request, preempting from the back; False if that reached the request itself."""
        while not self.cache.allocate(request, num_tokens_total):
            victim = next(reversed(self._running))
            self.preempt(victim)
            preempted.append(victim)
            if victim == request.request_id:
                return False
        return True

    def _admit(self, budget: int, scheduled: list[ScheduledRequest]) -> None:
        """Admit from the front of the queue while there are tokens, seats and pages; nobody overtakes."""
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = next(iter(self._waiting.values()))
            hit = self.cache.lookup(request)
            # All its tokens must fit, not just the first chunk: otherwise long prompts are let in together, run out
            # of pages half way and preempt each other.
            if not self.cache.can_allocate(request, request.num_tokens, hit):
                break
            num_tokens = min(request.num_tokens - hit.num_tokens, budget)
            self.cache.allocate(request, hit.num_tokens + num_tokens, hit)
            if request.num_preemptions == 0:
                request.num_cached_tokens = hit.num_tokens
            request.num_computed_tokens = hit.num_tokens
            request.status = RequestStatus.RUNNING
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            self._admissions[request.request_id] = next(self._next_admission)
            scheduled.append(self._grant(request, num_tokens))
            budget -= num_tokens

    def _grant(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        request.num_computed_tokens = end
        return ScheduledRequest(
            request_id=request.request_id,
            admission=self._admissions[request.request_id],
            start=start,
            num_tokens=num_tokens,
            page_table=self.cache.page_table(request.request_id),
            token_ids=request.token_ids[start:end],
            samples=end == request.num_tokens,
        )

    def _append(self, request: Request, token_id: int) -> None:
        """Add a sampled token and end the request where that token or a limit says so."""
        request.append_output(token_id)
        params = request.params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            self.finish(request.request_id, FinishReason.STOP)
        elif token_id in (params.stop_token_ids or ()):
            self.finish(request.request_id, FinishReason.STOP, token_id)
        elif request.num_output_tokens == params.max_tokens or request.num_tokens >= self.max_model_len:
            self.finish(request.request_id, FinishReason.LENGTH)
