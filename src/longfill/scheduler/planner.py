"""Who gets how many tokens in the next step.

Imports Request and the other files of `scheduler/`. Invariant: a step's decode rows are granted before any prompt's,
prompts by priority, and within a priority in the queue's order or by fair shares. Only where priorities count and there
are no more rows than decodes, decodes of a lower priority come after prompts of a higher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longfill.request import Request
from longfill.scheduler.admission import Admission
from longfill.scheduler.cadence import Cadence
from longfill.scheduler.fair import FairPolicy
from longfill.scheduler.pace import QUANTUM
from longfill.scheduler.schedule import Schedule
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
        self._admission = Admission(scheduler)
        self._fair = FairPolicy(scheduler, self._admission)

    def plan(self) -> Step:
        """Grant the next step's tokens; the ledger moves with every grant."""
        config, running = self._config, self._scheduler.running
        self._admission.pages_moved()
        step = Step(tokens=config.step_tokens, rows=config.max_num_batched_tokens, draft_slots=config.draft_slots)
        held = self._cadence.holds(decodes=any(not _is_prefill(r) for r in running))
        level_by_level = config.scheduling_policy == "priority" and len(running) + QUANTUM > step.room
        if not level_by_level:
            self._grant_decodes(step, running)
        cap = self._admission.threshold()
        for level, members in self._levels():
            if level_by_level:
                self._grant_decodes(step, members)
            if config.prefill_policy == "fair":
                self._share(step, level, members, cap, held)
            else:
                self._in_order(step, level, members, cap, held)
        if step.grants:
            self._cadence.ran(prefilled=step.prompt_tokens > 0)
        if not (held or step.blocked):
            self._cadence.left_waiting(self._scheduler.num_waiting)
        return step

    def observe(self, schedule: Schedule, seconds: float, target_s: float | None) -> None:
        """Learn from a booked step, which was planned to take `target_s`."""
        decodes = sum(r.is_one_row for r in schedule.requests)
        prompt_tokens = sum(r.num_tokens - r.num_drafts for r in schedule.requests if not r.is_one_row)
        self._fair.pace.observe(seconds, decodes=decodes, prompt_tokens=prompt_tokens, target_s=target_s)

    def most_tokens(self, request: Request) -> int:
        """Tokens that a request may ever need pages for: prompt, outputs, and drafts beyond them."""
        return self._admission.with_lookahead(self._last_output(request))

    def _levels(self) -> list[tuple[int, list[Request]]]:
        """Levels of the queue and the running requests that belong to each; one where priorities do not count."""
        queue = self._scheduler.waiting
        running: dict[int, list[Request]] = {level: [] for level in queue.levels}
        for request in self._scheduler.running:
            running.setdefault(queue.level_of(request), []).append(request)
        return sorted(running.items())

    def _grant_decodes(self, step: Step, running: Sequence[Request]) -> None:
        """One row for every request that lacks nothing but its newest token, and drafts where rows are left."""
        order = [r for r in running if not _is_prefill(r) and r.num_uncomputed_tokens]
        if self._config.scheduling_policy == "priority":
            order.sort(key=lambda request: request.priority)
        for to_come, request in zip(range(len(order) - 1, -1, -1), order, strict=True):
            if not self._scheduler.is_running(request):
                continue
            last = self._last_output(request)
            coming = request.num_tokens + request.num_output_placeholders
            # It ends with what is in flight, or its rows would stand beyond the longest sequence.
            if request.num_output_placeholders and coming >= last:
                continue
            drafts = min(request.num_draft_tokens, last - coming - 1, step.room_for_drafts(to_come))
            if step.room and self._make_room(request, coming + drafts, step):
                self._grant(step, request, 1 + drafts, drafts)

    def _in_order(self, step: Step, level: int, running: Sequence[Request], cap: int | None, held: bool) -> None:
        """Running prompts in order, then the queue; nobody overtakes."""
        for request in running:
            if not held and self._is_prompt(request):
                self._grant_prompt(step, request, _at_most(cap, request.num_uncomputed_tokens, step.room))
        while not step.is_shut:
            first = self._scheduler.waiting.first(level)
            if first is None or first.request_id in step.preempted:
                return
            if not (self._admission.has_seat() or self._admission.below(first)):
                step.closed = True
                return
            if held and first.num_tokens - self._admission.lookup(first).num_tokens > 1:
                return
            if not self._admit(step, first, _at_most(cap, step.room)):
                step.closed = True  # nor does one of lower priority take what this one waits for
                return

    def _share(self, step: Step, level: int, running: Sequence[Request], cap: int | None, held: bool) -> None:
        """Shares of the step for running and waiting prompts alike, as many tokens as the decodes' share allows."""
        prompts = [request for request in running if self._is_prompt(request)]
        for request, tokens in self._fair.divide(step, level, prompts, cap=cap, held=held):
            if self._scheduler.is_running(request):
                served = self._grant_prompt(step, request, min(tokens, step.room))
            else:
                served = not step.blocked and step.room > 0 and self._admit(step, request, min(tokens, step.room))
            if served:
                self._fair.was_served(level, request)

    def _is_prompt(self, request: Request) -> bool:
        return self._scheduler.is_running(request) and _is_prefill(request)

    def _grant_prompt(self, step: Step, request: Request, tokens: int) -> bool:
        """Grant a running prompt its next tokens, if there are any and pages for them."""
        if tokens == 0 or not self._make_room(request, request.num_computed_tokens + tokens, step):
            return False
        self._grant(step, request, tokens)
        return True

    def _admit(self, step: Step, request: Request, most_tokens: int) -> bool:
        """Let a waiting request in with up to `most_tokens` tokens, if need be in the place of others.

        False where there is no room, or where the steps in flight still hold it.
        """
        admission = self._admission
        hit = admission.lookup(request)  # anew: since it was planned its pages may have been given away
        tokens = min(most_tokens, request.num_tokens - hit.num_tokens)
        if not (admission.has_seat() and admission.has_pages(request, hit, tokens)):
            victims = admission.victims(request, hit, tokens)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(victim, step)
            if not admission.has_pages(request, hit, tokens):
                return False
        allocated = self._cache.allocate(request, admission.with_lookahead(hit.num_tokens + tokens), hit)
        assert allocated, "a request that was found to have room gets no pages"
        admission.pages_moved()
        self._scheduler.admit(request, hit.num_tokens)
        step.admitted.append(request.request_id)
        self._grant(step, request, tokens)
        return True

    def _make_room(self, request: Request, num_tokens_total: int, step: Step) -> bool:
        """Allocate for a running request, preempting others; False if that reached the request itself.

        Pages of steps in flight are on their way already: no further request is preempted for them.
        """
        total = self._admission.with_lookahead(num_tokens_total)
        while not self._cache.allocate(request, total):
            step.blocked = True
            if self._cache.num_pages_missing(request, total) <= 0:
                return False
            victim = self._admission.preemption_order()[0]
            self._preempt(victim, step)
            if victim is request:
                return False
        self._admission.pages_moved()
        return True

    def _preempt(self, victim: Request, step: Step) -> None:
        step.take_back(victim.request_id)
        self._scheduler.preempt(victim.request_id)
        step.preempted.append(victim.request_id)
        self._admission.pages_moved()

    def _grant(self, step: Step, request: Request, tokens: int, drafts: int = 0) -> None:
        admission = self._scheduler.admission(request.request_id)
        assert admission is not None
        step.grant(request, tokens, drafts, admission, self._cache)
        if request.num_output_placeholders:
            request.num_draft_tokens = self._config.num_speculative_tokens

    def _last_output(self, request: Request) -> int:
        """Tokens that a request has at most when it ends."""
        limit, max_tokens = self._config.max_model_len, request.params.max_tokens
        return limit if max_tokens is None else min(request.num_prompt_tokens + max_tokens, limit)


def _is_prefill(request: Request) -> bool:
    """Whether more than its newest token is uncomputed; a one-token tail of a prompt is a decode row."""
    return request.num_uncomputed_tokens > 1


def _at_most(cap: int | None, *tokens: int) -> int:
    return min(tokens) if cap is None else min(cap, *tokens)
