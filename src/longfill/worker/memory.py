"""The memory plan: what is reserved for what, before anything runs, and how many pages that leaves.

May import the record layout, kernels' workspace sizes and the model's config. Invariant: the rows add up to no more
than the budget, and a longer `max_model_len` never needs less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longfill.cache.layout import RecordLayout
from longfill.config import DEFAULT_MEMORY_SHARE, DETERMINISTIC_SLICES, EngineArgs, parse_bytes
from longfill.errors import CapacityError
from longfill.host import cgroup_memory_limit
from longfill.kernels.reference.linear import DEQUANT_ROWS, MIN_ROWS
from longfill.kernels.select import KernelChoice
from longfill.kernels.workspace import SELECT_TILE, WorkspaceSizes, attention_tile_bytes
from longfill.models.config import ModelConfig
from longfill.partition import LONG_MODEL_LEN, prefill_workspace_rows
from longfill.partition.comm import ROUND_BYTES
from longfill.units import NumPages, PageSize, pages_for
from longfill.worker.native_bytes import native_bytes, native_index_bytes
from longfill.worker.sampler import ROW_BYTES

TILE_COPIES = 5
"""Arrays of ATTENTION_TILE_BYTES that attention holds at its peak: rows as stored, decoded, scores, weights, out."""
SELECT_BYTES = 32
"""Bytes that selecting the top-k holds per score of a SELECT_TILE: comparisons, running counts, indices."""
BLOCK_BYTES = 128 * 2**20
"""Bytes of queries, their latent form and outputs that a layer's rows hold at once; a step of more rows is cut."""
MIN_BLOCK_ROWS = 128
"""Rows below which the matrix products of a block would no longer be worth reading their weights."""
CONTEXT_COPIES = 3
"""Of gathered contexts: as they come, in order, and index keys beside the latent rows."""
PROMPT_LOGITS_ROWS = 64
"""Rows of logits at least that prompt_logprobs may take at once: enough to share one reading of the head's weights."""
PROCESS_FLOOR = 320 * 2**20
PROCESS_GROWTH = 64 * 2**20
PAGE_BOOKKEEPING = 512
"""Bytes of Python objects for one page at most: its place in the free list, its hash, its places in page tables."""


