"""Fill `ModelWeights` from a checkpoint, strictly.

May import torch, the config and the checkpoint. Invariant: every parameter is filled exactly once with the right shape,
every stored tensor is used or skipped for a stated reason, and no weight exists twice: a tensor is a view of the mapped
file unless its dtype has to change, and then it is converted alone.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import Tensor

from longfill.errors import ModelError
from longfill.kernels.backend import Backend
from longfill.kernels.interface import Heads, Linear, Mlp, StoredLinear, StoredMlp
from longfill.kernels.shards import shard_columns, shard_rows
from longfill.models.checkpoint import Checkpoint
from longfill.models.config import ModelConfig, MoeConfig
from longfill.models.shards import WHOLE, WeightShards
from longfill.models.weights import (
    AttentionWeights,
    ExpertWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

logger = logging.getLogger(__name__)

FLOATS = ("F32", "F16", "BF16")
_SCALES = ("F32", "BF16", "F8_E8M0")
KEPT_FLOAT32 = re.compile(r"\.indexer\.(k_norm|weights_proj)\.|\.mlp\.gate\.")
"""Tensors that are float32 whatever the model's dtype."""
_ROTARY_BUFFERS = r".*\.rotary_emb\.inv_freq"
"""Old checkpoints store this derived table; the engine computes it from the config."""


def load_model(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, mtp: bool = False,
    shards: WeightShards = WHOLE,
) -> ModelWeights:  # fmt: skip
    """The weights of `folder`'s safetensors, in `dtype` but for fp8 weights (as stored) and what must be float32.

    `shards` says which parts of them this rank takes. `mtp`: with the draft layer behind the last one, of which the
    config announces one.

    Raises `ModelError` that names tensor, file and both shapes where the checkpoint and the config do not fit, for an
    fp8 weight without a fitting scale, and for a tensor that would be left unused. Left unused on purpose: draft layers
    that the config announces, without `mtp`, and, with a line in the log, indexer weights of layers that the config
    marks shared.
    """
    checkpoint = Checkpoint.open(folder)
    weights = _Loader(checkpoint, config, dtype, backend, shards).model(mtp=mtp)
    elsewhere = [rf".*\.experts\.{e}\..*" for e in _experts_elsewhere(config, shards)]
    skipped = checkpoint.finish((_ROTARY_BUFFERS, *spare_tensors(config, mtp=mtp), *elsewhere))
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


def spare_tensors(config: ModelConfig, *, mtp: bool) -> list[str]:
    """Patterns of stored tensors that are not loaded: indexers of shared layers, and draft layers unless `mtp`."""
    drafts = 0 if mtp else config.num_mtp_layers
    return _spare_indexers(config) + [rf"model\.layers\.{config.num_layers + i}\..*" for i in range(drafts)]


def _experts_elsewhere(config: ModelConfig, shards: WeightShards) -> list[int]:
    """Experts that other ranks hold."""
    if config.moe is None:
        return []
    own = shards.experts(config.moe.num_experts)
    return [e for e in range(config.moe.num_experts) if e not in own]


def _spare_indexers(config: ModelConfig) -> list[str]:
    """Sharing may be asked of a model that was trained without it, so the indexers of shared layers are no mismatch."""
    types = config.indexer.types if config.indexer else ()
    return [rf"model\.layers\.{i}\.self_attn\.indexer\..*" for i, kind in enumerate(types) if kind == "shared"]


