"""One rank: its part of a loaded model over its pool of pages, turning a step's plan into sampled tokens.

May import torch, models, kernels, parallel and partition. Invariant: all memory is reserved by the plan made at start;
all ranks run the same steps, and the first one samples.
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
from longfill.config import DETERMINISTIC_SLICES, EngineArgs, cache_formats
from longfill.errors import ConfigError
from longfill.host import default_threads
from longfill.kernels.interface import ScreenCounts
from longfill.kernels.select import choose_kernels, make_backends
from longfill.kernels.workspace import Workspace
from longfill.models.attention import Attend
from longfill.models.config import ModelConfig
from longfill.models.decoder import Decoder
from longfill.models.draft import DraftLayer
from longfill.models.key_slices import KeySlices
from longfill.models.loading import load_model
from longfill.models.rope import inverse_frequencies, softmax_scale
from longfill.models.rows import RankRows
from longfill.models.shard_attention import ShardAttend
from longfill.models.shards import WeightShards
from longfill.models.weight_bytes import weight_bytes
from longfill.parallel.mesh import Mesh
from longfill.partition import StepPlan, StepRequest, indexer_workspace_rows, plan_step
from longfill.partition.lengths import Int64Array
from longfill.partition.spread import Cut
from longfill.units import NumPages, PageSize
from longfill.worker.batch import rank_rows
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
from longfill.worker.speculate import Drafter, Sampled, share_sampled, verify_step
from longfill.worker.tails import Tails

logger = logging.getLogger(__name__)

MIN_SPARED_PRODUCTS = 2**25
"""Multiply-adds of the indexer that sharing its rows over TP ranks must spare each of them. Measured between two ranks
of one machine: exchanging the indices of few rows takes 0.25 ms, in which a thread does 2**24.3, and 5 us more a row of
top-2048."""


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
    comm: dict[str, int]
    """Bytes that this rank has sent to others, by what they were."""
    prompt_logprobs: dict[str, PromptLogprobs]
    """Of each request that wants them and has rows before tokens of its prompt in this step: those tokens'."""