@dataclass(frozen=True)
class MemoryRow:
    """One line of the start-up table."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class MemoryPlan:
    """What the engine reserves. `num_pages` counts the null page; `page_bytes` is one record."""

    budget: int
    rows: tuple[MemoryRow, ...]
    num_pages: int
    page_bytes: int
    bytes_per_token: int
    max_model_len: int
    workspace: WorkspaceSizes

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    def report(self) -> dict[str, Any]:
        """The start-up table as plain values; bytes everywhere."""
        return {
            "budget": self.budget,
            "reserved": self.total,
            "rows": [{"name": row.name, "bytes": row.bytes, "note": row.note} for row in self.rows],
            "num_pages": self.num_pages,
            "page_bytes": self.page_bytes,
            "bytes_per_token": self.bytes_per_token,
            "max_model_len": self.max_model_len,
        }


def budget_bytes(args: EngineArgs) -> int:
    """The budget as given, or the stated share of what the cgroup allows. Raises CapacityError for one beyond that."""
    limit, ranks = cgroup_memory_limit(), args.local_ranks
    if args.memory_budget is None:
        return int(limit * DEFAULT_MEMORY_SHARE) // ranks
    budget = parse_bytes(args.memory_budget)
    if budget * ranks > limit:
        who = "this process may use" if ranks == 1 else f"{ranks} ranks take it each, and together may use"
        raise CapacityError(f"--memory-budget {args.memory_budget}: {who} {_mib(limit)} (cgroup or machine); give less")
    return budget


def process_reserve(rss_bytes: int) -> int:
    """What to set aside for the process itself, which holds `rss_bytes` before the model is loaded.

    Libraries load more of themselves at first use and the allocator keeps what it was given back (measured together: 31
    to 66 MiB in prefills of 8K to 64K tokens). In steps, so that two starts of one command plan alike.
    """
    return max(PROCESS_FLOOR, -(-(rss_bytes + PROCESS_GROWTH) // PROCESS_GROWTH) * PROCESS_GROWTH)


def plan_memory(
    args: EngineArgs, config: ModelConfig, layout: RecordLayout, kernels: KernelChoice, *,
    process_bytes: int, weight_bytes: int, most_pages: NumPages | None = None,
) -> MemoryPlan:  # fmt: skip
    """Divide the budget. `process_bytes` is what the process holds before the model; `weight_bytes` all its weights.
    `most_pages`: that all ranks can have, if one has fewer than the others.

    Raises CapacityError when one request of `max_model_len` does not fit, naming the largest length that would.
    """
    budget = budget_bytes(args)
    longest = args.max_model_len or config.max_position_embeddings
    span = PageSize(layout.page_size * args.decode_context_parallel_size)

    def fixed(max_model_len: int) -> list[MemoryRow]:
        return _fixed_rows(args, config, layout, kernels, max_model_len, process_bytes, weight_bytes)

    override = args.num_gpu_blocks_override
    page_cost = layout.record_bytes + PAGE_BOOKKEEPING

    def needed(max_model_len: int) -> int:
        pages = override if override is not None else _request_pages(max_model_len, span)
        return sum(row.bytes for row in fixed(max_model_len)) + pages * page_cost

    def fits(max_model_len: int) -> bool:
        pages = _request_pages(max_model_len, span)
        return needed(max_model_len) <= budget and (override is None or pages <= override)

    if not fits(longest):
        raise CapacityError(_refusal(args, fixed, needed, fits, longest, budget))
    rows = fixed(longest)
    left = (budget - sum(row.bytes for row in rows)) // page_cost
    useful = args.max_num_seqs * int(pages_for(longest, span)) + 1
    num_pages = NumPages(override if override is not None else min(left, useful))
    if most_pages is not None:
        num_pages = min(num_pages, most_pages)
    request_bytes = layout.pool_bytes(pages_for(longest, span))
    note = (
        f"{num_pages:,} pages x {layout.record_bytes:,} B; {layout.bytes_per_token:,} B a token; "
        f"one request of {longest:,} tokens takes {request_bytes:,} B"
    )
    rows.append(MemoryRow("page bookkeeping", num_pages * PAGE_BOOKKEEPING, "free list, prefix hashes, page tables"))
    rows.append(MemoryRow("KV pages", layout.pool_bytes(num_pages), note))
    return MemoryPlan(
        budget=budget,
        rows=tuple(rows),
        num_pages=num_pages,
        page_bytes=layout.record_bytes,
        bytes_per_token=layout.bytes_per_token,
        max_model_len=longest,
        workspace=_workspace_sizes(args, config, layout, kernels, longest),
    )


def _request_pages(max_model_len: int, page_size: PageSize) -> NumPages:
    """Pages of a pool that can hold one longest request: its own and the null page."""
    return NumPages(pages_for(max_model_len, page_size) + 1)


def _workspace_sizes(
    args: EngineArgs, config: ModelConfig, layout: RecordLayout, kernels: KernelChoice, max_model_len: int
) -> WorkspaceSizes:
    topk = kernels.topk or 0
    materialises = topk > 0 and not kernels.native_index
    rows = context_workspace_rows(args, max_model_len)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return WorkspaceSizes(
        logits_bytes=max_logits_bytes(args, max_model_len) if materialises else 0,
        context_rows=rows if kernels.use_workspace else 0,
        context_row_bytes=width * (4 if layout.latent_format == "float32" else 2),
        selection_rows=args.max_num_batched_tokens if topk else 0,
        topk=topk,
    )


def max_logits_bytes(args: EngineArgs, max_model_len: int) -> int:
    """The limit of a q-chunk's scores, raised where a single row needs more: the one chunk that cannot be cut."""
    return max(args.sparse_indexer_max_logits_mb * 2**20, 4 * max_model_len)


def context_workspace_rows(args: EngineArgs, max_model_len: int) -> int:
    """Rows of the gather workspace, made monotone: the factor's step from 5 to 2 would let a longer limit need less."""
    factor = args.sparse_mla_prefill_workspace_factor
    lengths = {max_model_len, min(max_model_len, LONG_MODEL_LEN)}
    return max(prefill_workspace_rows(length, factor) for length in lengths)


