"""`--prefill-policy fair`: which prompts get how much of a step, running and waiting ones alike.

Imports Request and the other files of `scheduler/`. Invariant: planning a step looks at a bounded number of those that
wait, and one that waits for pages is overtaken only until it has waited as long as it needs to be computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from longfill.request import Request
from longfill.scheduler.admission import Admission
from longfill.scheduler.pace import QUANTUM, Pace
from longfill.scheduler.shares import Claim, FairShares
from longfill.scheduler.step import Step

if TYPE_CHECKING:
    from longfill.scheduler.scheduler import Scheduler

WINDOW = 1024
"""Requests at the head of the queue among which the most urgent are looked for."""


class FairPolicy:
    """Divides steps for one scheduler."""

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self.pace = Pace(scheduler.config.decode_share)
        self._scheduler = scheduler
        self._config = scheduler.config
        self._admission = admission
        self._shares: defaultdict[int, FairShares] = defaultdict(FairShares)  # by level
        self._late: WeakSet[Request] = WeakSet()
        self._next: dict[int, Request] = {}  # by level: for whom pages are saved up

    def divide(
        self, step: Step, level: int, running: Sequence[Request], *, cap: int | None, held: bool
    ) -> list[tuple[Request, int]]:
        """Whom to serve with how many tokens: running prompts, then those to admit.

        `running` are a level's prompts. While prompts are `held`, only requests with one token left are let in.
        """
        candidates = [(r, r.num_uncomputed_tokens) for r in running] + self._candidates(step, level)
        claims = [self._claim(r, remaining, cap) for r, remaining in candidates if remaining == 1 or not held]
        if not claims:
            return []
        for_others, budget = self._budgets(step, any(claim.is_late for claim in claims))
        served = [(c.request, c.tokens) for c in self._shares[level].split(budget, claims, for_others=for_others)]
        return sorted(served, key=lambda part: not self._scheduler.is_running(part[0]))

    def was_served(self, level: int, request: Request) -> None:
        """Note that a request got what `divide` said."""
        self._shares[level].was_served(request)

    def urgency(self, request: Request, num_tokens: int) -> float:
        """How long a request has waited over how long its `num_tokens` still need at least: its response ratio."""
        return (self._scheduler.now - request.arrival_time) / self.pace.prompt_s(num_tokens)

    def _budgets(self, step: Step, has_late: bool) -> tuple[int, int]:
        """Prompt tokens that the step may still take: those of prompts that are not late, and all.

        Beside decodes the former are what their share leaves. Late ones may make a step as long as the target.
        """
        if step.decodes == 0:
            return step.room, step.room
        if step.prompt_allowance is None:
            step.prompt_allowance, step.target_s = self.pace.allowance(), self.pace.target_s
        for_others = for_all = step.prompt_allowance
        if has_late and step.target_s is not None and self._config.ttft_target is not None:
            step.target_s = max(step.target_s, self._config.ttft_target)
            for_all = max(for_all, self.pace.tokens_within(step.target_s))
        left = [int(max(0, min(step.room, tokens - step.prompt_tokens))) for tokens in (for_others, for_all)]
        return left[0], left[1]

    def _claim(self, request: Request, remaining: int, cap: int | None) -> Claim:
        tokens = remaining if cap is None else min(cap, remaining)
        return Claim(request, tokens, self.urgency(request, remaining), self._is_late(request, remaining))

    def _is_late(self, request: Request, remaining: int) -> bool:
        """Whether a prompt that could be computed within the target will miss it at half of the machine's pace.

        It stays late until it has its token: the less is left of it, the later it would be called late again.
        """
        target = self._config.ttft_target
        if target is None or request.num_output_tokens:
            return False
        needed = self.pace.prompt_s(remaining)
        if needed <= target < self._scheduler.now - request.arrival_time + 2 * needed:
            self._late.add(request)
        return request in self._late

    def _candidates(self, step: Step, level: int) -> list[tuple[Request, int]]:
        """Who could be admitted together, and how many tokens each still has to compute; the most urgent first."""
        found: list[tuple[Request, int]] = []
        first = None if step.is_shut else self._scheduler.waiting.first(level)
        if first is None or first.request_id in step.preempted:
            return found
        if not (self._admission.has_seat() or self._admission.below(first)):
            return found
        pages = 0
        for request in self._by_urgency(step, level):
            hit = self._admission.lookup(request)
            remaining = request.num_tokens - hit.num_tokens
            if not self._admission.has_seat(len(found)):
                if not found and self._admission.victims(request, hit, remaining):
                    found.append((request, remaining))
                break
            if self._admission.has_pages(request, hit, remaining, pages):
                found.append((request, remaining))
                pages += self._admission.pages_wanted(request, hit, remaining)
                continue
            if not found and self._admission.victims(request, hit, remaining):
                return [(request, remaining)]  # what is left behind the victims is not known yet
            step.closed = True  # nor does one of lower priority take what this one waits for
            if self.urgency(request, remaining) >= 1:
                self._next[level] = request
                break
        return found

    def _by_urgency(self, step: Step, level: int) -> Iterator[Request]:
        """Those that wait, and that the step could serve: the most urgent first.

        Ahead of all is the one that pages are saved up for: while it waits for others to end, those behind it become
        urgent in their turn, the short ones sooner, and would take the pages as they come.
        """
        saved_for = self._next.pop(level, None)
        if saved_for is not None and self._scheduler.is_waiting(saved_for):
            yield saved_for
        most = 2 * max(1, step.room // QUANTUM)  # more do not get a part, even where every second one finds no pages
        window = itertools.islice(self._scheduler.waiting.at(level), WINDOW)
        order = heapq.nlargest(most, window, key=lambda r: self.urgency(r, r.num_uncomputed_tokens))
        yield from (request for request in order if request is not saved_for)
