"""The step loop: requests in, schedules to the worker, tokens back to the ledger and out to the caller.

May import everything below `engine/`. Invariant: one path for every request; a step never asks what phase it is in.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from longfill import compatibility
from longfill.cache import KVCacheManager
from longfill.cache.prefix import PrefixIdentity
from longfill.config import EngineArgs
from longfill.engine.live import LiveRequest
from longfill.engine.stats import EngineStats, StepStats
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError, RequestError
from longfill.kernels.interface import ScreenCounts
from longfill.models.config import ModelConfig
from longfill.models.hub import resolve_model, weights_revision
from longfill.partition import StepPlan
from longfill.request import FinishReason, Request, RequestOutput, SamplingParams, TokenIds
from longfill.scheduler import Advance, Schedule, Scheduler, scheduler_config
from longfill.units import NumPages
from longfill.worker.sampler import request_seed, validate
from longfill.worker.worker import StepResult, Worker


class LLMEngine:
    """Synchronous engine over one in-process worker: `add_request`, then `step` until nothing is unfinished."""

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        folder = resolve_model(args.model, args.revision)
        config = ModelConfig.from_folder(folder, args.hf_overrides)
        if args.dtype != "auto":
            config = dataclasses.replace(config, dtype=args.dtype)
        compatibility.check(args, config)
        if args.max_model_len is not None and args.max_model_len > config.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {args.max_model_len:,} is more than the model's {config.max_position_embeddings:,} "
                "positions (max_position_embeddings in config.json)"
            )
        self.tokenizer = None if args.skip_tokenizer_init else Tokenizer.from_folder(_tokenizer_folder(args, folder))
        self.model_config = config
        self.worker = Worker(args, folder, config)
        self.cache = KVCacheManager(
            NumPages(self.worker.memory.num_pages),
            self.worker.layout.page_size,
            identity=self._identity(folder) if args.enable_prefix_caching else None,
        )
        self.scheduler = Scheduler(
            self.cache,
            scheduler_config(args, max_model_len=self.worker.memory.max_model_len, eos_token_ids=self._eos_token_ids()),
        )
        self.stats = EngineStats()
        self.last_step: StepStats | None = None
        self._live: dict[str, LiveRequest] = {}
        self._ordinal = 0
        self._process = psutil.Process()

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
    ) -> None:
        """Queue a prompt (text or token ids). Raises RequestError for one that cannot be served as asked."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("a text prompt needs a tokenizer: drop --skip-tokenizer-init or give token ids")
            prompt = self.tokenizer.encode(prompt)
        validate(params, self.model_config.vocab_size)
        compatibility.check(self.args, self.model_config, params)
        request = Request(request_id, prompt, params, arrival_time=time.monotonic(), cache_salt=cache_salt)
        _check_vocabulary(request, self.model_config.vocab_size)
        self.scheduler.add_request(request)
        seed = request_seed(params, self.args.seed, self._ordinal)
        self._ordinal += 1
        self._live[request_id] = LiveRequest(request, text, seed, self.tokenizer, digest=self.args.digest)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns what it had, or None if it has ended already. No token follows."""
        self.scheduler.abort(request_id)
        live = self._forget(request_id)
        return None if live is None else live.output()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for every request that got a token or ended in it."""
        start = time.perf_counter()
        schedule, preempted = self._schedule()
        if not schedule.requests:
            self.last_step = None
            return []
        progress: dict[str, tuple[int, int]] = {}
        for scheduled in schedule.requests:
            live = self._live[scheduled.request_id]
            live.scheduled()
            progress[scheduled.request_id] = (scheduled.start + scheduled.num_tokens, live.request.num_tokens)
        try:
            plan = self.worker.plan(self.worker.resolve(schedule.requests))
            inputs = [self._live[r.request_id].sample_input() for r in plan.requests if r.samples]
            result = self.worker.execute(plan, inputs)
        except BaseException:
            # The ledger counts these tokens as computed already; their pages were never written.
            self.scheduler.retract(schedule)
            raise
        tokens = {name: tuple(token.token_id for token in found) for name, found in result.sampled.items()}
        advanced = self.scheduler.update(schedule, tokens, result.failed)
        outputs = [self._deliver(advance, result) for advance in advanced]
        seconds = result.seconds | {"step": time.perf_counter() - start}
        self._record(schedule, plan, result.screen, seconds, progress, preempted)
        return outputs

    def _schedule(self) -> tuple[Schedule, tuple[str, ...]]:
        """The next schedule with work in it. A step may do nothing but preempt; the one after it can admit again."""
        preempted: tuple[str, ...] = ()
        while True:
            schedule = self.scheduler.schedule()
            preempted += schedule.preempted
            if schedule.requests or not schedule.preempted:
                return schedule, preempted

    def _deliver(self, advance: Advance, result: StepResult) -> RequestOutput:
        """Hand a request its new tokens, or the reason why it failed; a stop string may end it at any of them."""
        request = advance.request
        live = self._live[request.request_id]
        if request.request_id in result.failed:
            live.error = result.failed[request.request_id]
            self._forget(request.request_id)
            return live.output()
        tokens = result.sampled[request.request_id][: advance.num_tokens]
        for left, token, logits_V in zip(
            range(len(tokens))[::-1], tokens, result.logits[request.request_id], strict=False
        ):
            # Sampled stop tokens (eos among them) are no text, as in vLLM.
            ended = left == 0 and request.finish_reason is FinishReason.STOP
            stop = live.append(token, logits_V, hidden=ended and not request.params.include_stop_str_in_output)
            if stop is not None:
                request.drop_outputs_after(request.num_output_tokens - left)
                self.scheduler.finish(request.request_id, FinishReason.STOP, stop)
                request.finish_reason, request.stop_reason = FinishReason.STOP, stop
                break
        if request.is_finished:
            self._forget(request.request_id)
        return live.output()

    def _forget(self, request_id: str) -> LiveRequest | None:
        """Let go of a request that has ended; None for one that is unknown."""
        self.worker.tails.drop(request_id)
        return self._live.pop(request_id, None)

    def _record(
        self,
        schedule: Schedule,
        plan: StepPlan,
        screen: ScreenCounts,
        seconds: dict[str, float],
        progress: dict[str, tuple[int, int]],
        preempted: tuple[str, ...],
    ) -> None:
        full = len(self.model_config.full_indexer_layers)
        layers = self.model_config.num_layers if self.worker.kernels.use_workspace else 0
        step = StepStats(
            step=schedule.step,
            num_tokens=schedule.num_tokens,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            pages_used=self.cache.num_usable_pages - self.cache.num_free_pages,
            pages_total=self.cache.num_usable_pages,
            indexer_chunks=full * len(plan.indexer_chunks),
            scored_pairs=full * plan.scored_pairs,
            screened_pairs=screen.screened,
            screen_survivors=screen.survivors,
            gathered_rows=layers * plan.gathered_rows,
            seconds=seconds,
            progress=progress,
            preempted=preempted,
            rss_bytes=self._process.memory_info().rss,
        )
        self.stats.add(step)
        self.last_step = step

    def _identity(self, folder: Path) -> PrefixIdentity:
        layout = self.worker.layout
        drafts = "/draft" if layout.num_layers > self.model_config.num_layers else ""
        overrides = json.dumps(dict(self.args.hf_overrides or {}), sort_keys=True)
        return PrefixIdentity(
            model=self.model_config.model_type,
            revision=f"{weights_revision(folder)} {overrides}",
            dtype=self.model_config.dtype,
            cache_format=f"{layout.latent_format}/{layout.index_format}/{layout.page_size}{drafts}",
            rope=dataclasses.asdict(self.model_config.rope),
        )

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
