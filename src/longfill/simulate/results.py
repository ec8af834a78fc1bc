"""What a simulation found: each step, each request, and figures over all.

Imports numpy. Invariant: everything is plain values of the virtual clock, so the same trace gives the same JSON.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True)
class StepRecord:
    """One step that computed something."""

    step: int
    time_s: float
    """When it began; it waits for the step before it."""
    seconds: float
    scheduled: dict[str, int]
    """Rows by request, drafts included."""
    prefills: dict[str, int]
    """Of these, rows of prompts (and of what is computed again): all but one-row tails and decode rows."""
    new: list[str]
    """Admitted for the first time."""
    resumed: list[str]
    """Admitted again after a preemption."""
    preempted: list[str]
    finished: list[str]
    """Ended by its results, or from outside since the step before it was planned."""
    pages_in_use: int
    """Held while it ran."""
    free_pages: int = 0
    """Free once its results were booked."""


@dataclass(kw_only=True)
class RequestRecord:
    """One request; None where something did not come to pass. Times are virtual seconds from the beginning."""

    prompt_tokens: int
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    first_scheduled_step: int | None = None
    first_token_step: int | None = None
    finished_step: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length, abort, error or refused"""
    message: str | None = None
    """Why it was refused or ended with an error."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times: list[float] = field(default_factory=list, repr=False)
    """When steps brought it tokens; several at once with accepted drafts."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def to_json(self) -> dict[str, Any]:
        """All but the tokens' times."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "token_times"}


@dataclass(kw_only=True)
class Simulation:
    """A finished run."""

    steps: list[StepRecord]
    requests: dict[str, RequestRecord]
    num_pages: int
    """Pages that can hold tokens: the pool's without the null page."""
    block_size: int
    drafts: int
    accepted_drafts: int

    def summary(self) -> dict[str, Any]:
        """Figures over all steps and requests; times and rates are of the virtual clock."""
        records = list(self.requests.values())
        seconds = max((step.time_s + step.seconds for step in self.steps), default=0.0)
        computed = sum(sum(step.scheduled.values()) for step in self.steps)
        outputs = sum(len(record.output_token_ids) for record in records)
        gaps = [np.diff(record.token_times) for record in records]
        return {
            "requests": len(records),
            "finish_reasons": dict(sorted(Counter(str(record.finish_reason) for record in records).items())),
            "steps": len(self.steps),
            "seconds": seconds,
            "computed_tokens": computed,
            "output_tokens": outputs,
            "computed_tokens_per_s": computed / seconds if seconds else None,
            "output_tokens_per_s": outputs / seconds if seconds else None,
            "ttft_s": _distribution([r.ttft_s for r in records if r.ttft_s is not None]),
            "itl_s": _distribution(np.concatenate(gaps) if gaps else []),
            "preemptions": sum(len(step.preempted) for step in self.steps),
            "hit_tokens": sum(record.num_cached_tokens for record in records),
            "drafts": self.drafts,
            "accepted_drafts": self.accepted_drafts,
            "num_pages": self.num_pages,
            "block_size": self.block_size,
            "most_pages_in_use": max((step.pages_in_use for step in self.steps), default=0),
        }

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "requests": {request_id: record.to_json() for request_id, record in self.requests.items()},
            "summary": self.summary(),
        }


def _distribution(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Mean, percentiles (linear between neighbours) and the largest; None of nothing."""
    if len(values) == 0:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    figures = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values))} | figures | {"max": float(np.max(values))}
