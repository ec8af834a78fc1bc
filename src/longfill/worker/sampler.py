"""Turns logits into tokens: greedy, temperature, min-p, top-k, top-p, seeds and log-probabilities.

May import request, errors, torch and NumPy. Invariant: a row's token is a function of that row's logits, parameters,
seed and output index alone: not of batch mates, of preemption, or of how the prompt was cut.

Shape suffixes: S rows of this step · V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longfill.errors import RequestError
from longfill.request import Logprob, SamplingParams

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]

MAX_STOP_STRINGS = 256
"""Every stop string is looked for at every token; more than this is an attack or a mistake."""

_FIRST_CANDIDATES = 1024
"""Top-p sorts this many of the likeliest tokens first, and more only if they do not reach p."""


@dataclass(frozen=True)
class SampleInput:
    """What a row's token depends on besides its logits.

    `seed` comes from `request_seed`; `output_index` is the number of tokens that the request has sampled before.
    """

    request_id: str
    params: SamplingParams
    seed: int
    output_index: int


@dataclass(frozen=True)
class SampledToken:
    """One row's token. `logprobs` holds the token itself first, then the n most likely ones, by token id."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


class LogitsError(RequestError):
    """Logits from which no token can be drawn. Sampling is pure: drop these requests' rows and sample the rest."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        super().__init__(
            f"request {', '.join(request_ids)}: the model's logits contain NaN or +inf, or are -inf for every token; "
            "check the weights (a damaged or wrongly scaled tensor), or try --dtype float32"
        )


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Check what `SamplingParams` cannot know alone; raises RequestError. `vocab_size` counts the logits' columns."""
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"stop_token_ids: {outside[0]} is not below the vocabulary size {vocab_size:,}")
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
    """Draw one token per row.

    `logits_SV` is float32 [S, V] on any device, row i belonging to `inputs[i]`; it is not changed. Raises LogitsError
    before anything is drawn if some rows allow no token; the others' tokens do not depend on those rows.
    """
    if logits_SV.dtype != torch.float32 or logits_SV.ndim != 2 or logits_SV.shape[0] != len(inputs):
        raise ValueError(f"want float32 logits [{len(inputs)}, V], got {logits_SV.dtype} {list(logits_SV.shape)}")
    if not inputs:
        return []
    # One pass serves all: max() hands NaN on, and takes the first of equal values, which is the lower token id.
    best_S, argmax_S = logits_SV.max(dim=-1)
    finite = torch.isfinite(best_S).tolist()
    if not all(finite):
        raise LogitsError(tuple(row.request_id for row, ok in zip(inputs, finite, strict=True) if not ok))
    return [
        SampledToken(greedy)
        if row.params.temperature == 0 and row.params.logprobs is None
        else _sample_row(logits_V, greedy, row)
        for logits_V, greedy, row in zip(logits_SV, argmax_S.tolist(), inputs, strict=True)
    ]


def _sample_row(logits_V: Tensor, greedy: int, row: SampleInput) -> SampledToken:
    # float64 on the host for one row at a time: the same arithmetic on every device, and no [S, V] copy.
    values = logits_V.detach().cpu().numpy().astype(np.float64)
    token = greedy
    if row.params.temperature > 0:
        ids, weights = candidates(values, row.params)
        token = int(ids[_inverse_cdf(weights, uniform(row.seed, row.output_index))])
    wanted = row.params.logprobs
    return SampledToken(token, None if wanted is None else _logprobs(values, token, wanted))


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
