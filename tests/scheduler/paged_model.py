"""A stand-in for the worker whose tokens are a function of the whole prefix, read back through the page tables.

Every token's "KV" depends on all KV before it, so a wrong page, a stale page, a wrong position or a page reused too
early changes the tokens that come out.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.request import Request, SamplingParams
from longfill.scheduler import Schedule, ScheduledRequest, Scheduler, SchedulerConfig
from longfill.units import NumPages, PageSize

VOCAB = 97
PRIME = (1 << 31) - 1
IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})


def row(context: int, token: int, position: int) -> int:
    """The KV of one token, given the sum of all KV before it."""
    return (context * 48271 + token * 69621 + position * 16807 + 11) % PRIME


class PagedModel:
    """Memory of a page pool, and the step that fills it, samples greedily, verifies drafts and makes new ones.

    Like a worker it knows what the scheduler does not yet: the true place of a request's next row, the token that goes
    there and its drafts. A draft is right with probability `acceptance`.
    """

    def __init__(self, num_pages: int, page_size: int, *, drafts: int = 0, acceptance: float = 0.6) -> None:
        self.page_size = page_size
        self.memory = np.random.default_rng(0).integers(0, PRIME, num_pages * page_size)
        self.drafts = drafts
        self.acceptance = acceptance
        self.rng = np.random.default_rng(1)
        self.tails: dict[tuple[str, int], tuple[int, list[int]]] = {}  # next position, its token and the drafts

    def run(self, schedule: Schedule) -> dict[str, tuple[int, ...]]:
        return {s.request_id: tokens for s in schedule.requests if (tokens := self._row_by_row(s))}

    def _row_by_row(self, scheduled: ScheduledRequest) -> tuple[int, ...]:
        """Compute a request's rows; the tokens that it samples."""
        key = (scheduled.request_id, scheduled.admission)
        start, tokens = scheduled.start, scheduled.token_ids.tolist()
        assert scheduled.num_tokens == len(tokens) > 0
        if scheduled.num_unknown:
            start, tail = self.tails[key]
            assert start <= scheduled.start, "the scheduler's bound on the first row is no bound"
            tokens = tail[: scheduled.num_tokens]
            assert len(tokens) == scheduled.num_tokens
        positions = np.arange(start + len(tokens))
        slots = scheduled.page_table[positions // self.page_size] * self.page_size + positions % self.page_size
        assert slots.min() >= self.page_size, "the null page holds tokens"
        context = int(self.memory[slots[:start]].sum()) % PRIME
        contexts = []
        for position, token in enumerate(tokens, start):
            self.memory[slots[position]] = value = row(context, token, position)
            context = (context + value) % PRIME
            contexts.append(context)
        if not scheduled.samples:
            following = scheduled.next_token_id
            assert following >= 0, "a chunk in the middle of a prompt knows the token behind it"
            return ()
        verified = tokens[len(tokens) - scheduled.num_drafts :] if scheduled.num_drafts else []
        sampled = [contexts[len(tokens) - 1 - scheduled.num_drafts] % VOCAB]
        for draft, context in zip(verified, contexts[len(tokens) - scheduled.num_drafts :], strict=True):
            if draft != sampled[-1]:
                break
            sampled.append(context % VOCAB)
        end = start + len(tokens) - scheduled.num_drafts + len(sampled) - 1
        context = contexts[end - start - 1]
        self.tails[key] = (end, [sampled[-1], *self._draft(context, sampled[-1], end)])
        return tuple(sampled)

    def _draft(self, context: int, token: int, position: int) -> list[int]:
        drafts = []
        for _ in range(self.drafts):
            context = (context + row(context, token, position)) % PRIME
            token, position = context % VOCAB, position + 1
            drafts.append(token if self.rng.random() < self.acceptance else (token + 1) % VOCAB)
        return drafts


def undisturbed(request: Request, max_model_len: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
    """The outputs of a request that runs alone, without pages."""
    context, outputs = 0, []
    tokens = request.token_ids[: request.num_prompt_tokens].tolist()
    for position in range(max_model_len):
        context = (context + row(context, tokens[position], position)) % PRIME
        if position + 1 < len(tokens):
            continue
        token = context % VOCAB
        outputs.append(token)
        tokens.append(token)
        stop = {*(request.params.stop_token_ids or ()), *(() if request.params.ignore_eos else eos_token_ids)}
        if token in stop or len(outputs) == request.params.max_tokens or len(tokens) == max_model_len:
            break
    return outputs


def request_of(
    name: str, tokens: Sequence[int] | np.ndarray, *, max_tokens: int | None = 4, **params: object
) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, **params))


