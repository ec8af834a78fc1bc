"""Who gets how many tokens in the next step.

Imports the cache bookkeeping, Request and the other files of `scheduler/`. Invariant: a step's decode rows are granted
before any prompt's, prompts by priority, and within a priority in the queue's order or by fair shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from longfill.cache import PrefixHit
from longfill.request import Request
from longfill.scheduler.cadence import Cadence
from longfill.scheduler.pace import Pace
from longfill.scheduler.schedule import Schedule
from longfill.scheduler.shares import Claim, FairShares, is_late, response_ratio
from longfill.scheduler.step import Step

if TYPE_CHECKING:
    from longfill.scheduler.scheduler import Scheduler


class Planner:
    """Plans steps for a scheduler, whose requests it grants tokens, admits and preempts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._cache = scheduler.cache
        self._cadence = Cadence(self._config.prefill_schedule_interval)
        self._pace = Pace(self._config.decode_share)
        self._shares = FairShares()
        self._watermark = int(self._config.watermark * self._cache.num_usable_pages)

    def plan(self) -> Step:
        """Grant the next step's tokens; the ledger moves with every grant."""
        config = self._config
        step = Step(tokens=config.step_tokens, rows=config.max_num_batched_tokens, draft_slots=config.draft_slots)
        held = self._cadence.holds(decodes=any(not _is_prefill(r) for r in self._scheduler.running))
        self._grant_decodes(step)
        cap = self._threshold()
        for level, running in self._levels():
            if config.prefill_policy == "fair":
                self._fair(step, level, running, cap, held)
            else:
                self._ordered(step, level, running, cap, held)
        if step.grants:
            self._cadence.ran(prefilled=step.prompt_tokens > 0)
        if not (held or step.blocked):
            self._cadence.left_waiting(self._scheduler.num_waiting)
        return step

    def observe(self, schedule: Schedule, seconds: float, target_s: float | None) -> None:
        """Learn from a booked step, which was planned to take `target_s`."""
        decodes = sum(r.num_tokens - r.num_drafts == 1 for r in schedule.requests)
        prompts = schedule.num_tokens - sum(1 + r.num_drafts for r in schedule.requests if r.num_tokens > r.num_drafts)
        self._pace.observe(seconds, decodes=decodes, prompt_tokens=max(0, prompts), target_s=target_s)

    def most_tokens(self, request: Request) -> int:
        """Tokens that a request may ever need pages for: prompt, outputs, and drafts beyond them."""
        limit, max_tokens = self._config.max_model_len, request.params.max_tokens
        if max_tokens is None:
            return limit
        return min(request.num_prompt_tokens + max_tokens + self._config.num_speculative_tokens, limit)

    def _levels(self) -> list[tuple[int, list[Request]]]:
        """Levels of the queue and the running requests that belong to each; one where priorities do not count."""
        queue = self._scheduler.waiting
        running: dict[int, list[Request]] = {level: [] for level in queue.levels}
        for request in self._scheduler.running:
            running.setdefault(queue.level_of(request), []).append(request)
        return sorted(running.items())

    def _grant_decodes(self, step: Step) -> None:
        """One row and its drafts for every request that lacks nothing but its newest token."""
        order = self._scheduler.running
        if self._config.scheduling_policy == "priority":
            order.sort(key=lambda request: request.priority)
        for request in order:
            if not self._scheduler.is_running(request) or _is_prefill(request) or request.num_uncomputed_tokens == 0:
                continue
            last = self._last_output(request)
            coming = request.num_tokens + request.num_output_placeholders
            # It ends with what is in flight, or its rows would stand beyond the longest sequence.
            if request.num_output_placeholders and coming >= last:
                continue
            drafts = min(request.num_draft_tokens, last - coming - 1, step.room - 1)
            if step.room and self._make_room(request, coming + drafts, step):
                self._grant(step, request, 1 + drafts, drafts)

    def _ordered(self, step: Step, level: int, running: list[Request], cap: int | None, held: bool) -> None:
        """Running prompts in order, then the queue; nobody overtakes."""
        for request in running:
            if held or not (self._scheduler.is_running(request) and _is_prefill(request)):
                continue
            tokens = _at_most(cap, request.num_uncomputed_tokens, step.room)
            if tokens and self._make_room(request, request.num_computed_tokens + tokens, step):
                self._grant(step, request, tokens)
        while (first := self._next_waiting(step, level)) is not None:
            request, hit = first, self._lookup(first)
            remaining = request.num_tokens - hit.num_tokens
            if held and remaining > 1:
                return
            tokens = _at_most(cap, remaining, step.room)
            if not (self._has_seat(request, step) and self._has_pages(request, hit, tokens, step)):
                step.closed = True  # nor does one of lower priority take what this one waits for
                return
            self._admit(step, request, hit, tokens)

    def _next_waiting(self, step: Step, level: int) -> Request | None:
        """The first of the queue, if this step may let anyone in."""
        if step.closed or step.blocked or step.room == 0:
            return None
        request = self._scheduler.waiting.first(level)
        return None if request is None or request.request_id in step.preempted else request

    def _fair(self, step: Step, level: int, running: list[Request], cap: int | None, held: bool) -> None:
        """Shares of the step for running and waiting prompts alike, as many tokens as the decodes' share allows."""
        if held:
            return
        claims = [
            Claim(r, _at_most(cap, r.num_uncomputed_tokens))
            for r in running
            if self._scheduler.is_running(r) and _is_prefill(r)
        ]
        hits = self._admissible(step, level)
        claims += [Claim(r, _at_most(cap, r.num_tokens - hit.num_tokens)) for r, hit in hits.values()]
        for request, tokens in self._split(step, claims):
            if request.request_id in hits:
                hit = hits[request.request_id][1]
                if not step.blocked and self._cache.can_allocate(request, hit.num_tokens + tokens, hit):
                    self._admit(step, request, hit, tokens)
            elif self._scheduler.is_running(request) and self._make_room(
                request, request.num_computed_tokens + tokens, step
            ):
                self._grant(step, request, tokens)

    def _split(self, step: Step, claims: list[Claim]) -> Iterator[tuple[Request, int]]:
        """Divide what the step has left among the claims."""
        now, token_s, ttft = self._scheduler.now, self._pace.token_s, self._config.ttft_target
        late = [] if ttft is None else [c for c in claims if is_late(c.request, now, token_s, ttft)]
        budget = step.room
        if step.decodes:
            step.target_s = self._pace.step_target_s(ttft if late else None)
            budget = int(min(budget, self._pace.prompt_tokens(step.target_s)))
        for claim in self._shares.split(budget, claims, late, now, token_s):
            tokens = min(claim.tokens, step.room)  # draft slots may have taken some
            if tokens:
                yield claim.request, tokens

    def _admissible(self, step: Step, level: int) -> dict[str, tuple[Request, PrefixHit]]:
        """Who could be admitted together, and what each finds in the cache; the most urgent ones first.

        One that finds no room is overtaken only until it has waited as long as it needs to be computed.
        """
        found: dict[str, tuple[Request, PrefixHit]] = {}
        first = self._next_waiting(step, level)
        if first is None or not self._has_seat(first, step):
            return found
        now, token_s = self._scheduler.now, self._pace.token_s
        waiting = [r for r in self._scheduler.waiting.at(level) if r.request_id not in step.preempted]
        pages = 0
        for request in sorted(waiting, key=lambda r: -response_ratio(r, now, token_s)):
            if self._scheduler.num_running + len(found) >= self._config.active_seqs:
                break
            hit = self._lookup(request)
            remaining = request.num_tokens - hit.num_tokens
            if self._has_pages(request, hit, remaining, step, taken=pages):
                found[request.request_id] = (request, hit)
                pages += self._pages_wanted(request, hit, remaining)
            elif response_ratio(request, now, token_s) >= 1:
                step.closed = True
                break
        return found

    def _threshold(self) -> int | None:
        """The cap on a prompt's tokens in one step: for none that is the only one that can run."""
        config = self._config
        if config.long_prefill_token_threshold == 0:
            return None
        eligible = self._scheduler.num_running
        most = config.active_seqs if config.long_prefill_token_threshold_adaptive else 2
        pages = 0
        for request in self._scheduler.waiting:
            if eligible >= most:
                break
            hit = self._lookup(request)
            if not self._has_pages(request, hit, request.num_tokens - hit.num_tokens, None, taken=pages):
                break
            pages += self._pages_wanted(request, hit, request.num_tokens - hit.num_tokens)
            eligible += 1
        if eligible <= 1:
            return None
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // eligible)
        return config.long_prefill_token_threshold

    def _lookup(self, request: Request) -> PrefixHit:
        """What the cache holds of a waiting request; nothing for one whose prompt's log-probabilities are wanted."""
        if request.params.prompt_logprobs is not None:
            return PrefixHit([], 0)
        return self._cache.lookup(request)

    def _has_seat(self, request: Request, step: Step) -> bool:
        """Whether another request may run; one of lower priority gives its seat up."""
        if self._scheduler.num_running < self._config.active_seqs:
            return True
        victims = self._victims_below(request)
        if not victims:
            return False
        self._preempt(victims[0], step)
        return True

    def _has_pages(self, request: Request, hit: PrefixHit, tokens: int, step: Step | None, taken: int = 0) -> bool:
        """Whether a waiting request's pages are free beside `taken` ones; with `step`, ones of lower priority give way.

        All its tokens must fit beside all that the running ones will need, not just the first chunk: otherwise long
        prompts are let in together, run out of pages half way and preempt each other.
        """
        needed = self._pages_wanted(request, hit, tokens) + taken
        if needed <= self._free_pages():
            return True
        victims = [] if step is None or taken else self._victims_below(request)
        spare = sum(self._cache.num_owned_pages(r.request_id) for r in victims)
        if step is None or needed > self._free_pages() + spare + self._cache.num_returning_pages:
            return False
        for victim in victims:
            if needed <= self._free_pages() + self._cache.num_returning_pages:
                break
            self._preempt(victim, step)
        return needed <= self._free_pages()

    def _pages_wanted(self, request: Request, hit: PrefixHit, tokens: int) -> int:
        whole = self._config.scheduler_reserve_full_isl
        total = request.num_tokens if whole else hit.num_tokens + tokens
        return self._cache.num_pages_needed(request, self._with_lookahead(total), hit)

    def _free_pages(self) -> int:
        """Pages for one more request: without the watermark, and without those that running prompts will need."""
        free: int = self._cache.num_free_pages
        running = self._scheduler.running
        if running:
            free -= self._watermark
        if self._config.scheduler_reserve_full_isl:
            free -= sum(self._cache.num_pages_needed(r, self._with_lookahead(r.num_tokens)) for r in running)
        return free

    def _victims_below(self, request: Request) -> list[Request]:
        """Running requests of strictly lower priority, the first to be preempted first."""
        if self._config.scheduling_policy == "fcfs":
            return []
        return [r for r in self._preemption_order() if r.priority > request.priority]

    def _preemption_order(self) -> list[Request]:
        order = self._scheduler.running[::-1]
        if self._config.scheduling_policy == "priority":
            order.sort(key=lambda request: (request.priority, request.arrival_time), reverse=True)
        return order

    def _make_room(self, request: Request, num_tokens_total: int, step: Step) -> bool:
        """Allocate for a running request, preempting others; False if that reached the request itself.

        Pages of steps in flight are on their way already: no further request is preempted for them.
        """
        total = self._with_lookahead(num_tokens_total)
        while not self._cache.allocate(request, total):
            step.blocked = True
            missing = self._cache.num_pages_needed(request, total) - self._cache.num_free_pages
            if missing <= self._cache.num_returning_pages:
                return False
            victim = self._preemption_order()[0]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: Step) -> None:
        step.take_back(victim.request_id)
        self._scheduler.preempt(victim.request_id)
        step.preempted.append(victim.request_id)

    def _admit(self, step: Step, request: Request, hit: PrefixHit, tokens: int) -> None:
        self._cache.allocate(request, self._with_lookahead(hit.num_tokens + tokens), hit)
        self._scheduler.admit(request, hit.num_tokens)
        step.admitted.append(request.request_id)
        self._grant(step, request, tokens)

    def _grant(self, step: Step, request: Request, tokens: int, drafts: int = 0) -> None:
        admission = self._scheduler.admission(request.request_id)
        assert admission is not None
        step.grant(request, tokens, drafts, admission, self._cache)
        if request.num_output_placeholders:
            request.num_draft_tokens = self._config.num_speculative_tokens

    def _with_lookahead(self, num_tokens: int) -> int:
        """Tokens that pages are needed for: the draft layer writes ahead of the rows of a step."""
        return min(num_tokens + self._config.num_speculative_tokens, self._config.max_model_len)

    def _last_output(self, request: Request) -> int:
        """Tokens that a request has at most when it ends."""
        limit, max_tokens = self._config.max_model_len, request.params.max_tokens
        return limit if max_tokens is None else min(request.num_prompt_tokens + max_tokens, limit)


def _is_prefill(request: Request) -> bool:
    """Whether more than its newest token is uncomputed; a one-token tail of a prompt is a decode row."""
    return request.num_uncomputed_tokens > 1


def _at_most(cap: int | None, *tokens: int) -> int:
    return min(tokens) if cap is None else min(cap, *tokens)