class Worker:
    """Loads a rank's part of a model folder and runs steps. All ranks of `mesh` make theirs at the same time.

    Raises ModelError, ConfigError or CapacityError before any work.
    """

    def __init__(self, args: EngineArgs, folder: Path, config: ModelConfig, mesh: Mesh) -> None:
        self.mesh = mesh
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
        if args.deterministic and not self.kernels.native:
            raise ConfigError(
                "--deterministic needs the native kernels, whose products do not depend on a rank's share of the "
                f"outputs; this model would run on the reference ({self.kernels.why_reference})"
            )
        interleave = args.cp_kv_cache_interleave_size
        self.cut = Cut(mesh.shape, mesh.rank, args.pcp_split, interleave, _min_saved_pairs(config))
        backend, index_backend = make_backends(self.kernels, dtype, threads)
        mtp = args.num_speculative_tokens > 0
        shards = weight_shards(args, mesh)
        sizes = weight_bytes(folder, config, dtype, backend, mtp=mtp, shards=shards)
        self.memory: MemoryPlan = plan_memory(
            args, config, self.layout, self.kernels, process_bytes=process_bytes, weight_bytes=sizes
        )
        fewest = mesh.world.smallest("pages", self.memory.num_pages)
        if fewest < self.memory.num_pages:
            self.memory = plan_memory(
                args, config, self.layout, self.kernels, process_bytes=process_bytes, weight_bytes=sizes,
                most_pages=NumPages(fewest),
            )  # fmt: skip
        logger.info("kernels: %s", "; ".join(f"{operation}: {path}" for operation, path in self.kernels.paths.items()))
        workspace = Workspace(self.memory.workspace)
        weights = load_model(folder, config, dtype, backend, mtp=mtp, shards=shards)
        self._logits_rows = logits_rows(args, self.kernels)
        self._workspace_rows = context_workspace_rows(args, self.memory.max_model_len)
        self.pool = allocate_pool(self.layout, NumPages(self.memory.num_pages))
        rope_gain = inverse_frequencies(config.rope)[1]
        caches = layer_caches(self.pool, self.layout, latent_scales(weights, rope_gain))
        attend, shard_attend = _attention(args, mesh, Attend(
            self.kernels, backend, index_backend, workspace, softmax_scale(config),
            KeySlices(DETERMINISTIC_SLICES, args.cp_kv_cache_interleave_size) if args.deterministic else None,
        ))  # fmt: skip
        self.decoder = Decoder(
            config, weights, caches, backend, attend, shard_attend, mesh, shards,
            block_rows=block_rows(args, config, self.kernels), interleave=args.cp_kv_cache_interleave_size,
            all2all=args.all2all_backend,
        )  # fmt: skip
        self.tails = Tails()
        """What `execute` leaves for the next steps' `resolve`, which must come after all steps before them."""
        self._drafter: Drafter | None = None
        if weights.mtp is not None:
            self._drafter = Drafter(
                DraftLayer(self.decoder, weights.mtp), self.decoder, self._plan_and_rows,
                num_tokens=args.num_speculative_tokens, page_tokens=self.page_tokens,
                max_model_len=self.memory.max_model_len,
            )  # fmt: skip
        # What the start has exchanged belongs to no step.
        mesh.comm.take()
        mesh.comm.take_seconds()

    @property
    def page_tokens(self) -> PageSize:
        """Tokens under one entry of a page table: a page on every rank of a DCP group."""
        return PageSize(self.layout.page_size * self.mesh.shape.dcp)

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
            cut=self.cut,
        )

    def _plan_and_rows(self, requests: Sequence[StepRequest]) -> tuple[StepPlan, RankRows]:
        plan = self.plan(requests)
        return plan, rank_rows(plan, self.cut)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, inputs: Sequence[SampleInput], prompts: Sequence[PromptInput] = ()) -> StepResult:
        """Run a plan on the first rank; `inputs` belong to its sampling requests, in order.

        `prompts` say whose rows are to give log-probabilities of prompt tokens. They cost the head for each of them.
        """
        self.mesh.comm.take()
        rows = rank_rows(plan, self.cut)
        hidden_OC = self.decoder.forward(rows)
        seconds: dict[str, float] = {}
        # Before there are other logits, which then need not fit beside these.
        start = time.perf_counter()
        found, unusable = self._prompt_logprobs(plan, hidden_OC, prompts)
        if prompts:
            seconds["logprobs"] = time.perf_counter() - start
        logits_SV = self._logits(plan, hidden_OC, plan.sample_rows)
        assert logits_SV is not None, "the first rank has the logits"
        start = time.perf_counter()
        sampled, failed = verify_step(logits_SV, plan, inputs)
        sampled = {name: tokens for name, tokens in sampled.items() if name not in unusable}
        seconds |= self.decoder.seconds | {"sample": time.perf_counter() - start}
        screen = self.decoder.screen_counts
        drafts: dict[str, tuple[int, ...]] = {}
        if self._drafter is not None:
            start = time.perf_counter()
            sampled = share_sampled(sampled, plan, self.mesh.world)
            drafts = self._drafter.draft(plan, rows, self.decoder.norm(hidden_OC), sampled, inputs)
            seconds["draft"] = time.perf_counter() - start
        self._keep_tails(plan, sampled, drafts)
        firsts = dict(zip([row.request_id for row in inputs], plan.sample_starts.tolist(), strict=False))
        logits = {name: logits_SV[firsts[name] : firsts[name] + len(tokens)] for name, tokens in sampled.items()}
        comm, waited = self.mesh.comm.take(), self.mesh.comm.take_seconds()
        if comm:
            seconds["wait"] = sum(waited.values())
        return StepResult(sampled, logits, drafts, seconds, screen, failed | unusable, comm, found)

    @torch.inference_mode()
    def follow(self, requests: Sequence[StepRequest], prompts: Sequence[PromptInput] = ()) -> dict[str, int]:
        """Run a step of the first rank's on another one. Returns the bytes that it has sent, by what they were."""
        self.mesh.comm.take()
        plan, rows = self._plan_and_rows(requests)
        hidden_OC = self.decoder.forward(rows)
        self._prompt_logprobs(plan, hidden_OC, prompts)
        self._logits(plan, hidden_OC, plan.sample_rows)
        if self._drafter is not None:
            sampled = share_sampled(None, plan, self.mesh.world)
            self._drafter.draft(plan, rows, self.decoder.norm(hidden_OC), sampled, ())
        self.mesh.comm.take_seconds()
        return self.mesh.comm.take()

    def _logits(self, plan: StepPlan, hidden_OC: Tensor, batch_rows: Int64Array) -> Tensor | None:
        """fp32 [S, vocabulary] of some rows of the batch, on the first rank."""
        decoder = self.decoder
        return decoder.logits(decoder.norm(decoder.collect(hidden_OC, plan.share.pick(batch_rows))))

    def _prompt_logprobs(
        self, plan: StepPlan, hidden_OC: Tensor, prompts: Sequence[PromptInput]
    ) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
        return prompt_logprobs(
            plan, prompts, lambda rows: self._logits(plan, hidden_OC, rows), block_rows=self._logits_rows
        )

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


def weight_shards(args: EngineArgs, mesh: Mesh) -> WeightShards:
    """The parts of the weights that a rank of the mesh holds."""
    return WeightShards(
        tp_rank=mesh.tp.rank,
        tp_size=mesh.tp.size,
        ep_rank=mesh.ep.rank,
        ep_size=mesh.ep.size,
        expert_parallel=args.enable_expert_parallel,
        deterministic=args.deterministic,
    )


def _attention(args: EngineArgs, mesh: Mesh, attend: Attend) -> tuple[Attend, ShardAttend | None]:
    """`attend`, and with DCP what runs rows over the shards of several ranks."""
    dcp = mesh.shape.dcp
    if dcp == 1:
        return attend, None
    count = DETERMINISTIC_SLICES if args.deterministic else dcp
    slices = KeySlices(count, args.cp_kv_cache_interleave_size, dcp, mesh.dcp.rank)
    return attend, ShardAttend(attend, mesh, slices, args.dcp_comm_backend)


def _min_saved_pairs(config: ModelConfig) -> int:
    """`Cut.min_saved_pairs`: MIN_SPARED_PRODUCTS by what one pair takes."""
    indexer = config.indexer
    return 1 if indexer is None else max(1, MIN_SPARED_PRODUCTS // (indexer.num_heads * indexer.head_dim))


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
