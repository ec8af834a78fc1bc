"""A request as its caller sees it: text, log-probabilities, times and digest, growing token by token.

May import request, the detokenizer and the sampler's types. Invariant: what is delivered is a function of the tokens
sampled so far, in order; preemption never shows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable

from torch import Tensor

from longfill.engine.detokenizer import Detokenizer
from longfill.engine.tokenizer import Tokenizer
from longfill.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
)
from longfill.worker.history import TokenHistory
from longfill.worker.prompt_logprobs import PromptInput, PromptLogprobs
from longfill.worker.sampler import SampledToken, SampleInput
from longfill.worker.structured import OutputForm


@dataclasses.dataclass(frozen=True)
class _Given:
    """How much of a request its outputs have shown, beside its text."""

    tokens: int = 0
    prompt_logprobs: bool = False


class LiveRequest:
    """One unfinished request's output side."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        seed: int,
        tokenizer: Tokenizer | None,
        *,
        digest: bool,
        eos_token_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._seed = seed
        # A tokenizer may know tokens that the model has no logits for.
        stops = {*eos_token_ids, *(request.params.stop_token_ids or ())}
        self._stop_token_ids = tuple(sorted(token for token in stops if token < vocab_size))
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.params)
        self._digest = hashlib.sha256() if digest else None
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self._cumulative_logprob = 0.0
        wants_prompt = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wants_prompt else None
        """So far; no token stands before the first one."""
        self._texts: dict[int, str] = {}
        """Of single tokens, by id: a prompt's log-probabilities name few tokens many times."""
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._given = _Given()

    def sample_input(self, position: int, history: TokenHistory | None, form: OutputForm | None) -> SampleInput:
        """What the token at a position of the sequence depends on besides the logits."""
        request = self.request
        return SampleInput(
            request.request_id,
            request.params,
            self._seed,
            position - request.num_prompt_tokens,
            self._stop_token_ids,
            history,
            form,
        )

    def prompt_input(self, start: int, end: int) -> PromptInput | None:
        """What to say of the prompt's tokens behind the rows at positions [start, end); None if nothing is wanted.

        Places that are booked are left out, as after a preemption. With steps in flight some that are about to be may
        be computed again: their values are the same.
        """
        wanted, request = self.request.params.prompt_logprobs, self.request
        if wanted is None or self._prompt_logprobs is None:
            return None
        first = max(start + 1, len(self._prompt_logprobs))
        token_ids = request.token_ids[first : min(end + 1, request.num_prompt_tokens)]
        return PromptInput(request.request_id, first, token_ids, wanted) if token_ids.size else None

    def append_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Take what a step says of the prompt's tokens; places that it has already are passed over.

        Raises ValueError for a place behind one that is missing, which is a mistake in the engine.
        """
        assert self._prompt_logprobs is not None
        for place, entry in found.items():
            if place > len(self._prompt_logprobs):
                raise ValueError(
                    f"request {self.request.request_id}: log-probabilities of prompt token {place} came before those "
                    f"of {len(self._prompt_logprobs)}"
                )
            if place == len(self._prompt_logprobs):
                self._prompt_logprobs.append({k: self._decoded(k, v) for k, v in entry.items()})

    def scheduled(self) -> None:
        """Count a step that computes some of its tokens."""
        self._metrics.steps += 1
        if self._metrics.first_scheduled_time is None:
            self._metrics.first_scheduled_time = time.monotonic()

    def append(self, token: SampledToken, logits_V: Tensor, *, hidden: bool) -> str | None:
        """Take a sampled token; returns the stop string that it completes, if any. A hidden one adds no text."""
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = time.monotonic()
        if self._digest is not None:
            self._digest.update(logits_V.contiguous().numpy().tobytes())
        if self._logprobs is not None and token.logprobs is not None:
            self._logprobs.append({k: self._decoded(k, v) for k, v in token.logprobs.items()})
            self._cumulative_logprob += token.logprobs[token.token_id].logprob
        if self._detokenizer is None or hidden:
            return None
        hit = self._detokenizer.append(token.token_id)
        return None if hit is None else hit.stop

    def output(self) -> RequestOutput:
        """The request's state as an output, or what is new of it; final once the request has ended."""
        request = self.request
        if request.is_finished:
            self._metrics.finished_time = self._metrics.finished_time or time.monotonic()
            hit = None if self._detokenizer is None else self._detokenizer.finish()
            if hit is not None and request.finish_reason is FinishReason.LENGTH:
                # Bytes held back until the end completed a stop string.
                request.finish_reason, request.stop_reason = FinishReason.STOP, hit.stop
        self._metrics.num_preemptions = request.num_preemptions
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        given = self._given if is_delta else _Given()
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.take() if is_delta else self._detokenizer.text
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.output_token_ids[given.tokens :].tolist(),
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            stop_reason=request.error if request.finish_reason is FinishReason.ERROR else request.stop_reason,
            logprobs=None if self._logprobs is None else self._logprobs[given.tokens :],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )
        shows_prompt = self._has_whole_prompt and not given.prompt_logprobs
        self._given = _Given(request.num_output_tokens, self._has_whole_prompt)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            prompt_logprobs=self._prompt_logprobs if shows_prompt else None,
            outputs=[completion],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=dataclasses.replace(self._metrics),
            digest=None if self._digest is None else self._digest.hexdigest(),
            kv_transfer_params=request.kv_transfer_params,
        )

    @property
    def _has_whole_prompt(self) -> bool:
        """Whether each token of the prompt has its log-probabilities."""
        return self._prompt_logprobs is not None and len(self._prompt_logprobs) == self.request.num_prompt_tokens

    def _decoded(self, token_id: int, logprob: Logprob) -> Logprob:
        if self._tokenizer is None:
            return logprob
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob.logprob, logprob.rank, self._texts[token_id])
