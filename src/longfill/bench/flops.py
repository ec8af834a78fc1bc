"""The floating-point operations that a prefill cannot do without, counted exactly by part.

Imports the model's config. Invariant: counts are of the model's definition in its absorbed form, not of a kernel: no
padding, no score that selects nothing, no key that is not selected. A multiply-add is two; norms, rotations, softmax
and other elementwise work are left out.
"""

from __future__ import annotations

from longfill.models.config import ModelConfig


def prefill_flops(config: ModelConfig, tokens: int) -> dict[str, int]:
    """Part -> FLOP of prefilling `tokens` tokens from position 0 and computing the last one's logits."""
    layers, full = config.num_layers, len(config.full_indexer_layers)
    parts = {
        "project": layers * tokens * _projections(config),
        "absorb": layers * tokens * _absorb(config),
        "attend": layers * _attended_pairs(config, tokens) * _pair(config),
        "mlp": tokens * sum(_expert_layer(config) if is_moe else _dense_layer(config) for is_moe in config.moe_layers),
        "head": 2 * config.hidden_size * config.vocab_size,
    }
    if config.indexer is not None and config.q_lora_rank is not None:
        heads, dim = config.indexer.num_heads, config.indexer.head_dim
        width = config.q_lora_rank * heads * dim + config.hidden_size * (dim + heads)
        parts["index project"] = 2 * full * tokens * width
        parts["index"] = 2 * full * scored_pairs(tokens, config.indexer.topk) * heads * (dim + 1)
    return parts


def causal_pairs(tokens: int) -> int:
    """(query, key) pairs of `tokens` rows that each see every key up to themselves."""
    return tokens * (tokens + 1) // 2


def scored_pairs(tokens: int, topk: int) -> int:
    """Pairs that decide something: a row that sees no more keys than it selects needs no scores."""
    return causal_pairs(tokens) - causal_pairs(min(tokens, topk))


def _attended_pairs(config: ModelConfig, tokens: int) -> int:
    """Pairs of rows and the keys that they attend to: all, or the selected ones."""
    if config.indexer is None:
        return causal_pairs(tokens)
    short = min(tokens, config.indexer.topk)
    return causal_pairs(short) + (tokens - short) * config.indexer.topk


def _projections(config: ModelConfig) -> int:
    queries = config.num_heads * config.qk_head_dim
    through = config.q_lora_rank
    q = config.hidden_size * queries if through is None else through * (config.hidden_size + queries)
    kv = config.hidden_size * (config.kv_lora_rank + config.qk_rope_head_dim)
    return 2 * (q + kv + config.num_heads * config.v_head_dim * config.hidden_size)


def _absorb(config: ModelConfig) -> int:
    """Queries into the latent space, and outputs out of it."""
    return 2 * config.num_heads * config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)


def _pair(config: ModelConfig) -> int:
    """One row and one latent key: the score over latent and rotary parts, the value over the latent."""
    return 2 * config.num_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)


def _dense_layer(config: ModelConfig) -> int:
    return 6 * config.hidden_size * config.intermediate_size


def _expert_layer(config: ModelConfig) -> int:
    moe = config.moe
    assert moe is not None
    experts = moe.experts_per_token + moe.num_shared_experts
    return 6 * config.hidden_size * moe.moe_intermediate_size * experts + 2 * config.hidden_size * moe.num_experts
