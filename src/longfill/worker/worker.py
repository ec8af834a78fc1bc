"""One rank: a loaded model over its pool of pages, turning a step's plan into sampled tokens.

May import torch, models, kernels and partition. Invariant: all memory is reserved by the plan made at start.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from longfill.cache.layout import RecordLayout
from longfill.config import EngineArgs, cache_formats, default_threads
from longfill.kernels.interface import ScreenCounts
from longfill.kernels.select import choose_kernels, make_backends
from longfill.kernels.workspace import Workspace
from longfill.models.attention import Attend
from longfill.models.config import ModelConfig
from longfill.models.decoder import Decoder
from longfill.models.draft import DraftLayer
from longfill.models.loading import load_model, weight_bytes
from longfill.models.rope import inverse_frequencies, softmax_scale
from longfill.partition import StepPlan, StepRequest, indexer_workspace_rows, plan_step
from longfill.units import NumPages, PageSize
from longfill.worker.batch import step_rows
from longfill.worker.memory import (
    MemoryPlan,
    block_rows,
    context_workspace_rows,
    logits_rows,
    max_logits_bytes,
    plan_memory,
    process_reserve,
)
from longfill.worker.pool import allocate_pool, latent_scales, layer_caches
from longfill.worker.prompt_logprobs import PromptInput, PromptLogprobs, prompt_logprobs
from longfill.worker.sampler import SampledToken, SampleInput
from longfill.worker.speculate import Drafter, Sampled, check_draft_layer, verify_step
from longfill.worker.tails import Tails

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step gives back: tokens by request id, the logits they came from, and where the time went."""

    sampled: dict[str, tuple[SampledToken, ...]]
    """Of each sampling request: one token, and one more for each of its drafts that was right."""
    logits: dict[str, Tensor]
    """fp32 [tokens, vocabulary] behind them."""
    drafts: dict[str, tuple[int, ...]]
    """Of each sampling request: guesses at the tokens behind, which the next step verifies. Empty without
    speculation."""
    seconds: dict[str, float]
    """By stage of the model; all of the draft layer is one."""
    screen: ScreenCounts
    """What the indexer's screen did in the model's own layers."""
    failed: dict[str, str]
    """Request id -> why, for rows whose logits allow no token."""
    prompt_logprobs: dict[str, PromptLogprobs]
    """Of each request that wants them and has rows before tokens of its prompt in this step: those tokens'."""


