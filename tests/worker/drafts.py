"""Drives a worker step by step without a scheduler, and puts drafts of our choice in place of its own.

For tests only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracle.harness import engine
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.scheduler import UNKNOWN, ScheduledRequest
from longfill.worker.sampler import SampleInput
from longfill.worker.worker import Worker

Choose = Callable[[str, int, Sequence[int]], Sequence[int]]
"""(request id, output index of the first draft, the drafts made for it) -> those to use."""


def speculative(count: int) -> dict[str, Any]:
    """Engine arguments for so many drafts; none for 0."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}} if count else {}


def choose_drafts(worker: Worker, choose: Choose) -> None:
    """The worker's drafts from now on: it still makes its own, and so writes its rows."""
    drafter = worker._drafter
    assert drafter is not None
    draft = drafter.draft

    def chosen(plan: Any, rows: Any, hidden_TC: Tensor, sampled: Any, inputs: Sequence[SampleInput]) -> Any:
        made = draft(plan, rows, hidden_TC, sampled, inputs)
        first = {row.request_id: row.output_index + len(sampled.get(row.request_id, ())) for row in inputs}
        return {name: tuple(choose(name, first[name], drafts)) for name, drafts in made.items()}

    drafter.draft = chosen  # type: ignore[method-assign]


@dataclass
class Driven:
    """One request: what it got, with the fp32 logits [V] behind each token, and its steps."""

    prompt: list[int]
    pages: np.ndarray[Any, Any]
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    num_drafts: int = 0
    decode_steps: int = 0
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Output index of the first of them -> the drafts that a step left."""


def drive(
    folder: Path, prompts: Sequence[list[int]], params: SamplingParams, *, drafts: int, chunk: int, page: int = 4,
    choose: Choose | None = None, **args: Any,
) -> list[Driven]:  # fmt: skip
    """Compute all prompts, `chunk` rows of each a step, and `params.max_tokens` outputs of each."""
    assert params.max_tokens is not None
    given = {"block_size": page, "max_num_batched_tokens": 256} | speculative(drafts) | args
    llm: LLM = engine(folder, **given)
    worker = llm.engine.worker
    if choose is not None:
        choose_drafts(worker, choose)
    requests: dict[str, Driven] = {}
    first = 1
    for i, prompt in enumerate(prompts):
        count = -(-(len(prompt) + params.max_tokens + 2 * drafts) // page)
        requests[str(i)] = Driven(prompt, np.arange(first, first + count)[::-1].copy())
        first += count
    while any(len(r.token_ids) < params.max_tokens for r in requests.values()):
        live = {name: r for name, r in requests.items() if len(r.token_ids) < params.max_tokens}
        _step(worker, live, params, chunk)
    return list(requests.values())


def _step(worker: Worker, live: dict[str, Driven], params: SamplingParams, chunk: int) -> None:
    schedule = [_scheduled(name, request, chunk) for name, request in live.items()]
    plan = worker.plan(worker.resolve(schedule))
    inputs = [
        SampleInput(r.request_id, params, 7 + int(r.request_id), len(live[r.request_id].token_ids))
        for r in plan.requests
        if r.samples
    ]
    result = worker.execute(plan, inputs)
    assert not result.failed
    for part in schedule:
        request = live[part.request_id]
        if not part.samples:
            request.num_computed += part.num_tokens
            continue
        sampled = [token.token_id for token in result.sampled[part.request_id]]
        logits_RV = result.logits[part.request_id]
        assert logits_RV.shape == (len(sampled), worker.config.vocab_size)
        assert logits_RV.dtype == torch.float32
        request.decode_steps += bool(request.token_ids)
        request.num_computed += part.num_tokens - part.num_drafts + len(sampled) - 1
        request.token_ids += sampled
        request.logits += list(logits_RV.clone())
        made = result.drafts.get(part.request_id, ())
        request.drafts[len(request.token_ids)] = made
        request.num_drafts = len(made)


def _scheduled(name: str, request: Driven, chunk: int) -> ScheduledRequest:
    """Its next rows: of the prompt, or behind it one that the worker knows, and its drafts."""
    start, prompt = request.num_computed, np.array(request.prompt)
    if start >= prompt.size:
        count, drafts = 1 + request.num_drafts, request.num_drafts
        token_ids, following = np.full(count, UNKNOWN), UNKNOWN
    else:
        count, drafts = min(chunk, prompt.size - start), 0
        token_ids = prompt[start : start + count]
        following = int(prompt[start + count]) if start + count < prompt.size else UNKNOWN
    return ScheduledRequest(
        request_id=name,
        admission=0,
        start=start,
        num_tokens=count,
        num_drafts=drafts,
        num_unknown=count if start >= prompt.size else 0,
        page_table=request.pages,
        token_ids=token_ids,
        next_token_id=following,
        samples=start + count >= prompt.size,
        num_prompt_tokens=prompt.size,
    )
