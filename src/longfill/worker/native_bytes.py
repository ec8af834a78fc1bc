"""What native kernels allocate for the length of a call, at most, by the engine's arguments and the model's sizes.

May import the kernels and the model's config.
"""

from __future__ import annotations

import torch

from longfill.config import EngineArgs
from longfill.host import default_threads
from longfill.kernels import cpu
from longfill.kernels.select import KernelChoice
from longfill.models.config import ModelConfig


def native_index_bytes(args: EngineArgs, config: ModelConfig, kernels: KernelChoice, index_format: str) -> int:
    """The most that scoring, or choosing among the candidates of several shards, takes."""
    indexer = config.indexer
    assert indexer is not None
    threads = args.num_threads or default_threads()
    scores = cpu.scratch_bytes(
        heads=indexer.num_heads, dim=indexer.head_dim, topk=indexer.topk, num_threads=threads,
        screen=kernels.screen, index_format=index_format,
    )  # fmt: skip
    shards = args.decode_context_parallel_size
    if shards == 1:
        return scores
    return max(scores, cpu.merge_scratch_bytes(candidates=shards * indexer.topk, num_threads=threads))


def native_bytes(args: EngineArgs, config: ModelConfig) -> int:
    """The most that native calls but `index_topk` take: one at a time, beside what a product has kept."""
    threads, rows = args.num_threads or default_threads(), args.max_num_batched_tokens
    shape = {"num_rows": rows, "compute_dtype": getattr(torch, config.dtype), "num_threads": threads}
    c, hidden = config, config.hidden_size
    products = [
        (hidden, c.num_heads * c.v_head_dim),
        (c.num_heads * c.qk_head_dim, c.q_lora_rank or hidden),
        (c.vocab_size, hidden),
    ]
    if args.num_speculative_tokens:
        products.append((hidden, 2 * hidden))
    sizes = [cpu.linear_scratch_bytes(out_size=out_size, in_size=in_size, **shape) for out_size, in_size in products]
    heads = ((c.kv_lora_rank, c.qk_nope_head_dim), (c.v_head_dim, c.kv_lora_rank))
    sizes += [cpu.per_head_scratch_bytes(out_size=out_size, in_size=in_size, **shape) for out_size, in_size in heads]
    sizes.append(cpu.mlp_scratch_bytes(hidden_size=hidden, inner_size=c.intermediate_size, **shape))
    others = [
        cpu.attention_scratch_bytes(
            heads=c.num_heads, rank=c.kv_lora_rank, rope_dim=c.qk_rope_head_dim, num_threads=threads
        )
    ]
    if c.moe is not None:
        inner = c.moe.moe_intermediate_size
        sizes.append(
            cpu.experts_scratch_bytes(
                hidden_size=hidden,
                inner_size=inner,
                shared_inner_size=inner * c.moe.num_shared_experts,
                num_experts=c.moe.num_experts,
                experts_per_token=c.moe.experts_per_token,
                **shape,
            )
        )
        others.append(
            cpu.route_scratch_bytes(
                hidden_size=hidden, num_experts=c.moe.num_experts, num_rows=rows, num_threads=threads
            )
        )
    return max(sizes) + max(others)