def _fixed_rows(
    args: EngineArgs, config: ModelConfig, layout: RecordLayout, kernels: KernelChoice, max_model_len: int,
    process_bytes: int, weight_bytes: int,
) -> list[MemoryRow]:  # fmt: skip
    sizes = _workspace_sizes(args, config, layout, kernels, max_model_len)
    tokens, drafts = args.max_num_batched_tokens, args.num_speculative_tokens
    guessing = max(args.max_num_seqs, 0 if kernels.native else MIN_ROWS)
    sampled = logits_rows(args, kernels)
    tile_bytes = attention_tile_bytes(sizes.topk, config.kv_lora_rank + config.qk_rope_head_dim)
    block = block_rows(args, config, kernels)
    activations = tokens * _step_row_bytes(config, kernels) + block * _block_row_bytes(config, kernels)
    rows = [
        MemoryRow("process", process_bytes, "Python, torch and libraries, with room to grow"),
        MemoryRow("weights", weight_bytes, "packed for the kernels" if kernels.native else "memory-mapped"),
        MemoryRow("prompt ids", 32 * max_model_len, "text, token ids and page tables of one longest request"),
        MemoryRow("activations", activations, f"{tokens:,} rows of one step, at most {block:,} in a layer's middle"),
        # Those of a step that waits to be booked stay beside the ones in work.
        MemoryRow(
            "logits", (2 + args.steps_in_flight) * 4 * sampled * config.vocab_size, f"{sampled} rows of a step, fp32"
        ),
        MemoryRow(
            "sampling",
            (ROW_BYTES + args.max_num_seqs) * config.vocab_size,
            "one row in float64, and which tokens each prompt has",
        ),
    ]
    if not kernels.native:
        rows.append(MemoryRow("attention tiles", TILE_COPIES * tile_bytes, "gathered rows and scores"))
    if drafts:
        size = tokens * 8 + block * _join_row_bytes(config) + 3 * sampled * config.hidden_size * _element_bytes(config)
        rows.append(MemoryRow("draft layer", size, "tokens behind the rows, and what joins them to hidden states"))
        rows.append(MemoryRow("draft logits", 3 * 4 * guessing * config.vocab_size, f"{guessing} drafts at once, fp32"))
    if not kernels.native and (config.quant is not None or config.dtype != "float32"):
        rows.append(MemoryRow("weight slices", DEQUANT_ROWS * _widest_input(config) * 12, "weights in passing"))
    if sizes.topk:
        rows.append(MemoryRow("selection", 2 * sizes.selection_bytes, f"top-{sizes.topk} positions of {tokens:,} rows"))
    if sizes.logits_bytes:
        tiles = sizes.score_tile_bytes + max(SELECT_TILE, max_model_len) * SELECT_BYTES
        rows.append(MemoryRow("indexer scores", sizes.logits_bytes, "one query chunk"))
        rows.append(MemoryRow("indexer tiles", tiles, "scoring and selection"))
    if kernels.native:
        rows.append(MemoryRow("kernel scratch", native_bytes(args, config), "packed rows, sums, key tiles"))
    if kernels.native_index:
        assert layout.index_format is not None
        scratch = native_index_bytes(args, config, kernels, layout.index_format)
        rows.append(MemoryRow("indexer scratch", scratch, "streaming scores and top-k"))
    exchange = _exchange_bytes(args, config, layout, kernels, block)
    if exchange:
        rows.append(MemoryRow("exchange", exchange, f"what a step sends to and gets from {args.num_ranks - 1} ranks"))
    if args.decode_context_parallel_size > 1 and args.prefill_context_parallel_size > 1:
        size = CONTEXT_COPIES * context_workspace_rows(args, max_model_len) * layout.latent_row_bytes
        rows.append(MemoryRow("gathered contexts", size, "one layer's keys of split prompts, from all ranks"))
    if sizes.context_bytes:
        rows.append(MemoryRow("gather workspace", sizes.context_bytes, f"{sizes.context_rows:,} rows"))
    return rows


def _exchange_bytes(
    args: EngineArgs, config: ModelConfig, layout: RecordLayout, kernels: KernelChoice, block: int
) -> int:
    """Bytes that a step holds at most because there are several ranks: rows of others, partial results, expert rows."""
    if args.num_ranks == 1 and not args.deterministic:
        return 0
    size, tokens, c = _element_bytes(config), args.max_num_batched_tokens, config
    index = 0 if c.indexer is None else layout.index_head_dim * 4 + 4
    keys = 3 * (layout.latent_row_bytes + index)
    rows = size * ((c.q_lora_rank or 0) + 2 * c.hidden_size) + 5 * 4 * c.hidden_size
    total = tokens * (keys + rows)
    if args.decode_context_parallel_size > 1 or args.deterministic:
        heads = c.num_heads
        # Parts of a row's attention: of all slices at once, or as they are cut, sent, received and merged.
        parts = max(DETERMINISTIC_SLICES + 2, 2 + 3 * args.decode_context_parallel_size)
        total += block * heads * (2 * size * (c.kv_lora_rank + c.qk_rope_head_dim) + parts * 4 * (c.kv_lora_rank + 1))
        total += block * 6 * 8 * (kernels.topk or 0) * args.decode_context_parallel_size
    if args.enable_expert_parallel and c.moe is not None:
        # Of a round: outputs as they are computed, sent and received, in fp32, and rows as they are sent, received and
        # laid out for the experts. The low-latency form has a place for every expert.
        places = c.moe.experts_per_token if args.all2all_backend == "high_throughput" else c.moe.num_experts
        total += min(ROUND_BYTES, 4 * tokens * places * c.hidden_size) * 3 * (4 + size) // 4
    return total


