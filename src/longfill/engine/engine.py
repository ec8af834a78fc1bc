"""The step loop: requests in, schedules to the worker, tokens back to the ledger and out to the caller.

May import everything below `engine/`. Invariant: one path for every request; a step never asks what phase it is in.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longfill import compatibility
from longfill.cache import KVCacheManager
from longfill.cache.prefix import PrefixIdentity
from longfill.config import EngineArgs
from longfill.engine.compute import StepComputer, StepOutcome
from longfill.engine.executors import make_executor
from longfill.engine.executors.messages import MakeWorker
from longfill.engine.fanout import Fanout
from longfill.engine.live import LiveRequest
from longfill.engine.pipeline import Computed, StepPipeline
from longfill.engine.stats import EngineStats, RequestShare, ResidentMemory, StepStats
from longfill.engine.token_bytes import structured_outputs
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError, RequestError
from longfill.models.config import ModelConfig
from longfill.models.hub import resolve_model, weights_revision
from longfill.models.shards import check_heads
from longfill.request import FinishReason, Request, RequestOutput, RequestOutputKind, SamplingParams, TokenIds
from longfill.scheduler import Advance, Scheduler, scheduler_config
from longfill.units import NumPages
from longfill.worker.sampler import request_seed, validate
from longfill.worker.speculate import check_draft_layer
from longfill.worker.structured import StructuredOutputs
from longfill.worker.worker import Worker


class LLMEngine:
    """Synchronous engine over an executor: `add_request`, then `step` until nothing is unfinished.

    Where torchrun has started this process as another rank than 0, `LLMEngine(...)` follows rank 0 until that closes
    its engine, and ends with SystemExit.
    """

    def __init__(self, args: EngineArgs, make_worker: MakeWorker = Worker) -> None:
        """`make_worker` makes the worker of every rank, each in its own process, so it must pickle: for benchmarks,
        whose ranks are to start with pages that hold something."""
        self.args = args
        self.folder = folder = resolve_model(args.model, args.revision)
        config = ModelConfig.from_folder(folder, args.hf_overrides)
        if args.dtype != "auto":
            config = dataclasses.replace(config, dtype=args.dtype)
        compatibility.check(args, config)
        # Before ranks are started, which would all have to fail.
        check_heads(config.num_heads, args.tensor_parallel_size)
        check_draft_layer(args, config)
        if args.max_model_len is not None and args.max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {args.max_model_len:,} is more than the model's {config.max_position_embeddings:,} "
                "positions (max_position_embeddings in config.json)"
            )
        self.tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_folder(_tokenizer_folder(args, folder))
        self.model_config = config
        self.executor = make_executor(args, folder, config, make_worker)
        try:
            self._prepare()
        except BaseException:
            self.executor.close()
            raise

    def _prepare(self) -> None:
        """What stands on a loaded model."""
        args = self.args
        self.cache = KVCacheManager(
            NumPages(self.worker.memory.num_pages),
            self.worker.page_tokens,
            identity=self._identity(self.folder) if args.enable_prefix_caching else None,
        )
        self.scheduler = Scheduler(
            self.cache,
            scheduler_config(args, max_model_len=self.worker.memory.max_model_len, eos_token_ids=self._eos_token_ids()),
        )
        self.stats = EngineStats()
        self.last_step: StepStats | None = None
        self._live: dict[str, LiveRequest] = {}
        self.forms = self._structured_outputs()
        compute = StepComputer(
            self.executor, self.scheduler, self._live, self.forms, split_mixed_batch=args.split_mixed_batch
        )
        self._pipeline = StepPipeline(compute, args.steps_in_flight)
        self._computed_until = self._booked_until = 0.0
        self._preempted: tuple[str, ...] = ()
        self._fanout = Fanout(self._queue, self._live, at_once=not args.enable_prefix_caching)
        self._ordinal = 0
        self._memory = ResidentMemory()

    @property
    def worker(self) -> Worker:
        """Rank 0's."""
        return self.executor.worker

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int] | TokenIds,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a prompt (text or token ids). Raises RequestError for one that cannot be served as asked.

        Lower `priority` goes first and `tenant` says whose share a prompt takes, where the scheduler's policies ask.
        """
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("a text prompt needs a tokenizer: drop --skip-tokenizer-init or give token ids")
            prompt = self.tokenizer.encode(prompt)
        validate(params, self.model_config.vocab_size)
        compatibility.check(self.args, self.model_config, params)
        if params.structured_outputs is not None and self.forms is not None:
            self.forms.validate(params.structured_outputs)
        request = Request(
            request_id,
            prompt,
            params,
            arrival_time=time.monotonic(),
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            kv_transfer_params=kv_transfer_params,
        )
        _check_vocabulary(request, self.model_config.vocab_size)
        self._fanout.add(request, text, request_seed(params, self.args.seed, self._ordinal))
        self._ordinal += 1

    def _queue(self, request: Request, text: str | None, seed: int) -> None:
        self.scheduler.add_request(request)
        self._live[request.request_id] = LiveRequest(
            request,
            text,
            seed,
            self.tokenizer,
            digest=self.args.digest,
            eos_token_ids=self.scheduler.config.eos_token_ids,
            vocab_size=self.model_config.vocab_size,
        )

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what it had, or None if it has ended already. No token follows."""
        return self._fanout.abort(request_id, self._abort)

    def _abort(self, request_id: str) -> RequestOutput | None:
        self.scheduler.abort(request_id)
        live = self._live.pop(request_id, None)
        return None if live is None else live.output()

    def step(self) -> list[RequestOutput]:
        """Advance by one step; returns an output for every request that got a token or ended in it.

        What an output holds, and whether there is one before the request has ended, is its `output_kind`. Cumulative
        ones are made anew and longer in each step: for long outputs ask for deltas or the final one.

        With `--async-scheduling` that step was scheduled earlier, and others are on their way behind it. Those that
        nobody waits for any more are waited for here, so that all pages are back once the last request has ended.
        """
        self.executor.check()
        try:
            outputs = self._schedule()
            if self._pipeline:
                outputs += self._finish_step()
            else:
                self.last_step = None
            while self._pipeline and not self._live:
                self._finish_step()
        except BaseException:
            # Wherever it came (Ctrl-C comes anywhere), the ledger may count tokens whose pages are never written.
            self._pipeline.cancel()
            self.scheduler.start_over()
            raise
        return self._fanout.deliver(outputs)

    def _finish_step(self) -> list[RequestOutput]:
        """Wait for the oldest step and book it."""
        computed = self._pipeline.wait()
        waited = time.perf_counter()
        schedule, outcome = computed.schedule, computed.result
        self._append_prompt_logprobs(computed)
        advanced = self.scheduler.update(
            schedule, outcome.token_ids, outcome.failed, seconds=computed.ended - computed.began
        )
        progress, shares = {}, {}
        for scheduled in schedule.requests:
            live = self._live.get(scheduled.request_id)
            if live is not None:
                request = live.request
                progress[request.request_id] = (request.num_booked_tokens, request.num_tokens)
                shares[request.request_id] = RequestShare(
                    scheduled.num_tokens, scheduled.num_prompt_tokens, request.num_cached_tokens
                )
        outputs = [self._deliver(advance, outcome) for advance in advanced]
        sampled = {advance.request.request_id for advance in advanced if advance.num_tokens}
        self._record(computed, progress, shares, sampled, waited)
        return [output for output in outputs if output is not None]

    @property
    def work_done(self) -> int:
        """Grows while a step is computed: by tasks of native kernels, and by stages of layers. For whoever watches."""
        return self.executor.work_done

    def _append_prompt_logprobs(self, computed: Computed[StepOutcome]) -> None:
        """Hand over what a step says of prompts, to those requests that still run as they did when it was scheduled."""
        found = computed.result.prompt_logprobs
        for scheduled in computed.schedule.requests:
            name = scheduled.request_id
            if name in found and self.scheduler.admission(name) == scheduled.admission:
                self._live[name].append_prompt_logprobs(found[name])

    def close(self) -> None:
        """End the worker's thread and all other ranks; the engine takes no further step. May be called again."""
        self._pipeline.close()
        self.executor.close()

    def _schedule(self) -> list[RequestOutput]:
        """Submit steps until enough are in flight; returns what the scheduler ended.

        A step may do nothing but preempt; the one after it can admit again.
        """
        outputs: list[RequestOutput] = []
        while not self._pipeline.is_full:
            began = time.perf_counter()
            schedule = self.scheduler.schedule()
            outputs += [self._live.pop(request.request_id).output() for request in schedule.stalled]
            self._preempted += schedule.preempted
            if schedule.requests:
                for scheduled in schedule.requests:
                    self._live[scheduled.request_id].scheduled()
                self._pipeline.submit(schedule, prepared=began)
            elif not schedule.preempted:
                break
        return outputs

    def _deliver(self, advance: Advance, outcome: StepOutcome) -> RequestOutput | None:
        """Hand a request its new tokens, or the reason why it failed; a stop string may end it here."""
        request = advance.request
        live = self._live[request.request_id]
        if advance.num_tokens:
            self._append(live, advance.num_tokens, outcome)
        if request.is_finished:
            del self._live[request.request_id]
        elif request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return live.output()

    def _append(self, live: LiveRequest, num_tokens: int, outcome: StepOutcome) -> None:
        """Give a request the first tokens of what it sampled, up to a stop string."""
        request, before = live.request, live.request.num_output_tokens - num_tokens
        sampled, logits = outcome.sampled[request.request_id], outcome.logits[request.request_id]
        for index, token in enumerate(sampled[:num_tokens]):
            # Sampled stop tokens (eos among them) are no text, as in vLLM.
            ends = request.finish_reason is FinishReason.STOP and index == num_tokens - 1
            stop = live.append(token, logits[index], hidden=ends and not request.params.include_stop_str_in_output)
            if stop is not None:
                request.drop_outputs_after(before + index + 1)
                self.scheduler.finish(request.request_id, FinishReason.STOP, stop)
                request.finish_reason, request.stop_reason = FinishReason.STOP, stop
                return

    def _record(
        self, computed: Computed[StepOutcome], progress: dict[str, tuple[int, int]], shares: dict[str, RequestShare],
        sampled: set[str], waited: float,
    ) -> None:  # fmt: skip
        """Count a step that gave tokens to `sampled`; `waited` is when its result was there for the host."""
        outcome, requests, booked = computed.result, computed.schedule.requests, time.perf_counter()
        full = len(self.model_config.full_indexer_layers)
        layers = self.model_config.num_layers if self.worker.kernels.use_workspace else 0
        seconds = outcome.seconds | {
            "schedule": computed.submitted - computed.prepared,
            "update": booked - waited,
            "compute": computed.ended - computed.began,
            "idle": computed.began - max(computed.prepared, self._computed_until),
            "step": booked - max(computed.prepared, self._booked_until),
        }
        self._computed_until, self._booked_until = computed.ended, booked
        step = StepStats(
            step=computed.schedule.step,
            num_tokens=sum(plan.token_ids.size for plan in outcome.plans),
            num_prompt_tokens=sum(scheduled.num_prompt_rows for scheduled in requests),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            pages_used=self.cache.num_usable_pages - self.cache.num_free_pages,
            pages_cached=self.cache.num_cached_pages,
            pages_total=self.cache.num_usable_pages,
            indexer_chunks=full * sum(len(plan.indexer_chunks) for plan in outcome.plans),
            scored_pairs=full * sum(plan.rank_scored_pairs[0] for plan in outcome.plans),
            screened_pairs=outcome.screen.screened,
            screen_survivors=outcome.screen.survivors,
            gathered_rows=layers * sum(plan.gathered_rows for plan in outcome.plans),
            rank_scored_pairs=tuple(full * pairs for pairs in outcome.rank_scored_pairs),
            comm=outcome.comm,
            spec=outcome.spec(sampled),
            seconds=seconds,
            progress=progress,
            shares=shares,
            preempted=self._preempted,
            rss_bytes=self._memory.bytes(booked),
        )
        self._preempted = ()
        self.stats.add(step)
        self.last_step = step

    def _identity(self, folder: Path) -> PrefixIdentity:
        layout = self.worker.layout
        drafts = "/draft" if layout.num_layers > self.model_config.num_layers else ""
        dcp, interleave = self.args.decode_context_parallel_size, self.args.cp_kv_cache_interleave_size
        shards = f"/dcp{dcp}x{interleave}" if dcp > 1 else ""
        overrides = json.dumps(dict(self.args.hf_overrides or {}), sort_keys=True)
        return PrefixIdentity(
            model=self.model_config.model_type,
            revision=f"{weights_revision(folder)} {overrides}",
            dtype=self.model_config.dtype,
            cache_format=f"{layout.latent_format}/{layout.index_format}/{layout.page_size}{drafts}{shards}",
            rope=dataclasses.asdict(self.model_config.rope),
        )

    def _structured_outputs(self) -> StructuredOutputs | None:
        if self.tokenizer is None:
            return None
        return structured_outputs(self.tokenizer, self._eos_token_ids(), self.model_config.vocab_size)

    def _eos_token_ids(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        return tuple(dict.fromkeys([*self.model_config.eos_token_ids, *own]))


def _tokenizer_folder(args: EngineArgs, folder: Path) -> Path:
    """A local folder may hold a tokenizer alone; a hub id names a whole model, at its default revision."""
    if args.tokenizer is None:
        return folder
    local = Path(args.tokenizer)
    return local if local.is_dir() else resolve_model(args.tokenizer, None)


def _check_vocabulary(request: Request, vocab_size: int) -> None:
    low, high = int(request.token_ids.min()), int(request.token_ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"request {request.request_id}: token id {bad} is outside the model's vocabulary of {vocab_size:,}; "
            "the tokenizer may belong to another model"
        )
