"""Speculative decoding: which drafts of a step were right, and the drafts of the next one.

May import torch, models, partition and the sampler. Invariant: a token is drawn from the model's own logits with the
request's own seed and output index, as without drafts; a draft only decides whether the row behind it counts.

So the output is the same at every temperature. And it is rejection sampling: a draft d stays with the probability
p(d) that the model gives it, and a token that comes instead is distributed as p without d (Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", for a draft that is certain of itself). Drafts are drawn
with the number in [0, 1) that will choose the token itself, so that two distributions which agree choose alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.models.config import ModelConfig
from longfill.models.decoder import Decoder
from longfill.models.draft import DraftLayer
from longfill.models.rows import RankRows
from longfill.parallel.group import Group
from longfill.partition import StepPlan, StepRequest
from longfill.partition.lengths import Int64Array
from longfill.worker.sampler import LogitsError, SampledToken, SampleInput, draft_token, verify

Sampled = dict[str, tuple[SampledToken, ...]]
"""By request id: of each that samples, one token, and one more for each of its drafts that was right."""


def check_draft_layer(args: EngineArgs, config: ModelConfig) -> None:
    """Raise ConfigError where drafts are asked of a model whose config does not announce exactly one draft layer."""
    count = config.num_mtp_layers
    if args.num_speculative_tokens == 0 or count == 1:
        return
    found = f"has {count} draft layers, and longfill runs one" if count else "has no draft layer"
    raise ConfigError(
        f"--speculative-config mtp: the model {found} (num_nextn_predict_layers or num_mtp_layers in config.json); "
        "drop the flag, or take a model with one"
    )


def verify_step(logits_SV: Tensor, plan: StepPlan, inputs: Sequence[SampleInput]) -> tuple[Sampled, dict[str, str]]:
    """What each sampling request gets from its rows, and why some get nothing (request id -> error).

    `logits_SV` are fp32 rows as `plan.sample_rows` orders them, and `inputs` belong to the plan's sampling requests.
    """
    sampled: Sampled = {}
    failed: dict[str, str] = {}
    sampling = [request for request in plan.requests if request.samples]
    for request, row, first, last in zip(sampling, inputs, plan.sample_starts, plan.sample_starts[1:], strict=False):
        drafts = request.token_ids[request.query_len - request.num_drafts :]
        try:
            sampled[request.request_id] = verify(logits_SV[first:last], row, drafts.tolist())
        except LogitsError as error:
            failed |= error.reasons
    return sampled, failed


def tokens_behind(plan: StepPlan, sampled: Sampled) -> Int64Array:
    """int64 [T]: of each row the token behind its position, as the draft layer takes it.

    Behind the last row that counts stands the last token sampled. What stands behind the rows of rejected drafts is of
    no account: the next step computes their positions anew, before any row can see them.

    Raises ValueError for a request that neither samples nor says which token follows.
    """
    behind = np.zeros_like(plan.token_ids)
    behind[:-1] = plan.token_ids[1:]
    for request, end in zip(plan.requests, plan.query_starts[1:].tolist(), strict=True):
        if not request.samples and request.next_token_id < 0:
            raise ValueError(f"request {request.request_id}: next_token_id is missing; the draft layer needs it")
        behind[end - 1] = max(request.next_token_id, 0)
        tokens = sampled.get(request.request_id)
        if tokens is not None:
            behind[_last_row(request, tokens, end)] = tokens[-1].token_id
    return behind


def _last_row(request: StepRequest, tokens: Sequence[SampledToken], end: int) -> int:
    """The row of the step that a request's last token came from; `end` is one past its rows."""
    return end - request.num_drafts + len(tokens) - 2


def share_sampled(sampled: Sampled | None, plan: StepPlan, group: Group) -> Sampled:
    """What the first rank has sampled, on every rank; there without log-probabilities."""
    if group.size == 1 and sampled is not None:
        return sampled
    sampling = [request for request in plan.requests if request.samples]
    shape = (len(sampling), 1 + max((request.num_drafts for request in sampling), default=0))
    ids = torch.full(shape, -1)
    for row, request in zip(ids, sampling, strict=True):
        tokens = (sampled or {}).get(request.request_id, ())
        row[: len(tokens)] = torch.tensor([token.token_id for token in tokens])
    ids = group.from_first("sampled_tokens", ids, shape, torch.int64)
    if sampled is not None:
        return sampled
    lists = [[token for token in row if token >= 0] for row in ids.tolist()]
    found = zip(sampling, lists, strict=True)
    return {request.request_id: tuple(map(SampledToken, tokens)) for request, tokens in found if tokens}


@dataclasses.dataclass(frozen=True)
class _Guess:
    """A request whose next tokens are guessed, from the row at `position` on."""

    request: StepRequest
    row: int
    """Of the batch."""
    position: int
    num_sampled: int


