"""Whether the figures of a run mean what they seem to: lengths as asked, prompts not cached, the client not the brake.

Imports NumPy. Invariant: a check that cannot be made is said, never passed over; an error means that the figures are of
something else than what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfill.bench.serve_metrics import Answer

CACHE_SHARE = 0.01
"""Share of prompt tokens that may be in the cache by chance, beyond those that prompts share."""
LAG_SHARE, LEAST_LAG = 0.1, 0.002
"""The client's lag that matters: against the median gap between tokens, and in seconds."""
BUSY_CLIENT = 0.9
QUEUE_SHARE = 0.05
"""Share of requests that may wait for a place before the load is another than was asked for."""
TOKENS_PER_CHUNK = 1.2


@dataclass(frozen=True)
class Check:
    """What was found. `level` is "ok", "warning" or "error"."""

    name: str
    level: str
    message: str


def check_prompt_lengths(answers: Sequence[Answer], added: int) -> Check:
    """The server counted as many prompt tokens as were asked for, and at most what its template adds."""
    name = "prompt lengths"
    counted = [answer for answer in answers if answer.prompt_tokens is not None]
    if not counted:
        return Check(name, "warning", "the server reports no usage: nobody knows how long the prompts were")
    gaps = [(answer.prompt_tokens or 0) - answer.job.input_len for answer in counted]
    low, high = min(gaps), max(gaps)
    found = f"{low:+,}" if low == high else f"{low:+,} to {high:+,}"
    wrong = sum(not 0 <= gap <= added for gap in gaps)
    if wrong:
        return Check(
            name, "error", f"{wrong:,} of {len(gaps):,} prompts had other lengths than asked for ({found} tokens); the "
            f"server's template adds {added:,}",
        )  # fmt: skip
    if len(counted) < len(answers):
        return Check(name, "warning", f"as asked for ({found} tokens), where {len(counted):,} answers say it")
    return Check(
        name, "ok", f"as asked for ({found} tokens each from the server's template)" if high else "as asked for"
    )


def check_cache(answers: Sequence[Answer], shared: int) -> Check:
    """No more of the prompts was in the server's prefix cache than the `shared` tokens that all start with."""
    name = "prefix cache"
    counted = [answer for answer in answers if answer.cached_tokens is not None]
    if not counted:
        return Check(
            name, "warning", "the server does not say what it found in its cache: TTFT may be of cached prompts "
            "(vLLM: --enable-prompt-tokens-details)",
        )  # fmt: skip
    tokens = sum(answer.prompt_tokens or answer.job.input_len for answer in counted)
    cached = sum(answer.cached_tokens or 0 for answer in counted)
    unasked = sum(max(0, (answer.cached_tokens or 0) - shared) for answer in counted)
    rate = f"{cached / tokens:.1%} of prompt tokens were cached"
    if unasked > CACHE_SHARE * tokens:
        return Check(
            name, "warning", f"{rate.upper()}, {unasked:,} more tokens than prompts share: TIMES ARE OF THE CACHE, not "
            "of prefill. Has the server seen this --seed before? Leave --seed out, or restart the server",
        )  # fmt: skip
    return Check(name, "ok", rate)


def check_outputs(answers: Sequence[Answer], *, ignore_eos: bool) -> list[Check]:
    """Outputs as long as asked for, and a chunk for each token."""
    asked, got = (sum(lengths) for lengths in zip(*((a.job.output_len, a.output_tokens) for a in answers), strict=True))
    other = sum(answer.output_tokens != answer.job.output_len for answer in answers)
    message = f"{got:,} of {asked:,} tokens asked for; {other:,} of {len(answers):,} outputs had another length"
    if other and ignore_eos:
        checks = [Check("output lengths", "error", f"{message}, with --ignore-eos")]
    elif got < 0.9 * asked:
        checks = [Check("output lengths", "warning", f"{message}: the model ended them (--ignore-eos goes on)")]
    else:
        checks = [Check("output lengths", "ok", message if other else "as asked for")]
    chunks = sum(len(answer.token_times) for answer in answers)
    if chunks and got > TOKENS_PER_CHUNK * chunks:
        message = (
            f"a chunk showed {got / chunks:.1f} tokens in the mean (drafts, tokens without text or chunks sent "
            "together): ITL is between chunks, TTFT is of the first text"
        )
        checks.append(Check("chunks", "warning", message))
    return checks


def check_client(answers: Sequence[Answer], lags: Sequence[float], cpu_share: float) -> Check:
    """This client's own loop was not so late that it shows in the figures."""
    late, most = _percentile(lags, 99), max(lags, default=0.0)
    gaps = [gap for answer in answers for gap in answer.itls]
    smallest = min((_percentile(values, 50) for values in (gaps, _ttfts(answers)) if values), default=0.0)
    message = f"late by {1e3 * late:.1f} ms (p99), {1e3 * most:.1f} ms at most; {cpu_share:.0%} of a core"
    if late > max(LEAST_LAG, LAG_SHARE * smallest) or cpu_share > BUSY_CLIENT:
        return Check(
            "this client", "warning", f"{message}: it may be what was measured. Give it a core of its own, or send less"
        )
    return Check("this client", "ok", message)


def check_load(answers: Sequence[Answer], *, paced: bool) -> Check:
    """Requests were sent when they were due; without a rate (not `paced`) all are due at once and wait their turn."""
    name = "load"
    if not paced:
        return Check(name, "ok", "all requests were due at once")
    slack = 0.05
    waited = [answer.client_queue_time for answer in answers if answer.client_queue_time > slack]
    if len(waited) > QUEUE_SHARE * len(answers):
        return Check(
            name, "warning", f"{len(waited):,} of {len(answers):,} requests were sent later than they were due, by up "
            f"to {max(waited):.1f} s: fewer arrived than asked for, and TTFT leaves that wait out (client_queue_time)",
        )  # fmt: skip
    return Check(name, "ok", "requests were sent when they were due")


def failures(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Failures by kind, the commonest first, each with the first message."""
    failed = [answer for answer in answers if answer.failure is not None]
    kinds = Counter(answer.failure for answer in failed)
    return [
        {"kind": kind, "count": count, "message": next(a.message for a in failed if a.failure == kind)}
        for kind, count in kinds.most_common()
    ]


def _ttfts(answers: Sequence[Answer]) -> list[float]:
    return [answer.ttft for answer in answers if answer.ttft is not None]


def _percentile(values: Sequence[float], place: float) -> float:
    return float(np.percentile(values, place)) if len(values) else 0.0
