"""From answers to figures: times in milliseconds by class of prompt, throughput, goodput, concurrency.

Imports NumPy. Invariant: a failed request counts as failed and in nothing else, and names and meanings are those of
vLLM's `bench serve`, except where `docs/bench_serve.md` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longfill.bench.serve_plan import Job, PromptClass

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "e2el")
"""Metrics of a single request, which `--goodput` can bound."""
CURVE_POINTS = 101


@dataclass
class Answer:
    """What became of one request. Times are seconds after the start of the run."""

    job: Job
    sent: float = 0.0
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    first: float | None = None
    prompt_tokens: int | None = None
    """By the server's count, as are the next two."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    longest_silence: float = 0.0
    failure: str | None = None
    """The kind of failure; None where all went well."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """By the server's count; where it gives none, one for each chunk."""
        return len(self.token_times) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        """From sending to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Of the tokens after the first."""
        if len(self.token_times) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks that showed tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2el(self) -> float:
        """From sending to the end of the stream."""
        return self.ended - self.sent

    @property
    def client_queue_time(self) -> float:
        """From being due to being sent: it waited for a place among `--max-concurrency`."""
        return self.sent - self.job.due

    def values(self, metric: str) -> list[float]:
        """Seconds; none where the metric does not apply."""
        if metric == "itl":
            return self.itls
        value = getattr(self, metric)
        return [] if value is None else [value]

    def to_json(self, *, detailed: bool) -> dict[str, Any]:
        """One entry of `requests`; with the times of all tokens where `detailed`."""
        values = {
            "class": self.job.kind,
            "start": self.sent,
            "ttft": self.ttft,
            "e2el": self.e2el,
            "client_queue_time": self.client_queue_time,
            "input_len": self.job.input_len,
            "output_len": self.job.output_len,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "longest_silence": self.longest_silence,
            "failure": self.failure,
            "message": self.message,
        }
        return values | ({"itls": self.itls} if detailed else {})


@dataclass(frozen=True)
class Wanted:
    """Which figures are asked for."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Objectives in milliseconds, by metric."""


def summarize(answers: Sequence[Answer], classes: Sequence[PromptClass], wanted: Wanted) -> dict[str, Any]:
    """`overall` and `classes`, the latter with the name and the lengths asked for."""
    duration = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    named = []
    for kind, group in enumerate(classes):
        own = [answer for answer in answers if answer.job.kind == kind]
        sizes = {"name": group.name, "input_len": group.input_len, "output_len": group.output_len}
        named.append(sizes | figures(own, duration, wanted))
    return {"duration": duration, "overall": figures(answers, duration, wanted), "classes": named}


def figures(answers: Sequence[Answer], duration: float, wanted: Wanted) -> dict[str, Any]:
    """All figures of these answers; throughput is over the whole run's `duration`."""
    good = [answer for answer in answers if answer.failure is None]
    prompt_tokens = sum(answer.prompt_tokens or answer.job.input_len for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    most, mean = concurrency(answers, duration)
    values: dict[str, Any] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": _goodput(good, wanted.goodput) / duration if wanted.goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "max_concurrent_requests": most,
        "mean_concurrent_requests": mean,
        "max_silence_ms": 1e3 * max((answer.longest_silence for answer in good), default=0.0),
        "curves": {},
    }
    for metric in wanted.metrics:
        times = [1e3 * value for answer in good for value in answer.values(metric)]
        values |= _spread(metric, times, wanted.percentiles)
        values["curves"][metric] = _curve(times)
    return values


def concurrency(answers: Sequence[Answer], duration: float) -> tuple[int, float]:
    """The most requests in flight at a time, and their mean over the run."""
    # An end comes before a start at the same moment: one place was handed on.
    changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most, sum(answer.e2el for answer in answers) / duration


def _goodput(good: Sequence[Answer], objectives: Mapping[str, float]) -> int:
    """Answers that meet all objectives; one that does not apply (no second token to wait for) is met."""
    return sum(
        all(1e3 * value <= limit for metric, limit in objectives.items() for value in answer.values(metric))
        for answer in good
    )


def _spread(metric: str, times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    if not times:
        names = ["mean", "median", "std", *(f"p{place:g}" for place in percentiles)]
        return {f"{name}_{metric}_ms": None for name in names}
    return {
        f"mean_{metric}_ms": float(np.mean(times)),
        f"median_{metric}_ms": float(np.median(times)),
        f"std_{metric}_ms": float(np.std(times)),
        **{f"p{place:g}_{metric}_ms": float(np.percentile(times, place)) for place in percentiles},
    }


def _curve(times: Sequence[float]) -> list[float]:
    """Percentiles 0, 1, ... 100, for the picture."""
    if not times:
        return []
    return [float(value) for value in np.percentile(times, np.linspace(0, 100, CURVE_POINTS))]
