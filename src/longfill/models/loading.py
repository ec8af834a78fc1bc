"""Fill `ModelWeights` from a checkpoint, strictly.

May import torch, the config and the checkpoint. Invariant: every parameter is filled exactly once with the right shape,
every stored tensor is used or skipped for a stated reason, and no weight exists twice: a tensor is a view of the mapped
file unless its dtype has to change, and then it is converted alone.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import torch
from torch import Tensor

from longfill.errors import ModelError
from longfill.kernels.backend import Backend
from longfill.kernels.interface import Heads, Linear, Mlp, StoredLinear, StoredMlp
from longfill.models.checkpoint import Checkpoint, TensorEntry
from longfill.models.config import ModelConfig
from longfill.models.weights import (
    AttentionWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

logger = logging.getLogger(__name__)

_FLOATS = ("F32", "F16", "BF16")
_SCALES = ("F32", "BF16", "F8_E8M0")
_KEPT_FLOAT32 = re.compile(r"\.indexer\.(k_norm|weights_proj)\.|\.mlp\.gate\.")
_ROTARY_BUFFERS = r".*\.rotary_emb\.inv_freq"
"""Old checkpoints store this derived table; the engine computes it from the config."""


def load_model(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, mtp: bool = False
) -> ModelWeights:
    """The weights of `folder`'s safetensors, in `dtype` but for fp8 weights (as stored) and what must be float32.

    `mtp`: with the draft layer behind the last one, of which the config announces one.

    Raises `ModelError` that names tensor, file and both shapes where the checkpoint and the config do not fit, for an
    fp8 weight without a fitting scale, and for a tensor that would be left unused. Left unused on purpose: draft layers
    that the config announces, without `mtp`, and, with a line in the log, indexer weights of layers that the config
    marks shared.
    """
    checkpoint = Checkpoint.open(folder)
    weights = _Loader(checkpoint, config, dtype, backend).model(mtp=mtp)
    skipped = checkpoint.finish((_ROTARY_BUFFERS, *_spare(config, mtp=mtp)))
    spare_indexers = re.compile("|".join(_spare_indexers(config)) or "(?!)")
    unused_indexers = [name for name in skipped if spare_indexers.fullmatch(name)]
    if unused_indexers:
        logger.warning(
            "%s: %d indexer tensors belong to layers that share another layer's selection; not used (first: %s)",
            checkpoint.folder,
            len(unused_indexers),
            unused_indexers[0],
        )
    return weights


def weight_bytes(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, mtp: bool = False
) -> int:
    """Bytes that the weights of `folder` take once loaded in `dtype`, from the files' headers alone.

    fp8 weights stay as stored, with float32 scales, but for kv_b, which is kept dequantised for the absorbed form.
    Indexers of layers that share another's selection are not loaded, nor are draft layers unless `mtp`.
    """
    spare = re.compile("|".join(_spare(config, mtp=mtp)) or "(?!)")
    stored = [entry for shard in Checkpoint.open(folder).shards for entry in shard.tensors.values()]
    entries = [entry for entry in stored if not spare.fullmatch(entry.name)]
    return sum(_entry_bytes(entry, config, dtype, backend) for entry in entries) + _tied_bytes(
        entries, config, dtype, backend
    )


def _entry_bytes(entry: TensorEntry, config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    count = math.prod(entry.shape)
    if entry.name.endswith("kv_b_proj.weight_scale_inv"):
        return 0
    if entry.name.endswith("kv_b_proj.weight"):
        c = config
        keys = backend.packed_bytes(c.kv_lora_rank, c.qk_nope_head_dim, dtype)
        return c.num_heads * (keys + backend.packed_bytes(c.v_head_dim, c.kv_lora_rank, dtype))
    if entry.name.endswith("_scale_inv"):
        return 4 * count
    stored = dtype if entry.dtype in _FLOATS else torch.float8_e4m3fn
    # Sums are float32, and packed weights keep what is added to them in that form.
    if _KEPT_FLOAT32.search(entry.name) or (backend.copies and entry.name.endswith(".bias")):
        stored = torch.float32
    if len(entry.shape) < 2 or entry.name.endswith("embed_tokens.weight"):
        return stored.itemsize * count
    *stack, out_size, in_size = entry.shape
    if entry.name.endswith("experts.gate_up_proj"):
        stack, out_size = [*stack, 2], out_size // 2
    return math.prod(stack) * backend.packed_bytes(out_size, in_size, stored)


def _tied_bytes(entries: list[TensorEntry], config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """A tied head's own packed copy: none where the backend multiplies with the embedding itself."""
    if not backend.copies or any(entry.name == "lm_head.weight" for entry in entries):
        return 0
    return backend.packed_bytes(config.vocab_size, config.hidden_size, dtype)