class Worker:
    """Loads a model folder and runs steps. Raises ModelError, ConfigError or CapacityError before any work."""

    def __init__(self, args: EngineArgs, folder: Path, config: ModelConfig) -> None:
        check_draft_layer(args, config)
        self.num_threads = threads = args.num_threads or default_threads()
        torch.set_num_threads(threads)
        self.args = args
        self.config = config
        self.layout = record_layout(args, config)
        process_bytes = process_reserve(psutil.Process().memory_info().rss)
        dtype = getattr(torch, config.dtype)
        indexer = config.indexer
        self.kernels = choose_kernels(
            args,
            dtype=config.dtype,
            topk=None if indexer is None else indexer.topk,
            index_format=self.layout.index_format,
            index_head_dim=self.layout.index_head_dim,
        )
        backend, index_backend = make_backends(self.kernels, dtype, threads)
        mtp = args.num_speculative_tokens > 0
        self.memory: MemoryPlan = plan_memory(
            args, config, self.layout, self.kernels,
            process_bytes=process_bytes, weight_bytes=weight_bytes(folder, config, dtype, backend, mtp=mtp),
        )  # fmt: skip
        logger.info("kernels: %s", "; ".join(f"{operation}: {path}" for operation, path in self.kernels.paths.items()))
        workspace = Workspace(self.memory.workspace)
        weights = load_model(folder, config, dtype, backend, mtp=mtp)
        self._logits_rows = logits_rows(args, self.kernels)
        self._workspace_rows = context_workspace_rows(args, self.memory.max_model_len)
        self.pool = allocate_pool(self.layout, NumPages(self.memory.num_pages))
        rope_gain = inverse_frequencies(config.rope)[1]
        caches = layer_caches(self.pool, self.layout, latent_scales(weights, rope_gain))
        attend = Attend(self.kernels, backend, index_backend, workspace, softmax_scale(config))
        self.decoder = Decoder(
            config, weights, caches, backend, attend, block_rows=block_rows(args, config, self.kernels)
        )
        self.tails = Tails()
        """What `execute` leaves for the next steps' `resolve`, which must come after all steps before them."""
        self._drafter: Drafter | None = None
        if weights.mtp is not None:
            self._drafter = Drafter(
                DraftLayer(self.decoder, weights.mtp), self.plan, num_tokens=args.num_speculative_tokens,
                page_size=args.block_size, max_model_len=self.memory.max_model_len,
            )  # fmt: skip

    def plan(self, requests: Sequence[StepRequest]) -> StepPlan:
        """The step's integers, under this rank's limits."""
        return plan_step(
            requests,
            page_size=self.layout.page_size,
            topk=self.kernels.topk,
            indexer_workspace_rows=indexer_workspace_rows(
                self.memory.max_model_len, self.args.sparse_mla_prefill_workspace_factor
            ),
            max_logits_bytes=max_logits_bytes(self.args, self.memory.max_model_len),
            workspace_rows=self._workspace_rows,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan, inputs: Sequence[SampleInput], prompts: Sequence[PromptInput] = ()) -> StepResult:
        """Run a plan; `inputs` belong to its sampling requests, in order.

        `prompts` say whose rows are to give log-probabilities of prompt tokens. They cost the head for each of them.
        """
        rows = step_rows(plan)
        all_rows = self._drafter is not None or bool(prompts)
        hidden = self.decoder.forward(rows, all_rows=all_rows)
        seconds: dict[str, float] = {}
        found: dict[str, PromptLogprobs] = {}
        unusable: dict[str, str] = {}
        if prompts:
            # Before there are other logits, which then need not fit beside these.
            start = time.perf_counter()
            found, unusable = prompt_logprobs(hidden, plan, prompts, self.decoder.head, block_rows=self._logits_rows)
            seconds["logprobs"] = time.perf_counter() - start
        logits_SV = self.decoder.logits(hidden[rows.sample_rows_S] if all_rows else hidden)
        start = time.perf_counter()
        sampled, failed = verify_step(logits_SV, plan, inputs)
        sampled = {name: tokens for name, tokens in sampled.items() if name not in unusable}
        seconds |= self.decoder.seconds | {"sample": time.perf_counter() - start}
        screen = self.decoder.screen_counts
        drafts: dict[str, tuple[int, ...]] = {}
        if self._drafter is not None:
            start = time.perf_counter()
            drafts = self._drafter.draft(plan, rows, hidden, sampled, inputs)
            seconds["draft"] = time.perf_counter() - start
        self._keep_tails(plan, sampled, drafts)
        firsts = dict(zip([row.request_id for row in inputs], plan.sample_starts.tolist(), strict=False))
        logits = {name: logits_SV[firsts[name] : firsts[name] + len(tokens)] for name, tokens in sampled.items()}
        return StepResult(sampled, logits, drafts, seconds, screen, failed | unusable, found)

    def _keep_tails(self, plan: StepPlan, sampled: Sampled, drafts: dict[str, tuple[int, ...]]) -> None:
        for request in plan.requests:
            if not request.samples:
                continue
            tokens = sampled.get(request.request_id)
            if tokens is None:
                self.tails.drop(request.request_id)
            else:
                ids = [token.token_id for token in tokens]
                self.tails.book(request, ids, drafts.get(request.request_id, ()))


def record_layout(args: EngineArgs, config: ModelConfig) -> RecordLayout:
    """The page record for a model, in the formats of `config.cache_formats`.

    With speculation the draft layer is one layer more, which owns an indexer where the model has any.
    """
    latent, index = cache_formats(args, config.dtype)
    drafts = int(args.num_speculative_tokens > 0)
    draft_indexer = (config.num_layers,) if drafts and config.indexer is not None else ()
    return RecordLayout(
        page_size=PageSize(args.block_size),
        num_layers=config.num_layers + drafts,
        full_layers=config.full_indexer_layers + draft_indexer,
        latent_format=latent,
        index_format=index if config.indexer is not None else None,
        kv_lora_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        index_head_dim=config.indexer.head_dim if config.indexer is not None else 0,
    )
