"""A GLM-MoE-DSA checkpoint as GGUF, for llama.cpp: `python -m longfill_peers.gguf_checkpoint FOLDER FILE`.

In a process of its own, so that the memory it takes is not counted with the engine's. Invariant: values are the
checkpoint's, bit for bit; norms, router and indexer weights are widened to fp32, as llama.cpp expects them.

Source of names and layouts: llama.cpp, src/models/glm-dsa.cpp.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURE = "glm-dsa"
HADAMARD_SIZE = 64
"""llama.cpp rotates index queries and keys by Hadamard matrices of at least this size."""

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_FLOAT32 = ("norm", ".bias", "ffn_gate_inp", "indexer.proj")


def write_gguf(folder: Path, file: Path) -> None:
    """Write `file` from the checkpoint in `folder`; raises ValueError for a model that the format cannot hold."""
    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"] != "glm_moe_dsa":
        raise ValueError(f"llama.cpp is compared on glm_moe_dsa models only, not {raw['model_type']}")
    if raw["index_head_dim"] % HADAMARD_SIZE:
        raise ValueError(f"llama.cpp wants an index_head_dim in multiples of {HADAMARD_SIZE}")
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    _write_config(writer, raw)
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    _add(writer, "token_embd.weight", tensors["model.embed_tokens.weight"])
    _add(writer, "output_norm.weight", tensors["model.norm.weight"])
    _add(writer, "output.weight", tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]))
    for layer in range(raw["num_hidden_layers"]):
        _write_layer(writer, raw, tensors, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, raw: dict[str, Any]) -> None:
    kinds = raw["mlp_layer_types"]
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[dense:]:
        raise ValueError("llama.cpp has dense layers before those with experts only")
    rank, rope = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_head_count(raw["num_attention_heads"])
    # The latent is one key head for all.
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(raw["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(raw["v_head_dim"])
    writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope)
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.head_count", raw["index_n_heads"])
    writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.key_length", raw["index_head_dim"])
    writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.top_k", raw["index_topk"])
    full = [int(kind == "full") for kind in raw["indexer_types"]]
    writer.add_array(f"{ARCHITECTURE}.attention.indexer.types", full)


def _write_layer(writer: Any, raw: dict[str, Any], tensors: dict[str, Tensor], layer: int) -> None:
    old, new = f"model.layers.{layer}.", f"blk.{layer}."
    for theirs, ours in _NAMES.items():
        if old + theirs in tensors:
            _add(writer, new + ours, tensors[old + theirs])
    per_head = tensors[f"{old}self_attn.kv_b_proj.weight"].view(raw["num_attention_heads"], -1, raw["kv_lora_rank"])
    keys_HNR, values_HVR = torch.split(per_head, [raw["qk_nope_head_dim"], raw["v_head_dim"]], 1)
    _add(writer, f"{new}attn_k_b.weight", keys_HNR.transpose(1, 2))
    _add(writer, f"{new}attn_v_b.weight", values_HVR)
    if f"{old}mlp.experts.0.gate_proj.weight" in tensors:
        for part in ("gate", "up", "down"):
            names = [f"{old}mlp.experts.{expert}.{part}_proj.weight" for expert in range(raw["n_routed_experts"])]
            _add(writer, f"{new}ffn_{part}_exps.weight", torch.stack([tensors[name] for name in names]))


def _add(writer: Any, name: str, tensor: Tensor) -> None:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.float32 or any(part in name for part in _FLOAT32):
        writer.add_tensor(name, tensor.float().numpy())
    else:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.bfloat16().view(torch.uint8).numpy(), raw_dtype=kind)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
