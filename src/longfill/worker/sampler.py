"""Turns logits into tokens: greedy, temperature, min-p, top-k, top-p, seeds, drafts and log-probabilities.

May import request, errors, torch and NumPy. Invariant: a row's token is a function of that row's logits, parameters,
seed, output index and the tokens before it alone: not of batch mates, of preemption, of drafts, or of how the prompt
was cut.

Shape suffixes: S rows of this step · R rows of one request · V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longfill.errors import RequestError
from longfill.request import Logprob, SamplingParams
from longfill.worker.history import TokenHistory, adjusted, changes_logits
from longfill.worker.structured import OutputForm

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

MAX_STOP_STRINGS = 256
"""Every stop string is looked for at every token; more than this is an attack or a mistake."""

ROW_BYTES = 80
"""Bytes that drawing from one row takes at most, for each token of the vocabulary (measured: up to 78)."""

_FIRST_CANDIDATES = 1024
"""Top-p sorts this many of the likeliest tokens first, and more only if they do not reach p."""


@dataclass(frozen=True)
class SampleInput:
    """What a row's token depends on besides its logits.

    `seed` comes from `request_seed`; `output_index` is the number of tokens that the request has sampled before (its
    first row, where it has several). `stop_token_ids`, eos among them, are what min_tokens keeps away; `history` is
    the request's, and may be None where its parameters have no penalties; `form` likewise without structured outputs.
    Drawing adds to both.
    """

    request_id: str
    params: SamplingParams
    seed: int
    output_index: int
    stop_token_ids: tuple[int, ...] = ()
    history: TokenHistory | None = None
    form: OutputForm | None = None


@dataclass(frozen=True)
class SampledToken:
    """One row's token. `logprobs` holds the token itself first, then the n most likely ones, by token id."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