def _widest_input(config: ModelConfig) -> int:
    """Most columns of a weight that is dequantised or widened."""
    attention = max(config.hidden_size, config.q_lora_rank or 0, config.kv_lora_rank)
    return max(attention, config.num_heads * config.v_head_dim, config.intermediate_size)


def block_rows(args: EngineArgs, config: ModelConfig, kernels: KernelChoice) -> int:
    """Rows that a layer takes at once where it can cut a step: what a row holds there is bounded by BLOCK_BYTES.

    A gathered workspace serves all rows of a request at once, so nothing is cut beside one.
    """
    if kernels.use_workspace:
        return args.max_num_batched_tokens
    return min(args.max_num_batched_tokens, max(MIN_BLOCK_ROWS, BLOCK_BYTES // _block_row_bytes(config, kernels)))


def logits_rows(args: EngineArgs, kernels: KernelChoice) -> int:
    """Rows whose logits a step holds at once: all that it samples from, or as many of a prompt's."""
    tokens = args.max_num_batched_tokens
    sampled = max(args.max_num_seqs, min(args.max_num_seqs * (1 + args.num_speculative_tokens), tokens))
    return max(sampled, min(PROMPT_LOGITS_ROWS, tokens), 0 if kernels.native else MIN_ROWS)


def _element_bytes(config: ModelConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def _step_row_bytes(config: ModelConfig, kernels: KernelChoice) -> int:
    """Bytes that a row holds at most while all rows of the step are in work: hidden state, norms, router, experts."""
    size, hidden = _element_bytes(config), config.hidden_size
    width = config.kv_lora_rank + config.qk_rope_head_dim
    indexer = 0 if config.indexer is None else config.indexer.head_dim
    elements = 3 * hidden + 2 * (config.q_lora_rank or 0) + 2 * width + 2 * indexer
    fp32 = 2 * hidden + 2 * width + 4 * indexer + 2 * config.qk_rope_head_dim
    if config.moe is not None:
        fp32 += hidden + 8 * config.moe.num_experts
        if not kernels.native:  # the reference runs all rows of an expert at once
            elements += hidden + 3 * config.moe.moe_intermediate_size
    return size * elements + 4 * fp32


def _block_row_bytes(config: ModelConfig, kernels: KernelChoice) -> int:
    """Bytes that a row holds at most while its block is in work, in the widest of: indexer, attention, MLP."""
    size, heads = _element_bytes(config), config.num_heads
    width = config.kv_lora_rank + config.qk_rope_head_dim
    rank, once = config.kv_lora_rank, config.qk_head_dim + width + config.v_head_dim
    if kernels.native:
        attention = size * (config.hidden_size + heads * (once + rank))
    else:  # which copies what it rotates and multiplies, and attends in fp32
        attention = size * (config.hidden_size + heads * 2 * once) + 4 * heads * rank
    indexer = 0
    if config.indexer is not None:
        indexer = 4 * (4 * config.indexer.num_heads * config.indexer.head_dim + config.hidden_size)
    inner = config.intermediate_size
    if config.moe is not None:
        inner = max(inner, config.moe.moe_intermediate_size * max(1, config.moe.num_shared_experts))
    return max(attention, indexer, size * (3 * config.hidden_size + 3 * inner) + 8 * config.hidden_size)


def _join_row_bytes(config: ModelConfig) -> int:
    """Bytes that a row of the draft layer's input holds at most: embedding, two norms (in fp32), both side by side."""
    return config.hidden_size * (5 * _element_bytes(config) + 8)


def _refusal(
    args: EngineArgs, fixed: Callable[[int], list[MemoryRow]], needed: Callable[[int], int],
    fits: Callable[[int], bool], longest: int, budget: int,
) -> str:  # fmt: skip
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    override = args.num_gpu_blocks_override
    pages = "" if override is None else f" with {override:,} pages (--num-gpu-blocks-override)"
    if low < 2:
        largest = max(fixed(2), key=lambda row: row.bytes)
        return (
            f"--memory-budget {_mib(budget)}: the model{pages} needs {_mib(needed(2))} before any context, most of it "
            f"for '{largest.name}'; raise --memory-budget, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return (
        f"--max-model-len {longest:,}{pages} needs {_mib(needed(longest))}, more than the budget of {_mib(budget)} "
        f"or the pages allow; the largest that fits is --max-model-len {low}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