class Drafter:
    """Runs the draft layer behind each step of the model.

    After a step the layer's rows exist for all positions that the model has computed, whatever the cut, so drafts do
    not depend on it. One row may: the last before a prefix hit ends joins the token behind it, which was another
    request's and may differ. That costs a guess at most.
    """

    def __init__(
        self, layer: DraftLayer, decoder: Decoder, plan: Callable[[Sequence[StepRequest]], tuple[StepPlan, RankRows]],
        *, num_tokens: int, page_tokens: int, max_model_len: int,
    ) -> None:  # fmt: skip
        """`plan` makes the plan of a step and this rank's rows; `page_tokens`: that one entry of a page table holds."""
        self._layer = layer
        self._decoder = decoder
        self._plan = plan
        self._num_tokens = num_tokens
        self._page_tokens = page_tokens
        self._max_model_len = max_model_len

    def draft(
        self, plan: StepPlan, rows: RankRows, normed_OC: Tensor, sampled: Sampled, inputs: Sequence[SampleInput]
    ) -> dict[str, tuple[int, ...]]:
        """The drafts of each request in `sampled`: as many as asked for, fewer where its pages or positions end.

        `normed_OC` holds the hidden states behind the final norm of the rows that this rank holds, and is overwritten.
        `inputs` are those that the first rank sampled with; other ranks have none, and get its drafts.
        """
        layer = self._layer
        behind_O = torch.from_numpy(tokens_behind(plan, sampled)[plan.share.rows[plan.share.own]])
        y_OC = layer.forward(dataclasses.replace(rows, token_ids_O=behind_O), normed_OC)
        guesses = _guesses(plan, sampled)
        given = {row.request_id: row for row in inputs}
        z_SC = self._collect(plan, y_OC, [guess.row for guess in guesses])
        drafts: dict[str, list[int]] = {guess.request.request_id: [] for guess in guesses}
        for count in range(self._num_tokens):
            going = [i for i, guess in enumerate(guesses) if count == 0 or guess.position + count < self._end(guess)]
            if not going:
                break
            guesses = [guesses[i] for i in going]
            if count:
                z_SC = self._step(guesses, drafts, count, z_SC[going])
            for guess, token in zip(guesses, self._choose(guesses, given, count, layer.logits(z_SC)), strict=True):
                drafts[guess.request.request_id].append(token)
        return {request_id: tuple(tokens) for request_id, tokens in drafts.items()}

    def _choose(
        self, guesses: list[_Guess], given: Mapping[str, SampleInput], count: int, logits_SV: Tensor | None
    ) -> list[int]:
        """One token for each guess, drawn on the first rank and known to all."""
        tokens: Tensor | None = None
        if logits_SV is not None:
            tokens = torch.empty(len(guesses), dtype=torch.int64)
            for i, (guess, logits_V) in enumerate(zip(guesses, logits_SV, strict=True)):
                own = given[guess.request.request_id]
                index = own.output_index + guess.num_sampled + count
                tokens[i] = draft_token(logits_V, own.params, own.seed, index)
        known = self._decoder.mesh.world.from_first("drafts", tokens, (len(guesses),), torch.int64)
        drawn: list[int] = known.tolist()
        return drawn

    def _collect(self, plan: StepPlan, y_OC: Tensor, batch_rows: list[int]) -> Tensor:
        """z [S, C] of some rows of the batch, on every rank."""
        pick = plan.share.pick(np.array(batch_rows, dtype=np.int64))
        return self._layer.norm(self._decoder.collect(y_OC, pick))

    def _step(self, guesses: list[_Guess], drafts: Mapping[str, list[int]], count: int, z_SC: Tensor) -> Tensor:
        """One row a request, `count` positions behind the one that guessed first: its newest draft is the token."""
        parts = [
            StepRequest(
                guess.request.request_id,
                start=guess.position + count,
                query_len=1,
                pages=guess.request.pages,
                token_ids=np.array(drafts[guess.request.request_id][-1:], dtype=np.int64),
                samples=False,
            )
            for guess in guesses
        ]
        plan, rows = self._plan(parts)
        own = torch.from_numpy(plan.share.rows[plan.share.own])
        return self._collect(plan, self._layer.forward(rows, z_SC[own]), list(range(len(parts))))

    def _end(self, guess: _Guess) -> int:
        """Positions that the layer's rows of a request may stand on."""
        return min(self._max_model_len, guess.request.pages.size * self._page_tokens)


def _guesses(plan: StepPlan, sampled: Sampled) -> list[_Guess]:
    guesses = []
    for request, start in zip(plan.requests, plan.query_starts.tolist(), strict=False):
        tokens = sampled.get(request.request_id)
        if tokens is None:
            continue
        row = _last_row(request, tokens, start + request.query_len)
        guesses.append(_Guess(request, row, request.start + row - start, len(tokens)))
    return guesses
