"""Which tokens a request has so far, and how penalties, biases and masks change the next one's logits.

May import request and NumPy. Invariant: the counts, and with them the changed logits, are a function of the tokens
before a row alone: not of how often, or in how many steps, they were sampled.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longfill.request import SamplingParams, TokenIds

Logits = npt.NDArray[np.float64]


class TokenHistory:
    """One request's tokens, counted as they come: a prompt is read once, however long it is, into V bytes.

    The sampler appends what it draws. A row names, by its output index, the outputs that it sees: what was drawn behind
    them in a step that did not count is forgotten, and drawn again. `output_token_ids` are outputs known before.
    """

    def __init__(self, prompt_token_ids: TokenIds, vocab_size: int, output_token_ids: Sequence[int] = ()) -> None:
        self.in_prompt_V = np.zeros(vocab_size, dtype=np.bool_)
        self.in_prompt_V[prompt_token_ids] = True
        self._outputs: list[int] = []
        self._counts: dict[int, int] = {}
        for token_id in output_token_ids:
            self.append(token_id)

    @property
    def num_output_tokens(self) -> int:
        return len(self._outputs)

    def output_counts(self) -> tuple[TokenIds, TokenIds]:
        """The different tokens of the output, and how often each occurs: both int64 [tokens]."""
        size = len(self._counts)
        return np.fromiter(self._counts, np.int64, size), np.fromiter(self._counts.values(), np.int64, size)

    def append(self, token_id: int) -> None:
        """Count one more output."""
        self._outputs.append(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def truncate(self, num_output_tokens: int) -> None:
        """Forget the outputs behind the first `num_output_tokens`. Raises ValueError if it does not know so many."""
        if num_output_tokens > len(self._outputs):
            raise ValueError(f"a row sees {num_output_tokens} outputs, but only {len(self._outputs)} were counted")
        for token_id in self._outputs[num_output_tokens:]:
            self._counts[token_id] -= 1
            if self._counts[token_id] == 0:
                del self._counts[token_id]
        del self._outputs[num_output_tokens:]


def changes_logits(params: SamplingParams, output_index: int) -> bool:
    """Whether `adjusted` would change the logits of the row that samples output `output_index`."""
    masked = output_index < params.min_tokens or params.structured_outputs is not None
    return params.has_penalties or bool(params.logit_bias) or masked


def adjusted(
    logits_V: Logits,
    params: SamplingParams,
    output_index: int,
    *,
    stop_token_ids: Sequence[int] = (),
    history: TokenHistory | None = None,
    allowed_V: npt.NDArray[np.bool_] | None = None,
) -> Logits:
    """The logits that temperature and the filters see: float64 [V], a copy; -inf for tokens that may not be drawn.

    In vLLM's order (the steps of `vllm/v1/sample/sampler.py`, which come before temperature): what structured outputs
    do not allow is masked, min_tokens masks `stop_token_ids`, logit_bias is added, then the penalties, of which
    repetition (arXiv:1909.05858) comes first, then frequency and presence. Raises ValueError where penalties are asked
    for without a `history`.
    """
    logits_V = logits_V.copy()
    if allowed_V is not None:
        logits_V[~allowed_V] = -np.inf
    if output_index < params.min_tokens:
        logits_V[list(stop_token_ids)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits_V[token_id] += bias
    if params.has_penalties:
        if history is None:
            raise ValueError("penalties need the request's history")
        _penalise(logits_V, params, history)
    # Divided by a penalty next to nothing; infinite logits would leave no difference to compute with.
    return np.minimum(logits_V, np.finfo(np.float64).max, out=logits_V)


def _penalise(logits_V: Logits, params: SamplingParams, history: TokenHistory) -> None:
    outputs, counts = history.output_counts()
    if params.repetition_penalty != 1:
        seen_V = history.in_prompt_V.copy()
        seen_V[outputs] = True
        values = logits_V[seen_V]
        with np.errstate(over="ignore"):
            logits_V[seen_V] = np.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
    logits_V[outputs] -= params.frequency_penalty * counts + params.presence_penalty