class LogitsError(RequestError):
    """Logits from which no token can be drawn, with the reason by request id: drop these rows and sample the rest."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        ids_of: dict[str, list[str]] = {}
        for request_id, why in reasons.items():
            ids_of.setdefault(why, []).append(request_id)
        super().__init__("; ".join(f"request {', '.join(ids)}: {why}" for why, ids in ids_of.items()))


NOT_NUMBERS = (
    "the model's logits contain NaN or +inf, or are -inf for every token; check the weights (a damaged or wrongly "
    "scaled tensor), or try --dtype float32"
)
"""Why a row gives no token and no log-probability."""
_NOTHING_LEFT = (
    "min_tokens, structured_outputs and repetition_penalty leave none of the tokens that the model allows; lower "
    "min_tokens, loosen the form, or bring repetition_penalty closer to 1"
)


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Check what `SamplingParams` cannot know alone; raises RequestError. `vocab_size` counts the logits' columns."""
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"stop_token_ids: {outside[0]} is not below the vocabulary size {vocab_size:,}")
    biased = [token for token in params.logit_bias or () if token >= vocab_size]
    if biased:
        raise RequestError(f"logit_bias: token id {biased[0]} is not below the vocabulary size {vocab_size:,}")
    if len(params.stop_strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: {len(params.stop_strings):,} strings; give at most {MAX_STOP_STRINGS}")


def request_seed(params: SamplingParams, engine_seed: int, ordinal: int) -> int:
    """The 64-bit seed of a request: its own, or else one derived from the engine's seed and the request's ordinal.

    The ordinal counts requests in the order of their arrival, so a run with the same requests draws the same tokens.
    """
    if params.seed is not None:
        return params.seed % 2**64
    digest = hashlib.blake2b(f"{engine_seed}/{ordinal}".encode(), digest_size=8, person=b"longfill").digest()
    return int.from_bytes(digest, "little")


def sample(logits_SV: Tensor, inputs: Sequence[SampleInput]) -> list[SampledToken]:
    """Draw one token per row, each of another request.

    `logits_SV` is float32 [S, V] on any device, row i belonging to `inputs[i]`; it is not changed. Raises LogitsError
    with every row that allows no token; the others' tokens do not depend on those rows.
    """
    tokens: list[SampledToken] = []
    reasons: dict[str, str] = {}
    for logits_V, best, row in zip(logits_SV, _best(logits_SV, len(inputs)), inputs, strict=True):
        token = _draw(logits_V, best, row, row.output_index)
        if isinstance(token, str):
            reasons[row.request_id] = token
        else:
            tokens.append(token)
    if reasons:
        raise LogitsError(reasons)
    return tokens


def verify(logits_RV: Tensor, row: SampleInput, drafts: Sequence[int]) -> tuple[SampledToken, ...]:
    """Draw one request's tokens at consecutive positions, as far as its drafts are what is drawn: 1 to R of them.

    `logits_RV` is float32 [R, V], R = 1 + len(drafts): those after the last known token, then after each draft. Row i
    is drawn from as without drafts, with output index `row.output_index + i`; while that gives draft i, row i + 1 is
    what the model says next. So the tokens are those without drafts, whatever the drafts are. A draft d is accepted
    with its probability p(d), and a token drawn in its place has p without d, normalised: rejection sampling
    (arXiv:2211.17192) for drafts that are given rather than drawn.

    Raises LogitsError if row 0 allows no token. The walk ends before a later row that allows none: that row comes again
    as row 0, and only if it does, the request fails.
    """
    tokens: list[SampledToken] = []
    for i, (logits_V, best) in enumerate(zip(logits_RV, _best(logits_RV, 1 + len(drafts)), strict=True)):
        token = _draw(logits_V, best, row, row.output_index + i)
        if isinstance(token, str):
            if i == 0:
                raise LogitsError({row.request_id: token})
            break
        tokens.append(token)
        if i == len(drafts) or token.token_id != drafts[i]:
            break
    return tuple(tokens)


def logprobs_of(logits_RV: Tensor, wanted: Sequence[tuple[int, int]]) -> list[dict[int, Logprob] | None]:
    """Log-probabilities of given tokens: for each row (token id, how many of the likeliest tokens beside it).

    `logits_RV` is float32 [R, V]. The values, their order and their ranks are those that a row would give with the
    token it samples. None for a row that allows no token.
    """
    return [
        None if best is None else _logprobs(_host(logits_V), token, count)
        for logits_V, best, (token, count) in zip(logits_RV, _best(logits_RV, len(wanted)), wanted, strict=True)
    ]


def draft_token(logits_V: Tensor, params: SamplingParams, seed: int, output_index: int) -> int:
    """A guess at output `output_index` of a request, from a draft model's logits [V] of any float dtype.

    It is drawn with the uniform that the target will draw that output with (common random numbers): equal logits give
    the same token, and near ones mostly do. Penalties and min_tokens are left to the target. Any token is a right
    guess, so logits that allow none give token 0.
    """
    if params.temperature == 0 and not params.logit_bias:
        # No copy of the row; max() hands NaN on, and takes the first of equal values.
        best, token = logits_V.max(-1)
        return int(token) if torch.isfinite(best) else 0
    values = logits_V.detach().to("cpu", torch.float64, copy=True).numpy()
    if not np.isfinite(values.max()):
        return 0
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    return _choose(values, params, seed, output_index)


def _best(logits_RV: Tensor, rows: int) -> list[int | None]:
    """Each row's likeliest token (the lowest of equals), or None where the row allows no token."""
    if logits_RV.dtype != torch.float32 or logits_RV.ndim != 2 or logits_RV.shape[0] != rows:
        raise ValueError(f"want float32 logits [{rows}, V], got {logits_RV.dtype} {list(logits_RV.shape)}")
    if rows == 0:
        return []
    # One pass serves all: max() hands NaN on, and takes the first of equal values, which is the lower token id.
    best_R, argmax_R = logits_RV.max(dim=-1)
    return [
        token if math.isfinite(best) else None for token, best in zip(argmax_R.tolist(), best_R.tolist(), strict=True)
    ]


def _draw(logits_V: Tensor, best: int | None, row: SampleInput, output_index: int) -> SampledToken | str:
    """The token of one row, which its history then has as output `output_index`; or why there is none."""
    if row.history is not None:
        row.history.truncate(output_index)
    if row.form is not None:
        row.form.truncate(output_index)
    if best is None:
        return NOT_NUMBERS
    changed = changes_logits(row.params, output_index)
    token = SampledToken(best)
    if changed or row.params.temperature > 0 or row.params.logprobs is not None:
        raw = _host(logits_V)
        values = raw
        if changed:
            allowed = None if row.form is None else row.form.allowed()
            if isinstance(allowed, str):
                return allowed
            values = adjusted(
                raw, row.params, output_index,
                stop_token_ids=row.stop_token_ids, history=row.history, allowed_V=allowed,
            )  # fmt: skip
            if values.max() == -np.inf:
                return _NOTHING_LEFT
        token_id = _choose(values, row.params, row.seed, output_index)
        wanted = row.params.logprobs
        token = SampledToken(token_id, None if wanted is None else _logprobs(raw, token_id, wanted))
    if row.history is not None:
        row.history.append(token.token_id)
    if row.form is not None:
        row.form.append(token.token_id)
    return token


def _host(logits_V: Tensor) -> Weights:
    """float64 on the host, one row at a time: the same arithmetic on every device, and no [S, V] copy."""
    return logits_V.detach().cpu().numpy().astype(np.float64)


def _choose(logits_V: Weights, params: SamplingParams, seed: int, output_index: int) -> int:
    if params.temperature == 0:
        return int(logits_V.argmax())
    ids, weights = candidates(logits_V, params)
    return int(ids[_inverse_cdf(weights, uniform(seed, output_index))])


def uniform(seed: int, output_index: int) -> float:
    """The draw in [0, 1) of one output position: Philox keyed by the seed, with the position as its counter."""
    word = int(np.random.Philox(key=seed % 2**64, counter=output_index).random_raw())
    return (word >> 11) * 2.0**-53


def candidates(logits_V: Weights, params: SamplingParams) -> tuple[Ids, Weights]:
    """Tokens that may be drawn, ids ascending, and their weights (the likeliest token weighs 1).

    vLLM's order: temperature, min-p, top-k, top-p. Exactly k tokens pass top-k and the smallest set that reaches p
    passes top-p; where tokens weigh the same, the lower id goes first, so `top_k=1` is greedy.
    """
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to exp(-inf) = 0
        weights_V = np.exp((logits_V - logits_V.max()) / params.temperature)
    ids = np.flatnonzero((weights_V >= params.min_p) & (weights_V > 0))
    if 0 < params.top_k < ids.size:
        ids = ids[np.sort(_largest(logits_V[ids], params.top_k))]
    if params.top_p < 1:
        ids = ids[np.sort(_nucleus(logits_V[ids], weights_V[ids], params.top_p))]
    return ids, weights_V[ids]


def _inverse_cdf(weights: Weights, u: float) -> int:
    """First index whose cumulative weight exceeds `u` of the total. A token of weight 0 is never it."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _largest(values: Weights, count: int) -> Ids:
    """Indices of the `count` largest values, largest first, ties to the lower index."""
    if count < values.size:
        threshold = np.partition(values, values.size - count)[values.size - count]
        pool = np.flatnonzero(values >= threshold)
    else:
        pool = np.arange(values.size)
    return pool[np.argsort(-values[pool], kind="stable")][:count]


def _nucleus(logits: Weights, weights: Weights, top_p: float) -> Ids:
    """Indices of the smallest set of likeliest tokens whose weights reach `top_p` of the total; never empty."""
    needed = top_p * np.cumsum(weights)[-1]
    count = _FIRST_CANDIDATES
    while True:
        order = _largest(logits, count)
        reached = int(np.searchsorted(np.cumsum(weights[order]), needed, side="left")) + 1
        if reached <= order.size or order.size == weights.size:
            return order[:reached]
        count *= 8


def _logprobs(logits_V: Weights, token: int, wanted: int) -> dict[int, Logprob]:
    """log_softmax of the raw logits at `token`, then at the `wanted` likeliest tokens; rank 1 is the likeliest."""
    shifted = logits_V - logits_V.max()
    logprobs_V = shifted - np.log(np.cumsum(np.exp(shifted))[-1])
    rank = 1 + int(np.count_nonzero(logits_V > logits_V[token]))
    rank += int(np.count_nonzero(logits_V[:token] == logits_V[token]))
    chosen = {token: Logprob(float(logprobs_V[token]), rank)}
    best = _largest(logits_V, min(wanted, logits_V.size)).tolist() if wanted else []
    return chosen | {index: Logprob(float(logprobs_V[index]), place) for place, index in enumerate(best, 1)}
