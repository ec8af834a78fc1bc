"""The loop: arrivals, the real scheduler's steps, and their results, each at its moment on the virtual clock.

Imports the scheduler, the cache bookkeeping, config, Request and the other files of `simulate/`; never torch.
Invariant: only what the trace, the cost and the engine's arguments say decides the result; no real time enters it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.config import EngineArgs
from longfill.errors import ConfigError, RequestError
from longfill.request import Request, SamplingParams
from longfill.scheduler import Schedule, Scheduler, SchedulerConfig, scheduler_config
from longfill.simulate.agenda import Agenda
from longfill.simulate.cost import StepCost
from longfill.simulate.results import RequestRecord, Simulation, StepRecord
from longfill.simulate.script import Computed, Script
from longfill.simulate.trace import TraceRequest
from longfill.units import NumPages, PageSize, pages_for

MOST_PAGES = 100_000_000
_IDENTITY = PrefixIdentity(model="simulated", revision="", dtype="", cache_format="", rope={})


def simulate(
    trace: Sequence[TraceRequest],
    args: EngineArgs,
    *,
    cost: StepCost | None = None,
    num_pages: int | None = None,
    draft_acceptance: float = 0.7,
    eos_token_ids: Collection[int] = (),
) -> Simulation:
    """Run a trace through the scheduler that `args` describes.

    `num_pages` counts the null page (None: as many as the `max_num_seqs` largest requests need together).
    `draft_acceptance` is the probability that a draft is right when the one before it is. Raises ConfigError for
    arguments that cannot run.
    """
    longest = _max_model_len(trace, args)
    config = scheduler_config(args, max_model_len=longest, eos_token_ids=eos_token_ids)
    pages = NumPages(num_pages or _ample_pages(trace, config, PageSize(args.block_size)))
    if pages > MOST_PAGES:
        raise ConfigError(
            f"--num-pages: {pages:,} pages are more than the simulator keeps books of, {MOST_PAGES:,}; give fewer"
            + ("" if num_pages else ", or --max-model-len: the trace asks for so many tokens")
        )
    cache = KVCacheManager(pages, PageSize(args.block_size), identity=_IDENTITY if args.enable_prefix_caching else None)
    script = Script({r.id: r for r in trace}, cost or StepCost(), acceptance=draft_acceptance, seed=args.seed)
    return _Simulator(trace, cache, config, script, args.steps_in_flight).run()


def _max_model_len(trace: Sequence[TraceRequest], args: EngineArgs) -> int:
    if args.max_model_len is not None:
        return args.max_model_len
    endless = next((request.id for request in trace if request.max_tokens is None), None)
    if endless is not None:
        raise ConfigError(f"--max-model-len: request {endless} has no max_tokens and ends there, so give it")
    return max(request.prompt.num_tokens + (request.max_tokens or 0) for request in trace)


def _ample_pages(trace: Sequence[TraceRequest], config: SchedulerConfig, page_size: PageSize) -> int:
    """So many that nobody is ever preempted."""
    lookahead, limit = config.num_speculative_tokens, config.max_model_len
    sizes = [r.prompt.num_tokens + (limit if r.max_tokens is None else r.max_tokens) + lookahead for r in trace]
    pages = sorted((pages_for(min(size, limit), page_size) for size in sizes), reverse=True)
    return 1 + sum(pages[: config.max_num_seqs])


@dataclass
class _InFlight:
    schedule: Schedule
    computed: Computed
    record: StepRecord

    @property
    def end(self) -> float:
        return self.record.time_s + self.record.seconds


class _Simulator:
    """One run."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        cache: KVCacheManager,
        config: SchedulerConfig,
        script: Script,
        steps_in_flight: int,
    ) -> None:
        self._trace = trace
        self._cache = cache
        self._script = script
        self._steps_in_flight = steps_in_flight
        self._now = 0.0
        self._step = 0  # number of the next step
        self._scheduler = Scheduler(cache, config, clock=lambda: self._now)
        self._agenda = Agenda(trace)
        self._requests: dict[str, Request] = {}  # those that have not ended
        self._records: dict[str, RequestRecord] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._steps: list[StepRecord] = []
        self._preempted: list[str] = []  # since the last step that computed something
        self._ended: list[str] = []  # likewise, from outside
        self._drafts = self._accepted = 0

    def run(self) -> Simulation:
        """To the end of the last request."""
        while True:
            self._fill()
            if self._in_flight:
                self._advance()
            elif self._requests:
                raise RuntimeError(f"step {self._step}: nothing is planned, and {len(self._requests)} requests wait")
            elif (skipped := self._agenda.skip_idle(self._now, self._step)) is not None:
                self._now, self._step = skipped
            else:
                break
        return Simulation(
            steps=self._steps,
            requests={request.id: self._records[request.id] for request in self._trace},
            num_pages=self._cache.num_usable_pages,
            block_size=self._cache.page_size,
            drafts=self._drafts,
            accepted_drafts=self._accepted,
        )

    def _fill(self) -> None:
        """Schedule until enough steps are in flight, or one finds nothing to do."""
        while len(self._in_flight) < self._steps_in_flight:
            self._let_in()
            if not self._begin():
                break

    def _let_in(self) -> None:
        for event in self._agenda.due(self._now, self._step):
            request = self._trace[event.ordinal]
            if event.is_abort:
                self._abort(request.id)
            else:
                self._arrive(request)

    def _arrive(self, given: TraceRequest) -> None:
        arrival = given.arrival_s if given.at_step is None else self._now
        record = RequestRecord(prompt_tokens=given.prompt.num_tokens, arrival_s=arrival)
        self._records[given.id] = record
        request = Request(
            given.id,
            given.prompt.token_ids(),
            SamplingParams(max_tokens=given.max_tokens, ignore_eos=given.ignore_eos),
            arrival_time=arrival,
            cache_salt=given.cache_salt,
            priority=given.priority,
            tenant=given.tenant,
        )
        try:
            self._scheduler.add_request(request)
        except RequestError as error:
            record.finish_reason, record.message = "refused", str(error)
            return
        self._requests[given.id] = request

    def _abort(self, request_id: str) -> None:
        request = self._scheduler.abort(request_id)
        if request is not None:
            self._end(request)
            self._ended.append(request_id)

    def _begin(self) -> bool:
        """Schedule a step and compute it; whether there was anything to do."""
        schedule = self._plan()
        if not schedule.requests:
            return False
        computed = self._script.run(schedule)
        begins = max(self._now, self._in_flight[-1].end if self._in_flight else self._now)
        scheduled = {s.request_id: s.num_tokens for s in schedule.requests}
        # One that was admitted may have been preempted in the same step.
        admitted = [name for name in schedule.admitted if name in scheduled]
        new = [name for name in admitted if self._records[name].first_scheduled_step is None]
        record = StepRecord(
            step=self._step,
            time_s=begins,
            seconds=computed.seconds,
            scheduled=scheduled,
            prefills={s.request_id: s.num_tokens for s in schedule.requests if s.num_tokens - s.num_drafts > 1},
            new=new,
            resumed=[name for name in admitted if name not in new],
            preempted=self._preempted,
            finished=self._ended,
            pages_in_use=self._cache.num_usable_pages - self._cache.num_free_pages,
        )
        for name in record.finished:
            self._records[name].finished_step = record.step
        for name in record.new:
            self._records[name].first_scheduled_s, self._records[name].first_scheduled_step = begins, self._step
        self._preempted, self._ended = [], []
        self._steps.append(record)
        self._in_flight.append(_InFlight(schedule, computed, record))
        self._step += 1
        return True

    def _plan(self) -> Schedule:
        """The next schedule. One may do nothing but preempt; the one after it can admit again."""
        while True:
            schedule = self._scheduler.schedule()
            self._preempted += schedule.preempted
            for request in schedule.stalled:
                self._end(request)
                self._ended.append(request.request_id)
            if schedule.requests or not schedule.preempted:
                return schedule

    def _advance(self) -> None:
        """Move the clock to the end of the oldest step and book it, or to an event that can still join the steps."""
        has_room = len(self._in_flight) < self._steps_in_flight
        if has_room and self._agenda.next_time < self._in_flight[0].end:
            self._now = self._agenda.next_time
            return
        oldest = self._in_flight.popleft()
        self._now = oldest.end
        self._drafts += oldest.computed.drafts
        self._accepted += oldest.computed.accepted
        advanced = self._scheduler.update(oldest.schedule, oldest.computed.sampled, seconds=oldest.record.seconds)
        for advance in advanced:
            record = self._records[advance.request.request_id]
            record.token_times.append(self._now)
            if record.first_token_s is None:
                record.first_token_s, record.first_token_step = self._now, oldest.record.step
            if advance.request.is_finished:
                self._end(advance.request)
                record.finished_step = oldest.record.step
                oldest.record.finished.append(advance.request.request_id)
        oldest.record.free_pages = self._cache.num_free_pages

    def _end(self, request: Request) -> None:
        record = self._records[request.request_id]
        record.finished_s = self._now
        record.output_token_ids = request.output_token_ids.tolist()
        record.finish_reason = None if request.finish_reason is None else request.finish_reason.value
        record.message = request.error
        record.num_cached_tokens, record.num_preemptions = request.num_cached_tokens, request.num_preemptions
        del self._requests[request.request_id]
        self._script.ended(request.request_id)
