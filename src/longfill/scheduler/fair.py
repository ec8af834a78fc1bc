"""`--prefill-policy fair`: which prompts get how much of a step, running and waiting ones alike.

Imports Request and the other files of `scheduler/`. Invariant: planning a step looks at a bounded number of those that
wait, and one that waits for pages is overtaken only until it has waited as long as it needs to be computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
        budget = min(step.room, self._allowance(step, claims))
        if budget == 0:
            return []
        served = [(claim.request, claim.tokens) for claim in self._shares[level].split(budget, claims)]
        return sorted(served, key=lambda part: not self._scheduler.is_running(part[0]))

    def was_served(self, level: int, request: Request) -> None:
        """Note that a request got what `divide` said."""
        self._shares[level].was_served(request)

    def urgency(self, request: Request, num_tokens: int) -> float:
        """How long a request has waited over how long its `num_tokens` still need at least: its response ratio."""
        return (self._scheduler.now - request.arrival_time) / self.pace.prompt_s(num_tokens)

    def _allowance(self, step: Step, claims: Sequence[Claim]) -> int:
        """Prompt tokens that the step may still take for the sake of its decodes."""
        if step.decodes == 0:
            return step.room
        if step.prompt_allowance is None:
            late_target = self._config.ttft_target if any(claim.is_late for claim in claims) else None
            step.prompt_allowance, step.target_s = self.pace.allowance(late_target)
        return int(max(0, min(step.room, step.prompt_allowance - step.prompt_tokens)))

    def _claim(self, request: Request, remaining: int, cap: int | None) -> Claim:
        tokens = remaining if cap is None else min(cap, remaining)
        return Claim(request, tokens, self.urgency(request, remaining), self._is_late(request, remaining))

    def _is_late(self, request: Request, remaining: int) -> bool:
        """Whether a prompt that could be computed within the target will miss it at half of the machine's pace."""
        target = self._config.ttft_target
        if target is None or request.num_output_tokens:
            return False
        needed = self.pace.prompt_s(remaining)
        return needed <= target < self._scheduler.now - request.arrival_time + 2 * needed

    def _candidates(self, step: Step, level: int) -> list[tuple[Request, int]]:
        """Who could be admitted together, and how many tokens each still has to compute; the most urgent first."""
        found: list[tuple[Request, int]] = []
        first = None if step.is_shut else self._scheduler.waiting.first(level)
        if first is None or first.request_id in step.preempted:
            return found
        if not (self._admission.has_seat() or self._admission.below(first)):
            return found
        most = max(1, step.room // QUANTUM)  # more do not get a part
        window = itertools.islice(self._scheduler.waiting.at(level), WINDOW)
        pages = 0
        for request in heapq.nlargest(2 * most, window, key=lambda r: self.urgency(r, r.num_uncomputed_tokens)):
            hit = self._admission.lookup(request)
            remaining = request.num_tokens - hit.num_tokens
            if self._admission.has_seat(len(found)) and self._admission.has_pages(request, hit, remaining, pages):
                found.append((request, remaining))
                pages += self._admission.pages_wanted(request, hit, remaining)
                continue
            if not found and self._admission.victims(request, hit, remaining):
                return [(request, remaining)]  # what is left behind the victims is not known yet
            step.closed = True  # nor does one of lower priority take what this one waits for
            if not self._admission.has_seat(len(found)) or self.urgency(request, remaining) >= 1:
                break
        return found
