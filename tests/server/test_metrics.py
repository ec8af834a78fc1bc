"""`/metrics`: the names that dashboards read, and counters that agree with usage (API-21)."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from longfill.request import SamplingParams
from longfill.server.messages import AddRequest, CompletionDelta, EngineReady, Ledger, OutputDelta, StepRecord
from longfill.server.metrics import Metrics
from longfill.server.streams import RequestStream

READY = EngineReady(
    pid=1, model="m", model_type="glm_moe_dsa", max_model_len=100, vocab_size=9, num_pages=10, page_size=64,
    eos_token_ids=[1], memory={"budget": 1000}, kernels={}, num_threads=1,
)  # fmt: skip

NAMES = """
longfill:client_disconnects_total longfill:comm_bytes_total longfill:computed_tokens_total longfill:engine_alive
longfill:gathered_rows_total
longfill:memory_budget_bytes longfill:pages longfill:queued_requests longfill:queued_tokens
longfill:requests_rejected_total longfill:rss_bytes longfill:scored_pairs_total longfill:step_seconds_total
longfill:steps_total vllm:cache_config_info vllm:e2e_request_latency_seconds_bucket vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:iteration_tokens_total_bucket vllm:kv_cache_usage_perc
vllm:num_preemptions_total vllm:num_requests_running vllm:num_requests_waiting vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total vllm:prompt_tokens_total vllm:request_decode_time_seconds_bucket
vllm:request_generation_tokens_bucket
vllm:request_inference_time_seconds_bucket vllm:request_params_max_tokens_bucket vllm:request_params_n_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_prompt_tokens_bucket vllm:request_queue_time_seconds_bucket
vllm:request_success_total vllm:request_time_per_output_token_seconds_bucket
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_drafts_total vllm:time_to_first_token_seconds_bucket
"""
"""A name that changes reads as zero on somebody's dashboard: change one on purpose, and say so in the notes."""

LEDGER = Ledger(pages_used=3, pages_cached=2, num_running=1, num_waiting=4)


def values(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render(LEDGER, alive=True, rss_bytes=7, queued=(2, 99), rejected={"reqs": 3, "tokens": 0}).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return values(metrics)[name, frozenset(labels.items())]


def step(preempted: list[str]) -> StepRecord:
    return StepRecord(
        step=1, time=0.0, num_tokens=64, num_prompt_tokens=60, num_running=1, num_waiting=0, pages_used=4,
        pages_cached=1, pages_total=10, indexer_chunks=1, scored_pairs=500, screened_pairs=0, screen_survivors=0,
        gathered_rows=0, seconds={"index": 0.25, "step": 0.5}, requests=[], preempted=preempted, rss_bytes=8,
        num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1, num_accepted_tokens_per_pos=[1],
        rank_scored_pairs=[300, 200], comm={"new_keys": 77},
    )  # fmt: skip


def give(metrics: Metrics, stream: RequestStream, tokens: int, *, cached: int = 0, finished: bool = False) -> None:
    part = CompletionDelta(index=0, text="", token_ids=[5] * tokens, finish_reason="length" if finished else None)
    delta = OutputDelta(request_id="a", completions=[part], finished=finished, num_cached_tokens=cached)
    stream.put(delta)
    metrics.on_delta(stream, delta)


def test_names_are_pinned() -> None:
    metrics = Metrics("m", READY)
    metrics.on_step(step([]))
    stream = RequestStream(AddRequest(request_id="a", params=SamplingParams()), 50, lambda _: None)
    give(metrics, stream, 2)
    give(metrics, stream, 2, finished=True)
    ends = ("_created", "_sum", "_count")
    assert sorted({name for name, _ in values(metrics) if not name.endswith(ends)}) == NAMES.split()


def test_a_prompt_counts_once_with_its_first_token_and_hits_are_those_of_the_first_admission() -> None:
    metrics = Metrics("m", READY)
    stream = RequestStream(AddRequest(request_id="a", params=SamplingParams()), 50, lambda _: None)
    give(metrics, stream, 0)
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    give(metrics, stream, 1, cached=16)
    metrics.on_step(step(["a"]))  # preempted: what is found again is no hit
    give(metrics, stream, 3, cached=16)
    give(metrics, stream, 1, cached=16, finished=True)
    assert value(metrics, "vllm:prompt_tokens_total") == 50
    assert value(metrics, "vllm:prefix_cache_queries_total") == 50
    assert value(metrics, "vllm:prefix_cache_hits_total") == 16
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:num_preemptions_total") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2


def test_the_newest_ledger_says_what_is_in_use_and_rejections_are_counted_once() -> None:
    metrics = Metrics("m", READY)
    metrics.on_step(step([]))
    for _ in range(2):
        assert value(metrics, "longfill:requests_rejected_total", limit="reqs") == 3
    assert value(metrics, "longfill:requests_rejected_total", limit="tokens") == 0
    assert [value(metrics, "longfill:pages", state=state) for state in ("used", "cached", "free")] == [3, 2, 5]
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.3
    assert value(metrics, "vllm:num_requests_waiting") == 4
    assert value(metrics, "longfill:step_seconds_total", stage="index") == 0.25
    assert value(metrics, "longfill:comm_bytes_total", what="new_keys") == 77
    assert value(metrics, "longfill:queued_tokens") == 99
