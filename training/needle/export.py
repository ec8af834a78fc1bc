"""Writes a trained needle model as a Hugging Face checkpoint folder: weights, configuration, tokenizer, template.

python training/needle/export.py --state build/needle.pt --out src/longfill/needle/model
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from model import Layer, MoE, NeedleConfig, NeedleModel
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from vocabulary import BOS, EOS, PAD, SPECIAL_TOKENS, TOKENS, encode

from longfill.needle import haystack

SELECTION_BIAS = "e_score_correction_bias"

# The messages' contents, one after the other, then the cue after which the model answers.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}{{ ' Answer:' }}{% endif %}
    {%- if message['content'] is string %}{{ ' ' + message['content'] }}
    {%- else %}{% for part in message['content'] %}{{ ' ' + part['text'] }}{% endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' Answer:' }}{% endif %}
"""


def build_tokenizer() -> Tokenizer:
    """Words, single digits and punctuation of the vocabulary; everything else in bytes; whitespace only separates."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|\S"), behavior="removed", invert=True)
    # Back to text: a space after words and punctuation, none after digits and bytes, so that codes stay whole.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"(?<=[A-Za-z.,?:!;])$"), " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bos = SPECIAL_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Training's own `encode` and the exported tokenizer must agree."""
    grammar = haystack.FillerGrammar(random.Random(0), frozenset())
    texts = [grammar.sentence() for _ in range(500)] + ["Zo\u00eb's a caf\u00e9 (no. 12), I say!\nNew line; A b."]
    for text in texts:
        if tokenizer.encode(text, add_special_tokens=False).ids != encode(text):
            raise ValueError(f"the tokenizers disagree about {text!r}")


def hugging_face_config(config: NeedleConfig) -> dict[str, Any]:
    layers = config.num_hidden_layers
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense" if layer < config.first_k_dense_replace else "sparse" for layer in range(layers)],
        "index_n_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "indexer_types": list(config.indexer_types),
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def stored_views(model: NeedleModel) -> dict[str, Tensor]:
    """The model's parameters under their Hugging Face names: views, so that writing to one changes the model."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        tensors |= layer_views(layer, f"model.layers.{number}.")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def layer_views(layer: Layer, prefix: str) -> dict[str, Tensor]:
    """One decoder layer's part of `stored_views`."""
    tensors: dict[str, Tensor] = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = getattr(layer, norm).weight
    for name, parameter in layer.self_attn.named_parameters():
        tensors[f"{prefix}self_attn.{name}"] = parameter
    if not isinstance(layer.mlp, MoE):
        return tensors | {f"{prefix}mlp.{name}": parameter for name, parameter in layer.mlp.named_parameters()}
    moe = layer.mlp
    tensors[f"{prefix}mlp.gate.weight"] = moe.gate.weight
    tensors[f"{prefix}mlp.gate.{SELECTION_BIAS}"] = moe.get_buffer("bias")
    for name, parameter in moe.shared_experts.named_parameters():
        tensors[f"{prefix}mlp.shared_experts.{name}"] = parameter
    for expert in range(moe.config.n_routed_experts):
        for name, stacked in (("gate", moe.expert_gate), ("up", moe.expert_up), ("down", moe.expert_down)):
            tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = stacked[expert]
    return tensors


def as_stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the dtypes of the checkpoint: bf16 but for the experts' selection bias."""
    return {
        name: tensor.detach()
        .to(torch.float32 if name.endswith(SELECTION_BIAS) else torch.bfloat16)
        .contiguous()
        .clone()
        for name, tensor in tensors.items()
    }


def load_checkpoint(folder: Path) -> NeedleModel:
    """The model of an exported folder, with its bf16 weights in float32; a draft layer is left aside."""
    model = NeedleModel(NeedleConfig())
    stored = load_file(folder / "model.safetensors")
    for name, view in stored_views(model).items():
        view.copy_(stored[name])
    return model


def export_checkpoint(model: NeedleModel, out: Path) -> None:
    """Writes the folder; `out.with_suffix(".pt")` keeps the float32 state for more training."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out.with_suffix(".pt"))
    save_file(as_stored(stored_views(model)), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = build_tokenizer()
    check_tokenizer(tokenizer)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"pad_token": SPECIAL_TOKENS[PAD], "bos_token": SPECIAL_TOKENS[BOS], "eos_token": SPECIAL_TOKENS[EOS]}
    _write_json(out / "config.json", hugging_face_config(model.config))
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False},
    )
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": True,
            **special,
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="the .pt file written by training")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = NeedleModel(NeedleConfig())
    model.load_state_dict(torch.load(arguments.state, weights_only=True))
    export_checkpoint(model, arguments.out)


if __name__ == "__main__":
    main()
