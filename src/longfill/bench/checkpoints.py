"""Random checkpoints that every engine can load: published tensor names, values scaled so that things vary.

May import torch and safetensors. Invariant: the same preset and seed give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from longfill.errors import ConfigError
from longfill.models.config import ModelConfig

_COMMON: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 1024,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Four small layers in fp32, three of them with experts.
        "toy": _COMMON
        | {
            "dtype": "float32",
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "qk_head_dim": 48,
            "head_dim": 16,
            "v_head_dim": 32,
            "index_n_heads": 4,
            "index_head_dim": 32,
            "index_topk": 64,
            "indexer_types": ["full"] * 4,
        },
        # One layer at the attention widths of GLM-5, with a small dense MLP.
        "glm-width": _COMMON
        | {
            "dtype": "bfloat16",
            "hidden_size": 6144,
            "intermediate_size": 2048,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 1,
            "mlp_layer_types": ["dense"],
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "qk_head_dim": 256,
            "head_dim": 64,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
            "indexer_types": ["full"],
        },
    }
)


def preset_config(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a preset, with `overrides` replacing its fields.

    `num_nextn_predict_layers` among them adds so many draft layers.
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: there is no such preset; choose from {', '.join(PRESETS)}, needle")
    return {**PRESETS[name], **(overrides or {})}


def write_checkpoint(folder: Path, raw: Mapping[str, Any], seed: int = 0) -> None:
    """Write config.json and model.safetensors with random weights for it (an unquantised model with an indexer)."""
    config = ModelConfig.from_dict(dict(raw), source="the benchmark's model")
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator).to(dtype) for name, shape in _shapes(config)}
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(raw), indent=1))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return noise.mul_(0.1)
    if "norm" in name:
        return noise.mul_(0.1).add_(1.0)
    return noise if "embed_tokens" in name else noise.mul_(1 / math.sqrt(shape[-1]))


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config.num_layers):
        full = layer in config.full_indexer_layers
        yield from _layer(layer, config, has_indexer=full, is_moe=config.moe_layers[layer])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        # Draft layers have an indexer and experts of their own; embedding and head are the model's.
        yield from _layer(layer, config, has_indexer=True, is_moe=config.moe_layers[-1])
        yield f"model.layers.{layer}.eh_proj.weight", (hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield f"model.layers.{layer}.{norm}.weight", (hidden,)


def _layer(
    layer: int, config: ModelConfig, *, has_indexer: bool, is_moe: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield from _attention(f"{prefix}.self_attn", config, has_indexer=has_indexer)
    yield from (
        _experts(f"{prefix}.mlp", config) if is_moe else _mlp(f"{prefix}.mlp", hidden, config.intermediate_size)
    )


def _attention(prefix: str, c: ModelConfig, *, has_indexer: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert c.q_lora_rank is not None
    yield f"{prefix}.q_a_proj.weight", (c.q_lora_rank, c.hidden_size)
    yield f"{prefix}.q_a_layernorm.weight", (c.q_lora_rank,)
    yield f"{prefix}.q_b_proj.weight", (c.num_heads * c.qk_head_dim, c.q_lora_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
    yield f"{prefix}.kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield f"{prefix}.kv_b_proj.weight", (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield f"{prefix}.o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim)
    if has_indexer and c.indexer is not None:
        i = c.indexer
        yield f"{prefix}.indexer.wq_b.weight", (i.num_heads * i.head_dim, c.q_lora_rank)
        yield f"{prefix}.indexer.wk.weight", (i.head_dim, c.hidden_size)
        yield f"{prefix}.indexer.k_norm.weight", (i.head_dim,)
        yield f"{prefix}.indexer.k_norm.bias", (i.head_dim,)
        yield f"{prefix}.indexer.weights_proj.weight", (i.num_heads, c.hidden_size)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _experts(prefix: str, c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    moe = c.moe
    assert moe is not None
    yield f"{prefix}.gate.weight", (moe.num_experts, c.hidden_size)
    if moe.has_correction_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", c.hidden_size, moe.moe_intermediate_size)
    if moe.num_shared_experts:
        yield from _mlp(f"{prefix}.shared_experts", c.hidden_size, moe.moe_intermediate_size * moe.num_shared_experts)
