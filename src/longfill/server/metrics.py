"""What `/metrics` says: vLLM's names where the meaning is the same, ours beside them.

May import request, messages, streams and prometheus-client. Invariant: counters never decrease, and the tokens they
count are those of the answers' usage: a prompt once, with its first token, however often it is computed.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from longfill.request import FinishReason
from longfill.server.messages import EngineReady, Ledger, OutputDelta, StepRecord
from longfill.server.streams import RequestStream

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter, which nobody draws

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320,
            640, 1280, 2560)  # fmt: skip
"""To three quarters of an hour: what a million tokens may take on a CPU."""
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_TOKENS = tuple(2**i for i in range(21))
_COUNTS = (1, 2, 5, 10, 20)

_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, ready: EngineReady) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._running = self._gauge("vllm:num_requests_running", "Requests that run")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the engine's queue")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated")
        self._success = Counter(
            "vllm:request_success", "Requests that ended", (*_LABELS, "finished_reason"), registry=self._registry
        )
        for reason in FinishReason:  # a series that is not there yet would read as "unknown", not as none
            self._success.labels(**self._labels, finished_reason=reason.value)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._request_output = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._params_n = self._histogram("vllm:request_params_n", "n of a request", _COUNTS)
        self._params_max = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens of a step", _TOKENS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token", _SECONDS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens", _ITL_SECONDS)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens", _ITL_SECONDS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step", _SECONDS)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token", _SECONDS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token", _SECONDS
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last", _SECONDS)
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens of drafts")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were right")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft", (*_LABELS, "position"),
            registry=self._registry,
        )  # fmt: skip
        self._own(ready)
        self._rejected_seen: dict[str, int] = {}

    def _own(self, ready: EngineReady) -> None:
        """Metrics that vLLM has not."""
        info = Gauge(
            "vllm:cache_config_info", "The KV cache", (*_LABELS, "block_size", "num_gpu_blocks"),
            registry=self._registry,
        )  # fmt: skip
        info.labels(**self._labels, block_size=str(ready.page_size), num_gpu_blocks=str(ready.num_pages)).set(1)
        self._pages = Gauge(
            "longfill:pages", "KV pages: in use, free with a findable prefix, free", (*_LABELS, "state"),
            registry=self._registry,
        )  # fmt: skip
        self._num_pages = ready.num_pages
        self._stages = Counter(
            "longfill:step_seconds", "Seconds of steps by stage", (*_LABELS, "stage"), registry=self._registry
        )
        self._comm = Counter(
            "longfill:comm_bytes", "Bytes that rank 0 sent to other ranks", (*_LABELS, "what"), registry=self._registry
        )
        self._steps = self._counter("longfill:steps", "Steps")
        self._computed = self._counter("longfill:computed_tokens", "Rows computed; recomputed ones count again")
        self._pairs = self._counter("longfill:scored_pairs", "(query, key) pairs that the indexer of rank 0 ranked")
        self._gathered = self._counter("longfill:gathered_rows", "Latent rows gathered into the workspace")
        self._budget = self._gauge("longfill:memory_budget_bytes", "The engine's memory budget")
        self._budget.set(ready.memory["budget"])
        self._rss = Gauge("longfill:rss_bytes", "Resident memory", (*_LABELS, "process"), registry=self._registry)
        self._queued_reqs = self._gauge("longfill:queued_requests", "Requests without a first token")
        self._queued_tokens = self._gauge("longfill:queued_tokens", "Prompt tokens of those")
        self._rejected = Counter(
            "longfill:requests_rejected", "Requests refused because too many wait", (*_LABELS, "limit"),
            registry=self._registry,
        )  # fmt: skip
        for limit in ("reqs", "tokens"):
            self._rejected.labels(**self._labels, limit=limit)
        self._disconnected = self._counter("longfill:client_disconnects", "Clients that left before their answer")
        self._alive = self._gauge("longfill:engine_alive", "1 while the engine's process does something")

    def on_step(self, step: StepRecord) -> None:
        """Count a step."""
        self._iteration.observe(step.num_tokens)
        self._steps.inc()
        self._computed.inc(step.num_tokens)
        self._pairs.inc(step.scored_pairs)
        self._gathered.inc(step.gathered_rows)
        self._preemptions.inc(len(step.preempted))
        for stage, seconds in step.seconds.items():
            self._stages.labels(**self._labels, stage=stage).inc(max(seconds, 0.0))
        for what, size in step.comm.items():
            self._comm.labels(**self._labels, what=what).inc(size)
        self._drafts.inc(step.num_drafts)
        self._draft_tokens.inc(step.num_draft_tokens)
        self._accepted.inc(step.num_accepted_tokens)
        for position, count in enumerate(step.num_accepted_tokens_per_pos):
            self._accepted_at.labels(**self._labels, position=str(position)).inc(count)
        self._rss.labels(**self._labels, process="engine").set(step.rss_bytes)

    def on_delta(self, stream: RequestStream, delta: OutputDelta) -> None:
        """Count what a request got."""
        count = sum(len(completion.token_ids) for completion in delta.completions)
        before = stream.num_output_tokens - count
        if count:
            self._generated.inc(count)
            if before == 0:
                self._first_token(stream, delta)
            else:
                self._itl.observe(stream.last_gap)
        for completion in delta.completions:
            if completion.finish_reason is not None:
                self._success.labels(**self._labels, finished_reason=completion.finish_reason).inc()
        if delta.finished and stream.first_token is not None and stream.last_token is not None:
            self._last_token(stream, stream.first_token, stream.last_token)

    def disconnected(self) -> None:
        """Count a client that left before its answer."""
        self._disconnected.inc()

    def render(
        self, ledger: Ledger, *, alive: bool, rss_bytes: int, queued: tuple[int, int], rejected: dict[str, int]
    ) -> bytes:
        """The text of `/metrics`, as of now. `queued` are requests and their tokens; `rejected` counts by limit."""
        self._running.set(ledger.num_running)
        self._waiting.set(ledger.num_waiting)
        self._usage.set(ledger.pages_used / self._num_pages)
        free = self._num_pages - ledger.pages_used - ledger.pages_cached
        for state, count in (("used", ledger.pages_used), ("cached", ledger.pages_cached), ("free", free)):
            self._pages.labels(**self._labels, state=state).set(count)
        self._alive.set(alive)
        self._rss.labels(**self._labels, process="api").set(rss_bytes)
        self._queued_reqs.set(queued[0])
        self._queued_tokens.set(queued[1])
        for limit, count in rejected.items():
            seen = self._rejected_seen.get(limit, 0)
            self._rejected.labels(**self._labels, limit=limit).inc(count - seen)
            self._rejected_seen[limit] = count
        return generate_latest(self._registry)

    def _first_token(self, stream: RequestStream, delta: OutputDelta) -> None:
        assert stream.first_token is not None
        self._prompt.inc(stream.num_prompt_tokens)
        self._queries.inc(stream.num_prompt_tokens)
        self._hits.inc(delta.num_cached_tokens)
        self._request_prompt.observe(stream.num_prompt_tokens)
        params = stream.request.params
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max.observe(params.max_tokens)
        self._ttft.observe(stream.first_token - stream.arrival)
        queued = delta.queued_seconds or 0.0
        self._queue.observe(queued)
        self._prefill.observe(max(stream.first_token - stream.arrival - queued, 0.0))

    def _last_token(self, stream: RequestStream, first: float, last: float) -> None:
        self._request_output.observe(stream.num_output_tokens)
        self._e2e.observe(last - stream.arrival)
        self._decode.observe(last - first)
        self._inference.observe(max(last - stream.arrival - (stream.queued_seconds or 0.0), 0.0))
        if stream.num_output_tokens > 1:
            self._tpot.observe((last - first) / (stream.num_output_tokens - 1))

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(name, words, _LABELS, registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, _LABELS, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, words: str, buckets: tuple[Any, ...]) -> Histogram:
        return Histogram(name, words, _LABELS, buckets=buckets, registry=self._registry).labels(**self._labels)
