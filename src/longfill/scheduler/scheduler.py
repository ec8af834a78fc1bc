"""The ledger: which requests there are, and what steps have done for them.

Imports the cache bookkeeping, Request and the other files of `scheduler/`; pure Python, no tensors. Invariant: there
are no phases, only a ledger: each request's `num_computed_tokens` chases its `num_tokens`; chunks, prefix hits,
preemptions and drafts are starts and strides.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longfill.cache import KVCacheManager
from longfill.errors import RequestError
from longfill.request import FinishReason, Request, RequestStatus
from longfill.scheduler.config import SchedulerConfig
from longfill.scheduler.planner import Planner
from longfill.scheduler.queue import WaitingQueue
from longfill.scheduler.schedule import Schedule, ScheduledRequest
from longfill.scheduler.watchdog import Watchdog
from longfill.units import pages_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Advance:
    """What a booked step did for a request: its newest tokens, or the error that ended it."""

    request: Request
    num_tokens: int
    """Tokens that it got: of the sampled ones those up to its end; 0 where it failed."""


class Scheduler:
    """Plans steps over the requests that it holds, and books their results.

    A step is `schedule()`, then the model, then `update()`. Several steps may be scheduled before the first is booked;
    they are booked in the order they were scheduled. `add_request`, `abort`, `finish` and `preempt` may come at any
    moment in between. `clock` gives seconds, for arrival order, ageing and the watchdog.
    """

    def __init__(
        self, cache: KVCacheManager, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache = cache
        self.config = config
        self.requests: dict[str, Request] = {}
        """Every request that is waiting or running, by id, oldest first."""
        self._clock = clock
        self._running: dict[str, Request] = {}  # in order of admission
        self._waiting = WaitingQueue(by_priority=config.scheduling_policy == "priority")
        self._admissions: dict[str, int] = {}  # of the running requests
        self._next_admission = itertools.count()
        self._next_step = itertools.count()
        self._in_flight: deque[Schedule] = deque()
        self._targets: dict[int, float | None] = {}  # seconds that a step in flight may take
        self._stalled: list[tuple[Request, str]] = []  # to end before the next step
        self._watchdog = Watchdog(config.progress_timeout)
        self._planner = Planner(self)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def running(self) -> list[Request]:
        """Running requests in the order of their admission."""
        return list(self._running.values())

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    @property
    def now(self) -> float:
        return self._clock()

    def is_running(self, request: Request) -> bool:
        return request.request_id in self._running

    def is_waiting(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request and not self.is_running(request)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, for one that could never be finished."""
        if request.request_id in self.requests:
            raise RequestError(f"request {request.request_id}: another request with this id has not ended yet")
        self._refuse_what_never_fits(request)
        self.requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; no token reaches it any more. Returns it, or None if it has ended already."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """End a request for `reason` and free its pages. Returns it, or None if it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._release(request_id)
        self._running.pop(request_id, None)
        self._waiting.remove(request)
        self._watchdog.ended(request_id)
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
        self._release(request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        logger.info(
            "preempted request %s: %d computed tokens dropped, preemption %d of it",
            request_id,
            request.num_computed_tokens,
            request.num_preemptions,
        )
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.num_output_placeholders = request.num_draft_tokens = 0
        self._waiting.put_back(request)
        why = self._watchdog.preempted(request, self.now)
        if why is not None:
            self._stalled.append((request, why))

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        """Move a request whose pages are allocated from the queue to the running ones."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        self._waiting.remove(request)
        self._running[request.request_id] = request
        self._admissions[request.request_id] = next(self._next_admission)

    def admission(self, request_id: str) -> int | None:
        """The serial number under which a request runs; None for one that does not."""
        return self._admissions.get(request_id)

    def schedule(self) -> Schedule:
        """Plan the next step and move the ledger as if it were computed.

        Decode rows come first, then prompts as the policies say. A running request that gets no page preempts others,
        the last one first, in the end itself. With no token to compute or no page to do it in the schedule is empty,
        and need not be booked.
        """
        stalled = self._end_stalled()
        step = self._planner.plan()
        schedule = Schedule(
            next(self._next_step), step.grants, tuple(step.admitted), tuple(step.preempted), tuple(stalled)
        )
        if schedule.requests:
            self._in_flight.append(schedule)
            self._targets[schedule.step] = step.target_s
        stuck = None if self._in_flight else next(iter(self._waiting), None)
        why = self._watchdog.idle(stuck, self.now)
        if stuck is not None and why is not None:
            self._stalled.append((stuck, why))
        return schedule

    def start_over(self) -> None:
        """Take back every step that is not booked, and whatever an exception left half planned or half booked.

        All that runs goes back to the queue, in its order; nothing of those steps can be found later.
        """
        for request in reversed(self.running):
            self.preempt(request.request_id)
        self._in_flight.clear()
        self._targets.clear()
        self.cache.settle(None)

    def update(
        self,
        schedule: Schedule,
        sampled: Mapping[str, Sequence[int]],
        failed: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
    ) -> list[Advance]:
        """Book a step's results; steps must come in the order they were scheduled.

        `sampled` holds, for each request of the step that `samples`, one token id and one more for each of its drafts
        that was right; those in `failed` (id -> why) end with an error instead. `seconds` is what the step took on the
        clock, for the policies that mind. Returns the requests that got tokens or failed, in the step's order. A
        request that was preempted or ended while the step ran gets nothing.
        """
        failed = failed or {}
        if schedule.requests and schedule is not self._in_flight[0]:
            raise ValueError(f"step {schedule.step} is booked before step {self._in_flight[0].step}, which is older")
        target = self._leave_flight(schedule)
        if seconds is not None:
            self._planner.observe(schedule, seconds, target)
        advanced: list[Advance] = []
        for scheduled in schedule.requests:
            if not self._is_current(scheduled):
                continue
            request = self.requests[scheduled.request_id]
            if request.request_id in failed:
                request.error = failed[request.request_id]
                self.finish(request.request_id, FinishReason.ERROR)
                advanced.append(Advance(request, 0))
                continue
            tokens = sampled[request.request_id] if scheduled.samples else ()
            count = self._book(request, scheduled, tokens)
            if scheduled.samples:
                advanced.append(Advance(request, count))
        return advanced

    def _book(self, request: Request, scheduled: ScheduledRequest, tokens: Sequence[int]) -> int:
        """Move the ledger by what a step brought; returns how many of `tokens` the request keeps."""
        request.num_in_flight_tokens -= scheduled.num_tokens
        if scheduled.samples:
            if not 1 <= len(tokens) <= 1 + scheduled.num_drafts:
                raise ValueError(
                    f"request {request.request_id}: {len(tokens)} tokens sampled from 1 + {scheduled.num_drafts} rows"
                )
            request.num_output_placeholders -= 1 + scheduled.num_drafts
            request.num_computed_tokens -= 1 + scheduled.num_drafts - len(tokens)
        kept = self._append(request, tokens)
        self.cache.publish(request, min(request.num_booked_tokens, request.num_tokens))
        self._watchdog.booked(request, self.now, got_token=kept > 0)
        if request.finish_reason is not None:
            self.finish(request.request_id, request.finish_reason, request.stop_reason)
        return kept

    def _append(self, request: Request, tokens: Sequence[int]) -> int:
        """Add sampled tokens up to the one that ends the request, and note the end."""
        params = request.params
        for count, token_id in enumerate(tokens, 1):
            request.append_output(token_id)
            if token_id in self.config.eos_token_ids and not params.ignore_eos:
                request.finish_reason = FinishReason.STOP
            elif token_id in (params.stop_token_ids or ()):
                request.finish_reason, request.stop_reason = FinishReason.STOP, token_id
            elif request.num_output_tokens == params.max_tokens or request.num_tokens >= self.config.max_model_len:
                request.finish_reason = FinishReason.LENGTH
            if request.finish_reason is not None:
                return count
        return len(tokens)

    def _end_stalled(self) -> list[Request]:
        """End the requests that make no progress; the planner takes care of all others."""
        stalled = [(request, why) for request, why in self._stalled if not request.is_finished]
        self._stalled = []
        for request, why in stalled:
            request.error = why
            self.finish(request.request_id, FinishReason.ERROR)
        return [request for request, _ in stalled]

    def _is_current(self, scheduled: ScheduledRequest) -> bool:
        """Whether the request still runs under the admission that was scheduled."""
        return self._admissions.get(scheduled.request_id) == scheduled.admission

    def _leave_flight(self, schedule: Schedule) -> float | None:
        """Free what the step alone kept busy; returns the seconds that it was planned to take at most."""
        if schedule.requests:
            self._in_flight.remove(schedule)
        self.cache.settle(self._in_flight[0].step if self._in_flight else None)
        return self._targets.pop(schedule.step, None)

    def _release(self, request_id: str) -> None:
        """End a request's admission, if it has one: its pages are free once no step in flight can write them."""
        admission = self._admissions.pop(request_id, None)
        steps = [s.step for s in self._in_flight for r in s.requests if r.admission == admission]
        self.cache.free(request_id, busy_until=max(steps, default=None))

    def _refuse_what_never_fits(self, request: Request) -> None:
        name, prompt, limit = f"request {request.request_id}", request.num_prompt_tokens, self.config.max_model_len
        if prompt >= limit:
            raise RequestError(
                f"{name}: the prompt has {prompt:,} tokens; with max_model_len {limit:,} at most "
                f"{limit - 1:,} leave room for an output; shorten it or raise --max-model-len"
            )
        total = self._planner.most_tokens(request)
        page_size, usable = self.cache.page_size, self.cache.num_usable_pages
        needed = pages_for(total, page_size)
        if needed > usable:
            raise RequestError(
                f"{name}: {prompt:,} prompt tokens and up to {total - prompt:,} outputs need {needed:,} pages of "
                f"{page_size} tokens, but the whole KV pool has {usable:,} ({usable * page_size:,} tokens); lower "
                "max_tokens, shorten the prompt or raise --memory-budget"
            )
