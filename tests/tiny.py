"""Tiny random checkpoints of every family, written as the published ones are, beside the transformers model they equal.

For tests only; may import transformers. Invariant: the folder and the returned model hold the same weights (those of an
fp8 folder dequantised).

Weights are scaled so that things vary: logits and attention scores have a standard deviation about 1, norm weights
scatter around 1, the router's correction bias and the indexer's norm bias are not zero.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

CLASSES = {
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
}
FAMILIES = tuple(CLASSES)
DSA_FAMILIES = ("glm_moe_dsa", "deepseek_v32")
NUM_LAYERS = 4
FP8_BLOCK = (16, 16)
_NOT_QUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj", "shared_head")


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Arguments of the family's transformers config: 4 layers (the first dense), hidden 64, 4 heads, 8 experts."""
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family in DSA_FAMILIES:
        # Many indexer heads: with two, ReLU makes whole rows of scores zero and the selection a tie.
        fields |= {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}
    if family in ("deepseek_v3", "kimi_k2"):
        fields |= {"n_group": 2, "topk_group": 1, "num_mtp_layers": 0}
    if family == "deepseek_v2":
        fields |= {
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        }
    if family == "glm4_moe_lite":
        del fields["first_k_dense_replace"]
    return fields | overrides


def make_checkpoint(
    folder: str | Path,
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    block: tuple[int, int] = FP8_BLOCK,
    shards: int = 1,
    index: bool = True,
    mtp: int = 0,
    **config_overrides: Any,
) -> transformers.PreTrainedModel:
    """Write a checkpoint into `folder` and return the transformers model (eval mode, eager attention) it equals.

    `fp8` quantises, in blocks of `block`, the linear weights that published checkpoints quantise; `shards` > 1 writes
    that many files, with model.safetensors.index.json unless `index` is False; `mtp` adds that many draft layers, which
    transformers does not run. `config_overrides` are fields of the transformers config.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, CLASSES[family] + "ForCausalLM")
    config = getattr(transformers, CLASSES[family] + "Config")(**tiny_config(family, **config_overrides))
    config._attn_implementation = "eager"
    transformers.utils.logging.disable_progress_bar()
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    _fill(model, generator)
    tensors, raw = _as_published(model)
    tensors = {name: t if name.endswith("e_score_correction_bias") else t.to(dtype) for name, t in tensors.items()}
    raw["dtype"] = str(dtype).removeprefix("torch.")
    raw["num_nextn_predict_layers"] = mtp
    if family == "kimi_k2":
        raw["model_type"] = "kimi_k2"
    plain = tensors
    if fp8:
        tensors, plain = _quantise(tensors, block)
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
    if fp8 or dtype != torch.float32:
        model = _reload(model, plain, dtype)
    tensors |= _mtp_tensors(tensors, raw, mtp, generator)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    write_tensors(folder, tensors, shards=shards, index=index)
    return model


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, shards: int = 1, index: bool = True) -> None:
    """Write `tensors` as model.safetensors, or as shards with or without an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    if index:
        total = sum(t.nbytes for t in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; `None` removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(folder: Path, *, remove: Iterable[str] = (), add: Mapping[str, Tensor] | None = None) -> None:
    """Rewrite model.safetensors without the tensors `remove` and with those of `add`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in remove:
        del tensors[name]
    write_tensors(folder, tensors | dict(add or {}))


@torch.no_grad()
def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * noise)
        elif name.endswith(".bias"):
            tensor.copy_(0.3 * noise)
        elif "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def _as_published(model: transformers.PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors under the names of published checkpoints (one per expert), and its config.json."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        tensors = {name: tensor.clone() for name, tensor in load_file(Path(scratch) / "model.safetensors").items()}
        return tensors, json.loads((Path(scratch) / "config.json").read_text())


def _reload(
    model: transformers.PreTrainedModel, tensors: dict[str, Tensor], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    with tempfile.TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
        write_tensors(Path(scratch), tensors)
        return type(model).from_pretrained(scratch, dtype=dtype, attn_implementation="eager").eval()


def quantise(weight: Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """e4m3 values and float32 scales per block (largest magnitude to 448)."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = padded.view(rows, block[0], columns, block[1]).abs().amax((1, 3)).clamp(min=1e-12) / 448
    values = weight.float() / expand_scale(scale, weight.shape, block)
    return values.to(torch.float8_e4m3fn), scale


def expand_scale(scale: Tensor, shape: torch.Size, block: tuple[int, int] = FP8_BLOCK) -> Tensor:
    """Each element's scale: float32 of `shape`."""
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _quantise(tensors: dict[str, Tensor], block: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors as stored, tensors with the dequantised values)."""
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if tensor.ndim == 2 and not any(part in name for part in _NOT_QUANTISED):
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor, block)
            scale = expand_scale(stored[f"{name}_scale_inv"], tensor.shape, block)
            plain[name] = (stored[name].float() * scale).to(tensor.dtype)
    return stored, plain


def _mtp_tensors(
    tensors: dict[str, Tensor], raw: dict[str, Any], count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draft layers behind the last one: the last layer's tensors and the first's indexer, their rows moved by one so
    that no two layers are alike, and the joining parts."""
    added: dict[str, Tensor] = {}
    last, hidden, vocab = raw["num_hidden_layers"] - 1, raw["hidden_size"], raw["vocab_size"]
    dtype = tensors["model.norm.weight"].dtype
    for i in range(count):
        prefix = f"model.layers.{last + 1 + i}."
        for source in (0, last):  # layer 0 always has an indexer, the last one has the experts
            old = f"model.layers.{source}."
            for name, tensor in tensors.items():
                if name.startswith(old) and (source == last or ".indexer." in name):
                    added[prefix + name.removeprefix(old)] = torch.cat([tensor[1:], tensor[:1]])
        products = {
            "embed_tokens.weight": ((vocab, hidden), 1.0),
            "eh_proj.weight": ((hidden, 2 * hidden), (2 * hidden) ** -0.5),
            "shared_head.head.weight": ((vocab, hidden), hidden**-0.5),
        }
        for name, (shape, scale) in products.items():
            added[prefix + name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            added[prefix + name] = (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)
    return added