def _spare(config: ModelConfig, *, mtp: bool) -> list[str]:
    """Patterns of stored tensors that are not loaded: indexers of shared layers, and draft layers unless `mtp`."""
    drafts = 0 if mtp else config.num_mtp_layers
    return _spare_indexers(config) + [rf"model\.layers\.{config.num_layers + i}\..*" for i in range(drafts)]


def _spare_indexers(config: ModelConfig) -> list[str]:
    """Sharing may be asked of a model that was trained without it, so the indexers of shared layers are no mismatch."""
    types = config.indexer.types if config.indexer else ()
    return [rf"model\.layers\.{i}\.self_attn\.indexer\..*" for i, kind in enumerate(types) if kind == "shared"]


class _Loader:
    """Names and shapes of the family's parameters, read one by one."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, backend: Backend) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.backend = backend

    def model(self, *, mtp: bool) -> ModelWeights:
        c = self.config
        if mtp:
            self.check_mtp()
        embed = self.plain("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        lm_head = self.lm_head(embed)
        layers = tuple(self.layer(i, is_moe=c.moe_layers[i], has_indexer=self.is_full(i)) for i in range(c.num_layers))
        norm = self.plain("model.norm.weight", c.hidden_size)
        return ModelWeights(embed, layers, norm, lm_head, self.mtp(embed, lm_head) if mtp else None)

    def is_full(self, layer: int) -> bool:
        indexer = self.config.indexer
        return indexer is not None and indexer.types[layer] == "full"

    def lm_head(self, embed: Tensor) -> Linear:
        """The stored head; `embed` where the config ties them and none is stored."""
        c, name = self.config, "lm_head.weight"
        tied = StoredLinear(embed)
        if name not in self.checkpoint:
            if not c.tie_word_embeddings:
                raise ModelError(
                    f"{self.checkpoint.folder}: tensor {name} is missing and tie_word_embeddings is false; "
                    "the checkpoint is incomplete, or its config.json is wrong"
                )
            return self.backend.pack(tied)
        head = self.stored("lm_head", c.vocab_size, c.hidden_size)
        if c.tie_word_embeddings and head.scale is None and torch.equal(head.weight, embed):
            head = tied
        elif c.tie_word_embeddings:
            logger.warning(
                "%s: tie_word_embeddings is true but the stored lm_head.weight differs from the embedding; "
                "the stored head is used",
                self.checkpoint.entry(name).file,
            )
        packed = self.backend.pack(head)
        self.copied(name)
        return packed

    def layer(self, index: int, *, is_moe: bool, has_indexer: bool) -> LayerWeights:
        c, prefix = self.config, f"model.layers.{index}"
        return LayerWeights(
            input_norm=self.plain(f"{prefix}.input_layernorm.weight", c.hidden_size),
            attention=self.attention(f"{prefix}.self_attn", has_indexer=has_indexer),
            post_attention_norm=self.plain(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
            mlp=self.moe(f"{prefix}.mlp")
            if is_moe
            else self.mlp(f"{prefix}.mlp", c.intermediate_size, bias=c.mlp_bias),
        )

    def attention(self, prefix: str, *, has_indexer: bool) -> AttentionWeights:
        c = self.config
        q_size = c.num_heads * c.qk_head_dim
        q_a, q_a_norm = None, None
        if c.q_lora_rank is None:
            q_b = self.linear(f"{prefix}.q_proj", q_size, c.hidden_size)
        else:
            q_a = self.linear(f"{prefix}.q_a_proj", c.q_lora_rank, c.hidden_size, bias=c.attention_bias)
            q_a_norm = self.plain(f"{prefix}.q_a_layernorm.weight", c.q_lora_rank)
            q_b = self.linear(f"{prefix}.q_b_proj", q_size, c.q_lora_rank)
        kv_a_size = c.kv_lora_rank + c.qk_rope_head_dim
        up_key, up_value = self.up_projections(f"{prefix}.kv_b_proj")
        return AttentionWeights(
            q_a=q_a,
            q_a_norm=q_a_norm,
            q_b=q_b,
            kv_a=self.linear(f"{prefix}.kv_a_proj_with_mqa", kv_a_size, c.hidden_size, bias=c.attention_bias),
            kv_a_norm=self.plain(f"{prefix}.kv_a_layernorm.weight", c.kv_lora_rank),
            up_key=up_key,
            up_value=up_value,
            o=self.linear(f"{prefix}.o_proj", c.hidden_size, c.num_heads * c.v_head_dim, bias=c.attention_bias),
            indexer=self.indexer(f"{prefix}.indexer") if has_indexer else None,
        )

    def up_projections(self, name: str) -> tuple[Heads, Heads]:
        """kv_b's two halves, a matrix a head: keys [H, N, R] and values [H, R, V]; fp8 is dequantised."""
        c = self.config
        stored = self.stored(name, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        weight = stored.weight if stored.scale is None else stored.rows(0, stored.out_size).to(self.dtype)
        per_head = weight.view(c.num_heads, -1, c.kv_lora_rank)
        keys_HNR, values_HVR = torch.split(per_head, [c.qk_nope_head_dim, c.v_head_dim], 1)
        heads = self.backend.pack_heads(keys_HNR), self.backend.pack_heads(values_HVR.transpose(1, 2))
        self.copied(f"{name}.weight")
        return heads

    def indexer(self, prefix: str) -> IndexerWeights:
        c, i = self.config, self.config.indexer
        if i is None or c.q_lora_rank is None:
            raise ModelError(f"{prefix}: config.json describes no indexer")
        return IndexerWeights(
            wq_b=self.linear(f"{prefix}.wq_b", i.num_heads * i.head_dim, c.q_lora_rank),
            wk=self.linear(f"{prefix}.wk", i.head_dim, c.hidden_size),
            k_norm_weight=self.plain(f"{prefix}.k_norm.weight", i.head_dim, dtype=torch.float32),
            k_norm_bias=self.plain(f"{prefix}.k_norm.bias", i.head_dim, dtype=torch.float32),
            weights_proj=self.kept_float32(f"{prefix}.weights_proj.weight", i.num_heads, c.hidden_size),
        )

    def mlp(self, prefix: str, intermediate: int, *, bias: bool = False) -> Mlp:
        hidden = self.config.hidden_size
        gate, up, down = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        packed = self.backend.pack_mlp(
            StoredMlp(
                gate=self.stored(gate, intermediate, hidden, bias=bias),
                up=self.stored(up, intermediate, hidden, bias=bias),
                down=self.stored(down, hidden, intermediate, bias=bias),
            )
        )
        self.copied(*(f"{name}.weight" for name in (gate, up, down)))
        return packed

    def moe(self, prefix: str) -> MoeWeights:
        c, moe = self.config, self.config.moe
        if moe is None:
            raise ModelError(f"{prefix}: config.json describes no experts")
        size, bias = moe.moe_intermediate_size, f"{prefix}.gate.e_score_correction_bias"
        if f"{prefix}.experts.gate_up_proj" in self.checkpoint:
            experts = self.fused_experts(f"{prefix}.experts", moe.num_experts, size)
        else:
            experts = tuple(self.mlp(f"{prefix}.experts.{e}", size) for e in range(moe.num_experts))
        return MoeWeights(
            router=self.kept_float32(f"{prefix}.gate.weight", moe.num_experts, c.hidden_size),
            bias=self.plain(bias, moe.num_experts, dtype=torch.float32) if moe.has_correction_bias else None,
            experts=experts,
            shared=self.mlp(f"{prefix}.shared_experts", size * moe.num_shared_experts, bias=c.mlp_bias)
            if moe.num_shared_experts
            else None,
        )

    def fused_experts(self, prefix: str, num_experts: int, size: int) -> tuple[Mlp, ...]:
        """Experts stored as two stacks, gate above up in the first: each expert gets views of them."""
        hidden = self.config.hidden_size
        for name in ("gate_up_proj", "down_proj"):
            if self.checkpoint.entry(f"{prefix}.{name}").dtype not in _FLOATS:
                raise self.wrong_dtype(f"{prefix}.{name}", "stacked experts must be float32, float16 or bfloat16")
        gate_up = self.checkpoint.take(f"{prefix}.gate_up_proj", (num_experts, 2 * size, hidden))
        down = self.checkpoint.take(f"{prefix}.down_proj", (num_experts, hidden, size))
        experts = tuple(
            self.backend.pack_mlp(
                StoredMlp(
                    gate=StoredLinear(gate_up[e, :size].to(self.dtype)),
                    up=StoredLinear(gate_up[e, size:].to(self.dtype)),
                    down=StoredLinear(down[e].to(self.dtype)),
                )
            )
            for e in range(num_experts)
        )
        self.copied(f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
        return experts

    def check_mtp(self) -> None:
        """A checkpoint may have been published without its draft layer: better to say so before much is read."""
        name = f"model.layers.{self.config.num_layers}.eh_proj.weight"
        if name not in self.checkpoint:
            raise ModelError(
                f"{self.checkpoint.folder}: config.json announces a draft layer, but none is stored ({name} is "
                "missing); drop --speculative-config, or take a checkpoint that has one"
            )

    def mtp(self, embed: Tensor, lm_head: Linear) -> MtpWeights:
        """The draft layer behind the last one."""
        c, prefix = self.config, f"model.layers.{self.config.num_layers}"
        own_embed, own_head = f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head"
        return MtpWeights(
            embed=self.plain(own_embed, c.vocab_size, c.hidden_size) if own_embed in self.checkpoint else embed,
            enorm=self.plain(f"{prefix}.enorm.weight", c.hidden_size),
            hnorm=self.plain(f"{prefix}.hnorm.weight", c.hidden_size),
            eh_proj=self.linear(f"{prefix}.eh_proj", c.hidden_size, 2 * c.hidden_size),
            layer=self.layer(c.num_layers, is_moe=c.moe is not None, has_indexer=c.indexer is not None),
            head_norm=self.plain(f"{prefix}.shared_head.norm.weight", c.hidden_size),
            head=self.linear(own_head, c.vocab_size, c.hidden_size)
            if f"{own_head}.weight" in self.checkpoint
            else lm_head,
        )

    def plain(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that is never quantised, in `dtype` (default: the model's)."""
        if self.checkpoint.entry(name).dtype not in _FLOATS:
            raise self.wrong_dtype(name, "expected float32, float16 or bfloat16")
        stored = self.checkpoint.take(name, shape)
        converted = stored.to(dtype or self.dtype)
        if converted.dtype != stored.dtype:
            self.checkpoint.release(name)
        return converted

    def kept_float32(self, name: str, out_size: int, in_size: int) -> Linear:
        """A weight whose products stay in float32, whatever the model's dtype."""
        packed = self.backend.pack(StoredLinear(self.plain(name, out_size, in_size, dtype=torch.float32)))
        self.copied(name)
        return packed

    def linear(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Linear:
        """`name`.weight [out, in] with its bias, in the backend's form."""
        packed = self.backend.pack(self.stored(name, out_size, in_size, bias=bias))
        self.copied(f"{name}.weight")
        return packed

    def copied(self, *names: str) -> None:
        """Say that nothing reads these tensors' own memory any more."""
        if self.backend.copies:
            for name in names:
                self.checkpoint.release(name)

    def stored(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> StoredLinear:
        """`name`.weight with its bias and, where it is fp8, its block scales."""
        weight_name = f"{name}.weight"
        if self.checkpoint.entry(weight_name).dtype == "F8_E4M3":
            scale, block = self.block_scale(name, out_size, in_size)
            weight = self.checkpoint.take(weight_name, (out_size, in_size))
        else:
            scale, block = None, None
            weight = self.plain(weight_name, out_size, in_size)
        return StoredLinear(weight, self.plain(f"{name}.bias", out_size) if bias else None, scale, block)

    def block_scale(self, name: str, out_size: int, in_size: int) -> tuple[Tensor, tuple[int, int]]:
        """Float32 scales [ceil(out / block rows), ceil(in / block columns)] of an fp8 weight, and the block."""
        quant, scale_name = self.config.quant, f"{name}.weight_scale_inv"
        if quant is None:
            raise self.wrong_dtype(f"{name}.weight", "config.json has no quantization_config that says how to read it")
        if _names_module(quant.modules_to_not_convert, name):
            raise self.wrong_dtype(f"{name}.weight", "modules_to_not_convert says that it is not quantised")
        if scale_name not in self.checkpoint:
            file = self.checkpoint.entry(f"{name}.weight").file
            raise ModelError(f"{file}: fp8 tensor {name}.weight has no scale; tensor {scale_name} is missing")
        if self.checkpoint.entry(scale_name).dtype not in _SCALES:
            raise self.wrong_dtype(scale_name, "scales must be float32, bfloat16 or e8m0")
        rows, columns = quant.block
        scale = self.checkpoint.take(scale_name, (-(-out_size // rows), -(-in_size // columns)))
        return scale.to(torch.float32), quant.block

    def wrong_dtype(self, name: str, problem: str) -> ModelError:
        entry = self.checkpoint.entry(name)
        return ModelError(f"{entry.file}: tensor {name} is stored as {entry.dtype}: {problem}")


def _names_module(patterns: tuple[str, ...], module: str) -> bool:
    """Whether a pattern is `module`, one of the modules around it, or a run of dotted parts within its name."""
    return any(re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", module) for pattern in patterns)
