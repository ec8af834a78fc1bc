"""What every command that runs a model shares: open the engine, say what it reserved, generate, report.

Imports the engine when a model is opened, not before, so that help and mistakes in flags stay quick. Invariant:
everything shown here goes to stderr; the report holds plain values only.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from longfill.cli.console import duration, size, stderr
from longfill.cli.progress import ProgressView
from longfill.config import EngineArgs
from longfill.errors import ConfigError, RequestError
from longfill.request import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams, TokenIds

if TYPE_CHECKING:
    from longfill.engine.llm import LLM
    from longfill.engine.stats import EngineStats, SpecDecodingStats
    from longfill.engine.tokenizer import Tokenizer
    from longfill.worker.memory import MemoryPlan

Prompts = Sequence[str | TokenIds]


def load_engine(args: EngineArgs) -> LLM:
    """Loads the model; imports the engine only now."""
    from longfill.engine.llm import LLM

    return LLM.from_engine_args(args)


def open_engine(args: EngineArgs) -> LLM:
    """Loads the model and shows on stderr what was reserved and which kernel paths run."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = stderr()
    console.print(f"longfill: loading {args.model}")
    started = time.monotonic()
    llm = load_engine(args)
    console.print(f"longfill: ready in {duration(time.monotonic() - started)}")
    show_memory(llm.memory, console)
    show_kernels(llm.kernel_paths, console)
    return llm


def tokenizer_of(llm: LLM) -> Tokenizer:
    """The engine's tokenizer, which commands that take text need."""
    if llm.tokenizer is None:
        raise ConfigError("--skip-tokenizer-init: this command takes text and needs the tokenizer; leave the flag out")
    return llm.tokenizer


def generate(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[RequestOutput]:
    """Runs the prompts with live progress on stderr; outputs in the order of the prompts.

    Raises RequestError where all completions of a prompt failed.
    """
    with ProgressView(stderr(), memory_budget=llm.memory.budget) as view:
        outputs = llm.generate(list(prompts), params, on_step=view.on_step)
    for output in outputs:
        if all(completion.finish_reason == FinishReason.ERROR for completion in output.outputs):
            raise RequestError(f"request {output.request_id} failed: {output.outputs[0].stop_reason}")
    return outputs


def show_memory(plan: MemoryPlan, console: Console) -> None:
    """The start-up table: each reservation in bytes, their sum, and the budget that they fit in."""
    reserved = sum(row.bytes for row in plan.rows)
    sums = {"reserved": reserved, "budget": plan.budget, "left over": plan.budget - reserved}
    table = Table(title="Memory", title_justify="left", show_header=False, show_footer=True, box=None, padding=(0, 1))
    table.add_column(footer="\n".join(sums))
    table.add_column(footer="\n".join(f"{total:,} B" for total in sums.values()), justify="right")
    table.add_column(footer="\n".join(size(total) for total in sums.values()), justify="right")
    table.add_column()
    for row in plan.rows:
        table.add_row(row.name, f"{row.bytes:,} B", size(row.bytes), row.note)
    console.print(table)


def show_kernels(paths: dict[str, str], console: Console) -> None:
    """Which kernel path runs for each operation."""
    text = "; ".join(f"{operation}: {path}" for operation, path in paths.items())
    console.print(f"Kernels: {text}", soft_wrap=True)


def peak_rss_bytes() -> int:
    """Most memory that this process has held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def report(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """One finished request as `--json` prints it; `text` and the like are those of the first completion."""
    completion = output.outputs[0]
    prompt_tokens = len(output.prompt_token_ids)
    ttft = time_to_first_token(output)
    values: dict[str, Any] = {
        "model": llm.model_name,
        "text": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "outputs": [completion_report(each) for each in output.outputs],
        "prompt_tokens": prompt_tokens,
        "cached_tokens": output.num_cached_tokens,
        "steps": output.metrics.steps,
        "ttft_s": ttft,
        "prefill_tokens_per_s": (prompt_tokens - output.num_cached_tokens) / ttft if ttft else None,
        "peak_rss_bytes": peak_rss_bytes(),
        "digest": output.digest,
        "stats": stats_report(llm.stats),
        "memory": llm.memory.report(),
        "kernel_paths": dict(llm.kernel_paths),
    }
    if completion.logprobs is not None:
        values["logprobs"] = [logprobs_report(step) for step in completion.logprobs]
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [
            None if entry is None else [logprob_report(*item) for item in entry.items()]
            for entry in output.prompt_logprobs
        ]
    return values


def completion_report(completion: CompletionOutput) -> dict[str, Any]:
    """One completion as values."""
    values: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        values["logprobs"] = [logprobs_report(step) for step in completion.logprobs]
    return values


def time_to_first_token(output: RequestOutput) -> float | None:
    """Seconds from the request's arrival to its first token; None when it made none."""
    first = output.metrics.first_token_time
    return None if first is None else first - output.metrics.arrival_time


def stats_report(stats: EngineStats) -> dict[str, Any]:
    """The engine's running totals."""
    return {
        "indexer_chunks": stats.indexer_chunks,
        "scored_pairs": stats.scored_pairs,
        "screened_pairs": stats.screened_pairs,
        "screen_survivors": stats.screen_survivors,
        "gathered_rows": stats.gathered_rows,
        "steps": stats.steps,
        "tokens": stats.tokens,
        "preemptions": stats.preemptions,
        "comm": dict(stats.comm),
        "spec": spec_report(stats.spec),
        "seconds": dict(stats.seconds),
    }


def spec_report(spec: SpecDecodingStats) -> dict[str, Any] | None:
    """What became of drafts; None where there were none."""
    if spec.num_drafts == 0:
        return None
    return dataclasses.asdict(spec) | {
        "acceptance_rate": spec.acceptance_rate,
        "mean_acceptance_length": spec.mean_acceptance_length,
        "acceptance_per_position": spec.acceptance_per_position,
    }


def logprobs_report(step: dict[int, Logprob]) -> list[dict[str, Any]]:
    """One token's log-probabilities, most likely first."""
    ranked = sorted(step.items(), key=lambda item: item[1].rank)
    return [logprob_report(token, entry) for token, entry in ranked]


def logprob_report(token: int, entry: Logprob) -> dict[str, Any]:
    """One token's log-probability."""
    return {"token_id": int(token), "logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