class _Loader:
    """Names and shapes of the family's parameters, read one by one."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, backend: Backend, shards: WeightShards
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.shards = shards

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
            return self.backend.pack(self.own_rows(tied))
        head = self.stored("lm_head", c.vocab_size, c.hidden_size)
        if c.tie_word_embeddings and head.scale is None and torch.equal(head.weight, embed):
            head = tied
        elif c.tie_word_embeddings:
            logger.warning(
                "%s: tie_word_embeddings is true but the stored lm_head.weight differs from the embedding; "
                "the stored head is used",
                self.checkpoint.entry(name).file,
            )
        packed = self.backend.pack(self.own_rows(head))
        self.copied(name)
        return packed

    def own_rows(self, weight: StoredLinear) -> StoredLinear:
        """This rank's part of a column-parallel weight's outputs."""
        rows = self.shards.outputs(weight.out_size)
        return shard_rows(weight, rows.start, rows.stop)

    def layer(self, index: int, *, is_moe: bool, has_indexer: bool) -> LayerWeights:
        c, prefix = self.config, f"model.layers.{index}"
        return LayerWeights(
            input_norm=self.plain(f"{prefix}.input_layernorm.weight", c.hidden_size),
            attention=self.attention(f"{prefix}.self_attn", has_indexer=has_indexer),
            post_attention_norm=self.plain(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
            mlp=self.moe(f"{prefix}.mlp")
            if is_moe
            else self.mlp_slices(f"{prefix}.mlp", c.intermediate_size, bias=c.mlp_bias),
        )

    def attention(self, prefix: str, *, has_indexer: bool) -> AttentionWeights:
        c = self.config
        q_size = c.num_heads * c.qk_head_dim
        q_a, q_a_norm = None, None
        if c.q_lora_rank is None:
            q_b = self.split_outputs(f"{prefix}.q_proj", q_size, c.hidden_size)
        else:
            q_a = self.linear(f"{prefix}.q_a_proj", c.q_lora_rank, c.hidden_size, bias=c.attention_bias)
            q_a_norm = self.plain(f"{prefix}.q_a_layernorm.weight", c.q_lora_rank)
            q_b = self.split_outputs(f"{prefix}.q_b_proj", q_size, c.q_lora_rank)
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
            o=self.output_slices(f"{prefix}.o_proj"),
            indexer=self.indexer(f"{prefix}.indexer") if has_indexer else None,
        )

    def split_outputs(self, name: str, out_size: int, in_size: int) -> Linear:
        """`linear`, but of this rank's part of the outputs alone: query heads, the vocabulary."""
        packed = self.backend.pack(self.own_rows(self.stored(name, out_size, in_size)))
        self.copied(f"{name}.weight")
        return packed

    def output_slices(self, name: str) -> tuple[Linear | None, ...]:
        """The output projection of this rank's heads, in slices of whole heads."""
        c, width = self.config, self.config.v_head_dim
        stored = self.stored(name, c.hidden_size, c.num_heads * width, bias=c.attention_bias)
        packed = tuple(
            self.backend.pack(shard_columns(stored, heads.start * width, heads.stop * width)) if heads else None
            for heads in self.shards.slices(c.num_heads)
        )
        self.copied(f"{name}.weight")
        return packed

    def up_projections(self, name: str) -> tuple[Heads, Heads]:
        """kv_b's two halves, a matrix a head: keys [H, N, R] and values [H, R, V]; fp8 is dequantised."""
        c = self.config
        stored = self.stored(name, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        weight = stored.weight if stored.scale is None else stored.rows(0, stored.out_size).to(self.dtype)
        own = self.shards.outputs(c.num_heads)
        per_head = weight.view(c.num_heads, -1, c.kv_lora_rank)[own.start : own.stop]
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

    def mlp_slices(self, prefix: str, intermediate: int, *, bias: bool = False) -> tuple[Mlp | None, ...]:
        """An MLP in this rank's slices of its inner width."""
        return self.packed_slices(prefix, intermediate, self.shards.slices(intermediate), bias=bias)

    def packed_slices(
        self, prefix: str, intermediate: int, slices: list[range], *, bias: bool
    ) -> tuple[Mlp | None, ...]:
        hidden = self.config.hidden_size
        gate, up, down = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        stored = StoredMlp(
            gate=self.stored(gate, intermediate, hidden, bias=bias),
            up=self.stored(up, intermediate, hidden, bias=bias),
            down=self.stored(down, hidden, intermediate, bias=bias),
        )
        packed = tuple(self.packed_slice(stored, inner) for inner in slices)
        self.copied(*(f"{name}.weight" for name in (gate, up, down)))
        return packed

    def packed_slice(self, stored: StoredMlp, inner: range) -> Mlp | None:
        """One slice of an MLP's inner width."""
        if not inner:
            return None
        return self.backend.pack_mlp(
            StoredMlp(
                gate=shard_rows(stored.gate, inner.start, inner.stop),
                up=shard_rows(stored.up, inner.start, inner.stop),
                down=shard_columns(stored.down, inner.start, inner.stop),
            )
        )

    def moe(self, prefix: str) -> MoeWeights:
        c, moe = self.config, self.config.moe
        if moe is None:
            raise ModelError(f"{prefix}: config.json describes no experts")
        bias = f"{prefix}.gate.e_score_correction_bias"
        return MoeWeights(
            router=self.kept_float32(f"{prefix}.gate.weight", moe.num_experts, c.hidden_size),
            bias=self.plain(bias, moe.num_experts, dtype=torch.float32) if moe.has_correction_bias else None,
            slices=self.expert_slices(prefix, moe),
        )

    def expert_slices(self, prefix: str, moe: MoeConfig) -> tuple[ExpertWeights | None, ...]:
        """Slice by slice: the experts that this rank holds, and the shared one."""
        size, shared_size = moe.moe_intermediate_size, moe.moe_intermediate_size * moe.num_shared_experts
        whole = self.shards.expert_parallel
        slices = [range(size)] if whole else self.shards.slices(size)
        shared_slices = [range(shared_size)] if whole else self.shards.slices(shared_size)
        held = self.shards.experts(moe.num_experts)
        if f"{prefix}.experts.gate_up_proj" in self.checkpoint:
            experts = self.fused_experts(f"{prefix}.experts", moe.num_experts, size, held, slices)
        else:
            experts = [self.packed_slices(f"{prefix}.experts.{e}", size, slices, bias=False) for e in held]
        shared: tuple[Mlp | None, ...] = (None,) * len(slices)
        if moe.num_shared_experts:
            name = f"{prefix}.shared_experts"
            shared = self.packed_slices(name, shared_size, shared_slices, bias=self.config.mlp_bias)
        return tuple(self.expert_slice(experts, i, shared[i]) for i in range(len(slices)))

    def expert_slice(
        self, experts: list[tuple[Mlp | None, ...]], index: int, shared: Mlp | None
    ) -> ExpertWeights | None:
        own = tuple(mlp for slices in experts if (mlp := slices[index]) is not None)
        nothing = not own and shared is None and not self.shards.expert_parallel
        return None if nothing else ExpertWeights(own, shared)

    def fused_experts(
        self, prefix: str, num_experts: int, size: int, held: range, slices: list[range]
    ) -> list[tuple[Mlp | None, ...]]:
        """Experts stored as two stacks, gate above up in the first: each expert gets views of them."""
        hidden = self.config.hidden_size
        for name in ("gate_up_proj", "down_proj"):
            if self.checkpoint.entry(f"{prefix}.{name}").dtype not in FLOATS:
                raise self.wrong_dtype(f"{prefix}.{name}", "stacked experts must be float32, float16 or bfloat16")
        gate_up = self.checkpoint.take(f"{prefix}.gate_up_proj", (num_experts, 2 * size, hidden))
        down = self.checkpoint.take(f"{prefix}.down_proj", (num_experts, hidden, size))
        experts = []
        for e in held:
            stored = StoredMlp(
                gate=StoredLinear(gate_up[e, :size].to(self.dtype)),
                up=StoredLinear(gate_up[e, size:].to(self.dtype)),
                down=StoredLinear(down[e].to(self.dtype)),
            )
            experts.append(tuple(self.packed_slice(stored, inner) for inner in slices))
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
            layer=self.layer(c.num_layers, is_moe=c.moe_layers[-1], has_indexer=c.indexer is not None),
            head_norm=self.plain(f"{prefix}.shared_head.norm.weight", c.hidden_size),
            head=self.split_outputs(own_head, c.vocab_size, c.hidden_size)
            if f"{own_head}.weight" in self.checkpoint
            else lm_head,
        )

    def plain(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that is never quantised, in `dtype` (default: the model's)."""
        if self.checkpoint.entry(name).dtype not in FLOATS:
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
