"""Several completions of one prompt (`n` > 1): one request for each, and one output for all.

May import request and errors. Invariant: whoever asked sees its own request id only, at most one output a step with its
completions by index (all n, or with deltas those that have news), and one final output; a request for one completion
passes through unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from longfill.errors import RequestError
from longfill.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

Queue = Callable[[Request, str | None, int], None]
"""Puts a request into the scheduler's queue: (request, its prompt as text, its seed)."""


@dataclass
class _Family:
    """A request for n completions, each a request of its own; those from `num_queued` on are not queued yet."""

    parent: Request
    prompt: str | None
    seed: int
    child_ids: tuple[str, ...]
    latest: list[RequestOutput | None]
    """The last output of each."""
    num_queued: int = 0
    news: list[int] = field(default_factory=list)
    """Indices of those whose last output nobody has seen yet."""

    @property
    def kind(self) -> RequestOutputKind:
        return self.parent.params.output_kind


class Fanout:
    """Stands between the engine's callers and its queue.

    Completion i is the request `f"{i}_{request_id}"` (vLLM's name) with seed `seed + i`. The others are queued once the
    first has a token, so that the prompt is computed once and they find it in the prefix cache; or together with it if
    `at_once`, where there is no such cache. An error ends the completion that it is in, not the others. `live` holds
    the ids of all requests that were queued and have not ended.
    """

    def __init__(self, queue: Queue, live: Container[str], *, at_once: bool) -> None:
        self._queue = queue
        self._live = live
        self._at_once = at_once
        self._families: dict[str, _Family] = {}
        self._places: dict[str, tuple[_Family, int]] = {}
        """By a child's id, also of those not queued yet: the id is taken."""

    def add(self, request: Request, prompt: str | None, seed: int) -> None:
        """Queue a request, or its completions. Raises RequestError where an id is taken or the queue refuses it."""
        request_id, n = request.request_id, request.params.n
        child_ids = tuple(f"{index}_{request_id}" for index in range(n)) if n > 1 else ()
        for name in (request_id, *child_ids):
            if name in self._live or name in self._families or name in self._places:
                raise RequestError(f"request {name}: another request with this id has not ended yet")
        if n == 1:
            self._queue(request, prompt, seed)
            return
        family = _Family(request, prompt, seed, child_ids, [None] * n)
        self._queue_children(family, until=n if self._at_once else 1)
        self._families[request_id] = family
        self._places |= {child_id: (family, index) for index, child_id in enumerate(child_ids)}

    def deliver(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """A step's outputs as their callers know them; queues the completions that waited for a first token."""
        delivered: dict[str, RequestOutput | _Family] = {}
        for output in outputs:
            if output.request_id not in self._places:
                delivered[output.request_id] = output
                continue
            family, index = self._places[output.request_id]
            family.latest[index] = output
            family.news.append(index)
            delivered[family.parent.request_id] = family
        gathered = [self._gathered(item) if isinstance(item, _Family) else item for item in delivered.values()]
        return [output for output in gathered if output is not None]

    def abort(self, request_id: str, end: Callable[[str], RequestOutput | None]) -> RequestOutput | None:
        """End a request, with all its completions, by `end`; returns what it had, or None if it has ended already."""
        if request_id in self._places:
            return None  # not an id of any caller's
        family = self._families.get(request_id)
        if family is None:
            return end(request_id)
        for index, child_id in enumerate(family.child_ids):
            ended = end(child_id)
            if ended is not None:
                family.latest[index] = ended
            if ended is not None or family.latest[index] is None:
                family.news.append(index)
        if not any(family.latest):  # they ended in a step that raised, which brought no outputs
            self._forget(family)
            return None
        return self._gathered(family, aborted=True)

    def _queue_children(self, family: _Family, *, until: int) -> None:
        while family.num_queued < until:
            index = family.num_queued
            # Each must be heard of before it has ended: the first one's first token lets the others begin.
            kind = RequestOutputKind.CUMULATIVE if family.kind is RequestOutputKind.FINAL_ONLY else family.kind
            params = dataclasses.replace(family.parent.params, n=1, output_kind=kind)
            if index > 0:
                # They belong to the prompt, whose every token the first one computes.
                params = dataclasses.replace(params, prompt_logprobs=None)
            child = family.parent.sibling(family.child_ids[index], params)
            self._queue(child, family.prompt, (family.seed + index) % 2**64)
            family.num_queued += 1

    def _gathered(self, family: _Family, *, aborted: bool = False) -> RequestOutput | None:
        """The latest outputs of a family as one, if there is one to show; forgets it once all of it has ended."""
        if not aborted:
            self._queue_children(family, until=family.parent.params.n)
        completions = [
            _not_started(index, family.parent.params, aborted=aborted)
            if output is None
            else dataclasses.replace(output.outputs[0], index=index)
            for index, output in enumerate(family.latest)
        ]
        news, family.news = sorted(family.news), []
        finished = all(completion.finish_reason is not None for completion in completions)
        if finished:
            self._forget(family)
        elif family.kind is RequestOutputKind.FINAL_ONLY:
            return None
        if family.kind is RequestOutputKind.DELTA:
            completions = [completions[index] for index in news]
        started = [output for output in family.latest if output is not None]
        digests = [output.digest for output in started if output.digest is not None]
        return dataclasses.replace(
            started[0],  # says what belongs to the prompt
            request_id=family.parent.request_id,
            outputs=completions,
            finished=finished,
            metrics=_together([output.metrics for output in started], finished=finished),
            digest=hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None,
        )

    def _forget(self, family: _Family) -> None:
        del self._families[family.parent.request_id]
        for child_id in family.child_ids:
            del self._places[child_id]


def _not_started(index: int, params: SamplingParams, *, aborted: bool) -> CompletionOutput:
    """A completion without a token, that waits to be computed or never will be."""
    return CompletionOutput(
        index=index,
        text="",
        token_ids=[],
        finish_reason=FinishReason.ABORT.value if aborted else None,
        logprobs=None if params.logprobs is None else [],
        cumulative_logprob=None if params.logprobs is None else 0.0,
    )


def _together(metrics: Sequence[RequestMetrics], *, finished: bool) -> RequestMetrics:
    """The first of the times when something began, the last of those when it ended, and the sums of the counts."""
    return RequestMetrics(
        arrival_time=metrics[0].arrival_time,
        first_scheduled_time=_first([each.first_scheduled_time for each in metrics]),
        first_token_time=_first([each.first_token_time for each in metrics]),
        finished_time=max(each.finished_time or 0.0 for each in metrics) if finished else None,
        steps=sum(each.steps for each in metrics),
        num_preemptions=sum(each.num_preemptions for each in metrics),
    )


def _first(times: Sequence[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
