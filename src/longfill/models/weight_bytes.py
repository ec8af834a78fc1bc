"""How many bytes a checkpoint's weights take on a rank, from the files' headers alone.

May import torch, the config, the checkpoint and the loader's rules. Invariant: the sum is what `load_model` then holds.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from longfill.kernels.backend import Backend
from longfill.kernels.interface import StoredLinear
from longfill.kernels.shards import shard_columns, shard_rows
from longfill.models.checkpoint import Checkpoint, TensorEntry
from longfill.models.config import ModelConfig
from longfill.models.loading import FLOATS, KEPT_FLOAT32, spare_tensors
from longfill.models.shards import WHOLE, WeightShards

_SPLIT_OUTPUTS = re.compile(r"(\.(q_proj|q_b_proj|shared_head\.head)|^lm_head)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_INNER_OUTPUTS = (".gate_proj", ".up_proj")


def weight_bytes(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, mtp: bool = False,
    shards: WeightShards = WHOLE,
) -> int:  # fmt: skip
    """Bytes that this rank's part of the weights of `folder` takes once loaded in `dtype`.

    fp8 weights stay as stored, with float32 scales, but for kv_b, which is kept dequantised for the absorbed form.
    Indexers of layers that share another's selection are not loaded, nor are draft layers unless `mtp`.
    """
    spare = re.compile("|".join(spare_tensors(config, mtp=mtp)) or "(?!)")
    stored = [entry for shard in Checkpoint.open(folder).shards for entry in shard.tensors.values()]
    entries = {entry.name: entry for entry in stored if not spare.fullmatch(entry.name)}
    sizes = _Sizes(config, dtype, backend, shards, entries)
    return sum(sizes.of(entry) for entry in entries.values()) + sizes.tied_head()


class _Sizes:
    """Bytes by tensor, for one rank. A weight counts with its bias and its scales."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, backend: Backend, shards: WeightShards,
        entries: dict[str, TensorEntry],
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.shards = shards
        self.entries = entries
        self._matrices = {
            name
            for name, entry in entries.items()
            if len(entry.shape) == 2 and name.endswith(".weight") and not name.endswith("embed_tokens.weight")
        }
        """Names of the weights that are packed, one by one."""

    def of(self, entry: TensorEntry) -> int:
        """What one stored tensor becomes."""
        name, module = entry.name, entry.name.removesuffix(".weight")
        dtype = torch.float32 if KEPT_FLOAT32.search(name) else self.dtype
        if name.endswith("_scale_inv") or (name.endswith(".bias") and f"{name[:-5]}.weight" in self._matrices):
            return 0
        if name.endswith("kv_b_proj.weight"):
            return self._up_projections()
        expert, held = _EXPERT.search(name), self.shards.experts(self._num_experts)
        if expert is not None and int(expert[1]) not in held:
            return 0
        if name.endswith("experts.gate_up_proj"):
            _, both, hidden = entry.shape
            part = self._parts("experts.gate_proj", _empty(both // 2, hidden, dtype))
            return 2 * len(held) * sum(map(self._packed, part))
        if name.endswith("experts.down_proj"):
            part = self._parts("experts.down_proj", _empty(entry.shape[1], entry.shape[2], dtype))
            return len(held) * sum(map(self._packed, part))
        if name not in self._matrices:
            return dtype.itemsize * math.prod(entry.shape)
        return sum(map(self._packed, self._parts(module, self._stored(entry, module, dtype))))

    def tied_head(self) -> int:
        """A tied head's own packed copy: none where the backend multiplies with the embedding itself."""
        if not self.backend.copies or "lm_head.weight" in self.entries:
            return 0
        rows = self.shards.outputs(self.config.vocab_size)
        return self.backend.packed_bytes(len(rows), self.config.hidden_size, self.dtype)

    @property
    def _num_experts(self) -> int:
        return 0 if self.config.moe is None else self.config.moe.num_experts

    def _stored(self, entry: TensorEntry, module: str, dtype: torch.dtype) -> StoredLinear:
        """A weight without its values."""
        out_size, in_size = entry.shape
        bias = self.entries.get(f"{module}.bias")
        # Sums are float32, and packed weights keep what is added to them in that form.
        bias_dtype = torch.float32 if self.backend.copies else dtype
        added = None if bias is None else torch.empty(out_size, dtype=bias_dtype, device="meta")
        if entry.dtype in FLOATS or self.config.quant is None:
            return StoredLinear(torch.empty(out_size, in_size, dtype=dtype, device="meta"), added)
        rows, columns = block = self.config.quant.block
        scale = torch.empty(-(-out_size // rows), -(-in_size // columns), device="meta")
        weight = torch.empty(out_size, in_size, dtype=torch.float8_e4m3fn, device="meta")
        return StoredLinear(weight, added, scale, block)

    def _parts(self, module: str, weight: StoredLinear) -> list[StoredLinear]:
        """What this rank packs of it."""
        shards, width = self.shards, self.config.v_head_dim
        if _SPLIT_OUTPUTS.search(module):
            own = shards.outputs(weight.out_size)
            return [shard_rows(weight, own.start, own.stop)]
        if module.endswith(".o_proj"):
            heads = [part for part in shards.slices(self.config.num_heads) if part]
            return [shard_columns(weight, part.start * width, part.stop * width) for part in heads]
        if shards.expert_parallel and "experts" in module:
            return [weight]
        if module.endswith(_INNER_OUTPUTS):
            return [shard_rows(weight, p.start, p.stop) for p in shards.slices(weight.out_size) if p]
        if module.endswith(".down_proj"):
            return [shard_columns(weight, p.start, p.stop) for p in shards.slices(weight.in_size) if p]
        return [weight]

    def _packed(self, weight: StoredLinear) -> int:
        added = sum(t.nbytes for t in (weight.bias, weight.scale) if t is not None)
        return self.backend.packed_bytes(weight.out_size, weight.in_size, weight.weight.dtype) + added

    def _up_projections(self) -> int:
        c, heads = self.config, len(self.shards.outputs(self.config.num_heads))
        keys = self.backend.packed_bytes(c.kv_lora_rank, c.qk_nope_head_dim, self.dtype)
        return heads * (keys + self.backend.packed_bytes(c.v_head_dim, c.kv_lora_rank, self.dtype))


def _empty(out_size: int, in_size: int, dtype: torch.dtype) -> StoredLinear:
    return StoredLinear(torch.empty(out_size, in_size, dtype=dtype, device="meta"))
