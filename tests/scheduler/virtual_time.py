"""The scheduler on a virtual clock: steps take what a cost function says, and tokens are counted, not computed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.request import Request, SamplingParams
from longfill.scheduler import Schedule, Scheduler, SchedulerConfig
from longfill.units import NumPages, PageSize

IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a made-up accelerator, or another."""

    step_s: float = 0.025
    row_s: float = 8e-6
    pair_s: float = 5e-12

    def __call__(self, schedule: Schedule) -> float:
        rows = schedule.num_tokens
        pairs = sum(s.num_tokens * s.start + s.num_tokens * (s.num_tokens + 1) // 2 for s in schedule.requests)
        return self.step_s + self.row_s * rows + self.pair_s * pairs


@dataclass
class Life:
    """What became of one request, in seconds and in steps of the run (the n-th schedule that computed something)."""

    request: Request
    steps_before: int
    """Steps that had begun when it arrived."""
    first_step: int | None = None
    token_times: list[float] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    prompt_steps: list[int] = field(default_factory=list)
    """Steps that computed more of it than a token."""

    @property
    def steps_to_start(self) -> int:
        """1: it was in the first step that was scheduled after it arrived."""
        assert self.first_step is not None
        return self.first_step - self.steps_before + 1

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.request.arrival_time

    def rate(self, after: int = 1) -> tuple[float, float]:
        """Tokens a second, and a step, behind the first `after` ones."""
        count = len(self.token_times) - after
        seconds = self.token_times[-1] - self.token_times[after - 1]
        return count / seconds, count / (self.token_steps[-1] - self.token_steps[after - 1])


class VirtualTime:
    """Requests that arrive at their `arrival_time`, and steps one behind the other, `depth` of them in flight."""

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        cost: Callable[[Schedule], float] | None = None,
        depth: int = 1,
        usable_pages: int = 20_000,
        page_size: int = 64,
        budget: int = 2048,
        max_num_seqs: int = 64,
        max_model_len: int = 2_000_000,
        **policies: Any,
    ) -> None:
        self.cost = cost or StepCost()
        self.clock = 0.0
        self.depth = depth
        self.coming = sorted(requests, key=lambda request: request.arrival_time)
        self.cache = KVCacheManager(NumPages(usable_pages + 1), PageSize(page_size), identity=IDENTITY)
        config = SchedulerConfig(
            max_model_len=max_model_len, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **policies
        )
        self.scheduler = Scheduler(self.cache, config, clock=lambda: self.clock)
        self.lives: dict[str, Life] = {}
        self.steps: list[Schedule] = []
        self.preemptions: list[str] = []
        self.stalled: list[Request] = []
        self._in_flight: list[tuple[Schedule, float, float]] = []  # with its seconds, and when it ends

    def __getitem__(self, request_id: str) -> Life:
        return self.lives[request_id]

    def run(self, max_steps: int = 100_000) -> "VirtualTime":
        """Until nobody is left."""
        while len(self.steps) < max_steps:
            self._arrive()
            while len(self._in_flight) < self.depth and self._begin():
                pass
            if self._in_flight:
                self._book()
            elif self.scheduler.requests:
                self.clock += 1.0  # nothing fits: the watchdog's hour comes
            elif self.coming:
                self.clock = self.coming[0].arrival_time
            else:
                return self
        raise AssertionError(f"not done after {max_steps} steps")

    def _arrive(self) -> None:
        while self.coming and self.coming[0].arrival_time <= self.clock:
            request = self.coming.pop(0)
            self.lives[request.request_id] = Life(request, len(self.steps))
            self.scheduler.add_request(request)

    def _begin(self) -> bool:
        schedule = self.scheduler.schedule()
        self.preemptions += schedule.preempted
        self.stalled += schedule.stalled
        if not schedule.requests:
            return bool(schedule.preempted)
        seconds = self.cost(schedule)
        begins = self._in_flight[-1][2] if self._in_flight else self.clock
        self._in_flight.append((schedule, seconds, begins + seconds))
        for scheduled in schedule.requests:
            life = self.lives[scheduled.request_id]
            if life.first_step is None:
                life.first_step = len(self.steps)
            if not scheduled.is_one_row:
                life.prompt_steps.append(len(self.steps))
        self.steps.append(schedule)
        return True

    def _book(self) -> None:
        schedule, seconds, self.clock = self._in_flight.pop(0)
        step = len(self.steps) - 1 - len(self._in_flight)
        sampled = {s.request_id: (1,) for s in schedule.requests if s.samples}
        for advance in self.scheduler.update(schedule, sampled, seconds=seconds):
            life = self.lives[advance.request.request_id]
            life.token_times.append(self.clock)
            life.token_steps.append(step)


def prompt(
    name: str, tokens: int, *, at: float = 0.0, max_tokens: int = 1, priority: int = 0, tenant: str = ""
) -> Request:
    """A prompt that shares nothing with any other of another name."""
    ids = np.full(tokens, sum(ord(c) * 257**i for i, c in enumerate(name)) % (1 << 40))
    return Request(name, ids, SamplingParams(max_tokens=max_tokens), arrival_time=at, priority=priority, tenant=tenant)
