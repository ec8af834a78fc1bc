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
from longfill.request import CompletionOutput, FinishReason, Logprob, Request, RequestMetrics, RequestOutput
from longfill.worker.history import TokenHistory
from longfill.worker.sampler import SampledToken, SampleInput


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
        self._vocab_size = vocab_size
        self._history: TokenHistory | None = None
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.params)
        self._digest = hashlib.sha256() if digest else None
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)

    def sample_input(self, position: int) -> SampleInput:
        """What the token at a position of the sequence depends on besides the logits."""
        request = self.request
        if self._history is None and request.params.has_penalties:
            self._history = TokenHistory(request.token_ids[: request.num_prompt_tokens], self._vocab_size)
        return SampleInput(
            request.request_id,
            request.params,
            self._seed,
            position - request.num_prompt_tokens,
            self._stop_token_ids,
            self._history,
        )

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
        """The request's state as an output; final once the request has ended."""
        request = self.request
        if request.is_finished:
            self._metrics.finished_time = self._metrics.finished_time or time.monotonic()
            hit = None if self._detokenizer is None else self._detokenizer.finish()
            if hit is not None and request.finish_reason is FinishReason.LENGTH:
                # Bytes held back until the end completed a stop string.
                request.finish_reason, request.stop_reason = FinishReason.STOP, hit.stop
        self._metrics.num_preemptions = request.num_preemptions
        completion = CompletionOutput(
            index=0,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=request.output_token_ids.tolist(),
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            stop_reason=request.error if request.finish_reason is FinishReason.ERROR else request.stop_reason,
            logprobs=self._logprobs,
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            outputs=[completion],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=dataclasses.replace(self._metrics),
            digest=None if self._digest is None else self._digest.hexdigest(),
        )

    def _decoded(self, token_id: int, logprob: Logprob) -> Logprob:
        if self._tokenizer is None:
            return logprob
        return Logprob(logprob.logprob, logprob.rank, self._tokenizer.decode([token_id], skip_special_tokens=False))
