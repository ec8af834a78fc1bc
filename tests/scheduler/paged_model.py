"""A stand-in for the worker whose tokens are a function of the whole prefix, read back through the page tables.

Every token's "KV" depends on all KV before it, so a wrong page, a stale page, a wrong position or a page reused too
early changes the tokens that come out.
"""

from collections.abc import Sequence

import numpy as np

from longfill.cache import KVCacheManager, PrefixIdentity
from longfill.request import Request, SamplingParams
from longfill.scheduler import Schedule, Scheduler
from longfill.units import NumPages, PageSize

VOCAB = 97
PRIME = (1 << 31) - 1
IDENTITY = PrefixIdentity(model="m", revision="r", dtype="float32", cache_format="float32+float32", rope={})


def row(context: int, token: int, position: int) -> int:
    """The KV of one token, given the sum of all KV before it."""
    return (context * 48271 + token * 69621 + position * 16807 + 11) % PRIME


class PagedModel:
    """Memory of a page pool, and the step that fills it and samples greedily."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.memory = np.random.default_rng(0).integers(0, PRIME, num_pages * page_size)

    def run(self, schedule: Schedule) -> dict[str, int]:
        sampled = {}
        for scheduled in schedule.requests:
            start, end = scheduled.start, scheduled.start + scheduled.num_tokens
            assert scheduled.num_tokens == scheduled.token_ids.size > 0
            positions = np.arange(end)
            slots = scheduled.page_table[positions // self.page_size] * self.page_size + positions % self.page_size
            assert slots.min() >= self.page_size, "the null page holds tokens"
            context = int(self.memory[slots[:start]].sum()) % PRIME
            for position, token in enumerate(scheduled.token_ids.tolist(), start):
                value = row(context, token, position)
                self.memory[slots[position]] = value
                context = (context + value) % PRIME
            if scheduled.samples:
                sampled[scheduled.request_id] = context % VOCAB
        return sampled


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
    ) -> None:
        pages = NumPages(usable_pages + 1)
        self.cache = KVCacheManager(pages, PageSize(page_size), identity=identity, check_token_ids=True)
        self.scheduler = Scheduler(
            self.cache,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
        )
        self.model = PagedModel(pages, page_size)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def begin(self) -> tuple[Schedule, dict[str, int]]:
        """Schedule a step and run it; its results are pending."""
        schedule = self.scheduler.schedule()
        self.check(schedule)
        return schedule, self.model.run(schedule)

    def step(self) -> Schedule:
        schedule, sampled = self.begin()
        self.scheduler.update(schedule, sampled)
        self.check(schedule)
        return schedule

    def drain(self, max_steps: int = 2000) -> int:
        """Step until no request is left; returns the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.requests:
                assert self.cache.num_free_pages == self.cache.num_usable_pages
                return steps
            self.step()
        raise AssertionError(f"requests {sorted(self.scheduler.requests)} have not ended after {max_steps} steps")

    def check(self, schedule: Schedule) -> None:
        scheduler = self.scheduler
        self.cache.check()
        assert schedule.num_tokens <= scheduler.max_num_batched_tokens
        assert scheduler.num_running <= scheduler.max_num_seqs
        assert scheduler.num_running + scheduler.num_waiting == len(scheduler.requests)
        assert len({scheduled.request_id for scheduled in schedule.requests}) == len(schedule.requests)
        for request in scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_tokens <= scheduler.max_model_len
