"""Log-probabilities of prompts: what the model says of each prompt token, at the row before it.

May import torch, partition and the sampler. Invariant: an entry is a function of its row's logits alone, by the
arithmetic that serves sampled tokens, and no more rows of logits are held at once than the memory plan counts.

Suffixes: T rows of the step · C hidden · R rows of one block · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longfill.partition import StepPlan
from longfill.partition.lengths import Int64Array
from longfill.request import Logprob
from longfill.worker.sampler import NOT_NUMBERS, logprobs_of

PromptLogprobs = dict[int, dict[int, Logprob]]
"""Place in the prompt -> log-probabilities by token id: of the token that stands there first, then of the likeliest."""


@dataclass(frozen=True, eq=False)
class PromptInput:
    """Rows of one request in a step, behind each of which stands a prompt token that is to get its log-probability."""

    request_id: str
    first: int
    """Place in the prompt of `token_ids[0]`, from 1 on: it is the row at position `first - 1` that says something of
    it."""
    token_ids: Int64Array
    """int64 [rows]: the prompt's tokens behind consecutive rows."""
    num_likeliest: int
    """How many of the likeliest tokens are to be given too."""


@dataclass(frozen=True)
class _Wanted:
    """One row of the step and the prompt token behind it."""

    request_id: str
    row: int
    place: int
    token_id: int
    num_likeliest: int


def prompt_logprobs(
    plan: StepPlan, inputs: Sequence[PromptInput], head: Callable[[Int64Array], Tensor | None], *, block_rows: int
) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
    """Each input's log-probabilities by request id, and why some requests get none (id -> error).

    `head` makes fp32 logits [R, V] of R rows of the batch (int64 [R]), at most `block_rows`; all ranks must call it,
    and on those where it gives None nothing is found. Each input belongs to another request of the plan.
    """
    wanted = _wanted_rows(plan, inputs)
    found: dict[str, PromptLogprobs] = {given.request_id: {} for given in inputs}
    failed: dict[str, str] = {}
    for start in range(0, len(wanted), block_rows):
        block = wanted[start : start + block_rows]
        logits_RV = head(np.array([each.row for each in block], dtype=np.int64))
        if logits_RV is None:
            continue
        entries = logprobs_of(logits_RV, [(each.token_id, each.num_likeliest) for each in block])
        for each, entry in zip(block, entries, strict=True):
            if entry is None:
                failed.setdefault(each.request_id, f"prompt_logprobs of prompt token {each.place}: {NOT_NUMBERS}")
            else:
                found[each.request_id][each.place] = entry
    return {name: entries for name, entries in found.items() if name not in failed}, failed


def _wanted_rows(plan: StepPlan, inputs: Sequence[PromptInput]) -> list[_Wanted]:
    """The rows of all inputs, one after the other."""
    starts = zip(plan.requests, plan.query_starts.tolist(), strict=False)
    origins = {request.request_id: row - request.start for request, row in starts}  # where its position 0 would be
    return [
        _Wanted(given.request_id, origins[given.request_id] + place - 1, place, token_id, given.num_likeliest)
        for given in inputs
        for place, token_id in enumerate(given.token_ids.tolist(), given.first)
    ]