class Engine:
    """Scheduler, cache and paged model in one loop, checked after every move."""

    def __init__(
        self,
        *,
        usable_pages: int = 64,
        page_size: int = 4,
        max_model_len: int = 1000,
        budget: int = 16,
        max_num_seqs: int = 8,
        eos_token_ids: Sequence[int] = (),
        identity: PrefixIdentity | None = IDENTITY,
        depth: int = 1,
        **policies: Any,
    ) -> None:
        pages = NumPages(usable_pages + 1)
        self.cache = KVCacheManager(pages, PageSize(page_size), identity=identity, check_token_ids=True)
        self.config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            eos_token_ids=frozenset(eos_token_ids),
            **policies,
        )
        self.clock = 0.0
        self.scheduler = Scheduler(self.cache, self.config, clock=lambda: self.clock)
        self.depth = depth
        self.in_flight: deque[tuple[Schedule, dict[str, tuple[int, ...]]]] = deque()
        self.model = PagedModel(pages, page_size, drafts=self.config.num_speculative_tokens)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def begin(self) -> Schedule:
        """Schedule a step and run it; its results are pending."""
        schedule = self.scheduler.schedule()
        self.check(schedule)
        if schedule.requests:
            self.in_flight.append((schedule, self.model.run(schedule)))
        return schedule

    def book(self, seconds: float | None = None) -> list[Request]:
        """Book the oldest pending step, if there is one; returns those that got tokens."""
        if not self.in_flight:
            return []
        schedule, sampled = self.in_flight.popleft()
        advanced = self.scheduler.update(schedule, sampled, seconds=seconds)
        self.check(schedule)
        assert all(advance.num_tokens > 0 for advance in advanced)
        return [advance.request for advance in advanced]

    def book_all(self) -> list[Request]:
        """Book every pending step."""
        return [request for _ in range(len(self.in_flight)) for request in self.book()]

    def step(self) -> Schedule:
        """Schedule until `depth` steps are in flight, or one finds nothing to do, and book the oldest."""
        schedule = self.begin()
        while schedule.requests and len(self.in_flight) < self.depth:
            schedule = self.begin()
        self.book()
        return schedule

    def drain(self, max_steps: int = 2000) -> int:
        """Step until no request is left; returns the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.requests:
                while self.in_flight:
                    assert self.book() == [], "a request got a token after its end"
                assert self.cache.num_free_pages == self.cache.num_usable_pages
                return steps
            self.step()
        raise AssertionError(f"requests {sorted(self.scheduler.requests)} have not ended after {max_steps} steps")

    def check(self, schedule: Schedule) -> None:
        scheduler = self.scheduler
        self.cache.check()
        assert schedule.num_tokens <= self.config.max_num_batched_tokens
        assert scheduler.num_running <= self.config.max_num_seqs
        assert scheduler.num_running + scheduler.num_waiting == len(scheduler.requests)
        assert len({scheduled.request_id for scheduled in schedule.requests}) == len(schedule.requests)
        for request in scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders
            assert 0 <= request.num_in_flight_tokens <= request.num_computed_tokens
            assert request.num_output_placeholders >= 0
            assert request.num_booked_tokens <= request.num_tokens <= self.config.max_model_len
