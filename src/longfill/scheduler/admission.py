"""Whether a waiting request can be let in: a seat, pages, and who would have to give way for them.

Imports the cache bookkeeping, Request and the scheduler's config. Invariant: nothing here moves anybody; who is found
to have room can be admitted, and who is named as a victim makes enough of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longfill.cache import PrefixHit
from longfill.request import Request

if TYPE_CHECKING:
    from longfill.scheduler.scheduler import Scheduler


class Admission:
    """Answers for one scheduler. `pages_moved` has to be called after every change of who owns which pages."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._cache = scheduler.cache
        self._watermark = int(self._config.watermark * self._cache.num_usable_pages)
        self._spare: int | None = None

    def pages_moved(self) -> None:
        """Forget what was counted."""
        self._spare = None

    def lookup(self, request: Request) -> PrefixHit:
        """What the cache holds of a waiting request; nothing for one whose prompt's log-probabilities are wanted.

        Good until anybody is given pages, which may be these.
        """
        if request.params.prompt_logprobs is not None:
            return PrefixHit([], 0)
        return self._cache.lookup(request)

    def with_lookahead(self, num_tokens: int) -> int:
        """Tokens that pages are needed for: the draft layer writes ahead of the rows of a step."""
        return min(num_tokens + self._config.num_speculative_tokens, self._config.max_model_len)

    def pages_wanted(self, request: Request, hit: PrefixHit, tokens: int) -> int:
        """Free pages that must be there for a request to be let in and compute `tokens` first."""
        return self._cache.num_pages_needed(request, self._tokens_wanted(request, hit, tokens), hit)

    def has_seat(self, taken: int = 0) -> bool:
        """Whether another request may run beside the running ones and `taken` more."""
        return self._scheduler.num_running + taken < self._config.active_seqs

    def has_pages(self, request: Request, hit: PrefixHit, tokens: int, taken: int = 0) -> bool:
        """Whether a waiting request's pages are free now, beside `taken` ones.

        All its tokens must fit beside all that the running ones will need, not just the first chunk: otherwise long
        prompts are let in together, run out of pages half way and preempt each other.
        """
        if self._spare is None:
            self._spare = self._cache.num_free_pages - self._reserved(self._scheduler.running)
        return self.pages_wanted(request, hit, tokens) + taken <= self._spare

    def victims(self, request: Request, hit: PrefixHit, tokens: int) -> Sequence[Request] | None:
        """Who has to give way so that a waiting request can run, once steps in flight are booked; None: it must wait.

        Only requests of strictly lower priority do, and none of them if all together would not be enough.
        """
        below = self.below(request)
        fewest = 0 if self.has_seat() else 1

        def suffices(count: int) -> bool:
            gone = {victim.request_id for victim in below[:count]}
            wanted = self._tokens_wanted(request, hit, tokens)
            missing = self._cache.num_pages_missing(request, wanted, hit, gone=gone)
            return missing + self._reserved([r for r in self._scheduler.running if r.request_id not in gone]) <= 0

        if fewest > len(below) or not suffices(len(below)):
            return None
        return below[: bisect.bisect_left(range(len(below)), True, lo=fewest, key=suffices)]

    def below(self, request: Request) -> list[Request]:
        """Running requests of strictly lower priority, the first to be preempted first."""
        if self._config.scheduling_policy == "fcfs":
            return []
        return [r for r in self.preemption_order() if r.priority > request.priority]

    def preemption_order(self) -> list[Request]:
        """Running requests, the first to be preempted first: the last of the lowest priority."""
        order = self._scheduler.running[::-1]
        if self._config.scheduling_policy == "priority":
            order.sort(key=lambda request: (request.priority, request.arrival_time), reverse=True)
        return order

    def threshold(self) -> int | None:
        """The cap on a prompt's tokens in one step; None where there is none, as for the only one that can run."""
        config = self._config
        if config.long_prefill_token_threshold == 0:
            return None
        eligible = self._scheduler.num_running
        most = config.active_seqs if config.long_prefill_token_threshold_adaptive else min(2, config.active_seqs)
        pages = 0
        for request in self._scheduler.waiting:
            if eligible >= most:
                break
            hit = self.lookup(request)
            remaining = request.num_tokens - hit.num_tokens
            if not self.has_pages(request, hit, remaining, taken=pages):
                break
            pages += self.pages_wanted(request, hit, remaining)
            eligible += 1
        if eligible <= 1:
            return None
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // eligible)
        return config.long_prefill_token_threshold

    def _tokens_wanted(self, request: Request, hit: PrefixHit, tokens: int) -> int:
        whole = self._config.scheduler_reserve_full_isl
        return self.with_lookahead(request.num_tokens if whole else hit.num_tokens + tokens)

    def _reserved(self, running: Sequence[Request]) -> int:
        """Free pages that are not for one more request: the watermark, and what running prompts will need."""
        reserved = self._watermark if running else 0
        if self._config.scheduler_reserve_full_isl:
            reserved += sum(self._cache.num_pages_needed(r, self.with_lookahead(r.num_tokens)) for r in running)
        return reserved
