"""The engine's outputs and step figures as messages.

May import request, engine stats and messages. Invariant: nothing is left out that a client or a metric can see.
"""

from __future__ import annotations

import time

from longfill.engine.stats import StepStats
from longfill.request import CompletionOutput, RequestOutput
from longfill.server.messages import CompletionDelta, OutputDelta, RequestProgress, StepRecord


def output_delta(output: RequestOutput) -> OutputDelta:
    """A delta output of the engine as the message that carries it."""
    metrics = output.metrics
    queued = None if metrics.first_scheduled_time is None else metrics.first_scheduled_time - metrics.arrival_time
    return OutputDelta(
        request_id=output.request_id,
        completions=[_completion(completion) for completion in output.outputs],
        finished=output.finished,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=metrics.num_preemptions,
        queued_seconds=queued,
        prompt_logprobs=output.prompt_logprobs,
        kv_transfer_params=None if output.kv_transfer_params is None else dict(output.kv_transfer_params),
    )


def _completion(completion: CompletionOutput) -> CompletionDelta:
    return CompletionDelta(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def step_record(stats: StepStats) -> StepRecord:
    """A step's figures as the message that carries them, stamped with this moment."""
    return StepRecord(
        step=stats.step,
        time=time.time(),
        num_tokens=stats.num_tokens,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        pages_used=stats.pages_used,
        pages_cached=stats.pages_cached,
        pages_total=stats.pages_total,
        indexer_chunks=stats.indexer_chunks,
        scored_pairs=stats.scored_pairs,
        screened_pairs=stats.screened_pairs,
        screen_survivors=stats.screen_survivors,
        gathered_rows=stats.gathered_rows,
        seconds=stats.seconds,
        requests=[_progress(stats, name) for name in stats.progress],
        preempted=list(stats.preempted),
        rss_bytes=stats.rss_bytes,
        num_drafts=stats.spec.num_drafts,
        num_draft_tokens=stats.spec.num_draft_tokens,
        num_accepted_tokens=stats.spec.num_accepted_tokens,
        num_accepted_tokens_per_pos=stats.spec.num_accepted_tokens_per_pos,
        rank_scored_pairs=list(stats.rank_scored_pairs),
        comm=stats.comm,
    )


def _progress(stats: StepStats, request_id: str) -> RequestProgress:
    share = stats.shares[request_id]
    return RequestProgress(
        request_id,
        *stats.progress[request_id],
        share.num_prompt_tokens,
        share.num_step_tokens,
        share.num_cached_tokens,
    )
