"""The blocks of a config: rotary embedding, experts, indexer, quantisation; each with the reader of its spellings.

Imports errors only. Invariant: a block that the engine would compute differently from its authors is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longfill.models.config_fields import Reader

DSA_FAMILIES = ("glm_moe_dsa", "deepseek_v32")
FAMILIES = (*DSA_FAMILIES, "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")

IndexerType = Literal["full", "shared"]
Scoring = Literal["sigmoid", "softmax"]
TopkMethod = Literal["noaux_tc", "greedy", "group_limited_greedy"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` values: "default", or "yarn" with its parameters (unused ones keep their default)."""

    dim: int
    theta: float
    type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts. `num_groups` 1 means no group limit; `num_shared_experts` 0 means no shared expert."""

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    num_groups: int
    topk_groups: int
    scoring: Scoring
    topk_method: TopkMethod
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def has_correction_bias(self) -> bool:
        """Whether the choice of experts adds a stored bias to the scores (`noaux_tc`)."""
        return self.topk_method == "noaux_tc"


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of sparse attention; `types[layer]`: it has one ("full") or reuses the last selection ("shared")."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool
    types: tuple[IndexerType, ...]


@dataclass(frozen=True)
class Fp8BlockConfig:
    """e4m3 weights with one scale per `block` = (rows, columns); activations stay in the model's dtype."""

    block: tuple[int, int]
    modules_to_not_convert: tuple[str, ...] = ()


def read_rope(f: Reader) -> RopeConfig:
    """One rotary embedding from either spelling: `rope_scaling` beside `rope_theta`, or all in `rope_parameters`."""
    blocks = {name: f.raw[name] for name in ("rope_parameters", "rope_scaling") if f.raw.get(name) is not None}
    if not all(isinstance(block, Mapping) for block in blocks.values()):
        raise f.error(" and ".join(blocks), "must be an object")
    block = Reader({k: v for b in blocks.values() for k, v in b.items()}, f"{f.source}: {' and '.join(blocks)}")
    for name, value in block.raw.items():
        if any(b.get(name, value) != value for b in blocks.values()):
            raise f.error(name, f"differs between {' and '.join(blocks)}; keep one")
    kind = block.get("rope_type", "type") or "default"
    if kind not in ("default", "yarn"):
        raise block.error("rope_type", f"is {kind!r}; longfill computes default and yarn")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "yarn":
        known |= {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        known |= {"attention_factor", "truncate"}
    unknown = sorted(name for name in set(block.raw) - known if block.raw[name] is not None)
    if unknown:
        raise block.error(", ".join(unknown), f"is not a parameter of rope_type {kind!r}")
    if block.get("partial_rotary_factor") not in (None, 1):
        raise block.error("partial_rotary_factor", "must be 1: rotary embeddings cover all of qk_rope_head_dim")
    thetas = Reader(
        {"rope_theta": f.get("rope_theta"), "rope_parameters.rope_theta": block.get("rope_theta")}, f.source
    )
    dim, theta = f.integer("qk_rope_head_dim"), thetas.number(*thetas.raw, above=1.0)
    if dim % 2:
        raise f.error("qk_rope_head_dim", f"must be even, got {dim}")
    if kind == "default":
        return RopeConfig(dim=dim, theta=theta)
    longest = f.integer("max_position_embeddings")
    original = f.optional_integer("original_max_position_embeddings", low=1) or block.integer(
        "original_max_position_embeddings", default=longest
    )
    return RopeConfig(
        dim=dim,
        theta=theta,
        type="yarn",
        factor=block.number("factor", default=longest / original),
        original_max_position_embeddings=original,
        beta_fast=block.number("beta_fast", default=32.0),
        beta_slow=block.number("beta_slow", default=1.0),
        mscale=block.optional_number("mscale", above=-1e-9),
        mscale_all_dim=block.optional_number("mscale_all_dim", above=-1e-9),
        attention_factor=block.optional_number("attention_factor"),
        truncate=block.boolean("truncate", default=True),
    )


def read_moe(f: Reader, family: str) -> MoeConfig | None:
    num_experts = f.integer("n_routed_experts", "num_experts", "num_local_experts", low=0, default=0)
    if num_experts == 0:
        return None
    softmax = family == "deepseek_v2"
    scoring: Scoring = f.get("scoring_func") or ("softmax" if softmax else "sigmoid")
    if scoring != ("softmax" if softmax else "sigmoid"):
        raise f.error("scoring_func", f"is {scoring!r}, which {family} does not use")
    method: TopkMethod = f.get("topk_method") or ("greedy" if softmax else "noaux_tc")
    methods = ("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)
    if method not in methods:
        raise f.error("topk_method", f"is {method!r}; {family} is run with {' or '.join(methods)}")
    limited = method != "greedy"
    groups = f.integer("n_group", default=1) if limited else 1
    topk_groups = f.integer("topk_group", default=1) if limited else 1
    per_token = f.integer("num_experts_per_tok")
    if num_experts % groups or topk_groups > groups or per_token > num_experts // groups * topk_groups:
        raise f.error(
            "num_experts_per_tok",
            f"{per_token} experts cannot be chosen from {topk_groups} of {groups} groups of {num_experts} experts",
        )
    if method == "noaux_tc" and groups > 1 and num_experts < 2 * groups:
        raise f.error("n_group", f"is {groups}, one expert a group, but noaux_tc adds a group's two best scores")
    norm = f.boolean("norm_topk_prob", default=False if softmax else None)
    if softmax and norm:
        # The published implementations disagree on whether normalised weights are also scaled.
        raise f.error("norm_topk_prob", "true is not defined for deepseek_v2")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        moe_intermediate_size=f.integer("moe_intermediate_size"),
        num_shared_experts=f.integer("n_shared_experts", low=0, default=0),
        num_groups=groups,
        topk_groups=topk_groups,
        scoring=scoring,
        topk_method=method,
        norm_topk_prob=norm,
        routed_scaling_factor=f.number("routed_scaling_factor"),
    )


def read_moe_layers(f: Reader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts. `mlp_layer_types` wins over `first_k_dense_replace`, as in transformers."""
    types = f.strings("mlp_layer_types")
    if types:
        if len(types) != num_layers or set(types) - {"dense", "sparse"}:
            raise f.error("mlp_layer_types", f'must hold {num_layers} times "dense" or "sparse"')
        return tuple(kind == "sparse" for kind in types)
    first, step = f.integer("first_k_dense_replace", low=0), f.integer("moe_layer_freq", default=1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


def read_indexer(f: Reader, family: str, num_layers: int) -> IndexerConfig | None:
    if family not in DSA_FAMILIES:
        named = [name for name in f.raw if name.startswith("index") and f.raw[name] not in (None, False)]
        if named:
            raise f.error(named[0], f"belongs to an indexer, and {family} has none")
        return None
    if f.get("q_lora_rank") is None:
        raise f.error("q_lora_rank", "is null, but the indexer reads the query latent")
    head_dim = f.integer("index_head_dim")
    if head_dim < f.integer("qk_rope_head_dim"):
        raise f.error("index_head_dim", f"is {head_dim}, less than qk_rope_head_dim")
    return IndexerConfig(
        num_heads=f.integer("index_n_heads"),
        head_dim=head_dim,
        topk=f.integer("index_topk"),
        rope_interleave=f.boolean("indexer_rope_interleave", default=family == "glm_moe_dsa"),
        types=_indexer_types(f, num_layers),
    )


def _indexer_types(f: Reader, num_layers: int) -> tuple[IndexerType, ...]:
    """Per layer "full" or "shared": a list, a pattern (past its end: full), or frequency and offset (else all full).

    Engines differ in which of them wins, so those that the file holds must agree.
    """
    found: dict[str, tuple[IndexerType, ...]] = {}
    for name in ("indexer_types", "index_topk_pattern"):
        if f.get(name) is not None:
            found[name] = _parse_types(f, name)
    if "index_topk_pattern" in found:
        full: IndexerType = "full"
        found["index_topk_pattern"] += (full,) * (num_layers - len(found["index_topk_pattern"]))
    if not found or f.get("index_topk_freq") is not None:
        freq, offset = f.integer("index_topk_freq", default=1), f.integer("index_skip_topk_offset", low=0, default=2)
        found["index_topk_freq"] = tuple(
            "full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(num_layers)
        )
    types = next(iter(found.values()))
    if any(other != types for other in found.values()):
        raise f.error(" and ".join(found), "describe different layers; set those that do not hold to null")
    if len(types) != num_layers:
        raise f.error(next(iter(found)), f"describes {len(types)} layers, the model has {num_layers}")
    if types[0] == "shared":
        raise f.error(next(iter(found)), "marks the first layer shared, but no layer before it has an indexer")
    return types


def _parse_types(f: Reader, name: str) -> tuple[IndexerType, ...]:
    listed = f.get(name)
    if not isinstance(listed, str | list | tuple):
        raise f.error(name, f"must be a list or a string of F and S, got {listed!r}")
    spellings: dict[Any, IndexerType] = {"F": "full", "full": "full", "S": "shared", "shared": "shared"}
    wrong = [item for item in listed if item not in spellings]
    if wrong:
        raise f.error(name, f"holds {wrong[0]!r}; a layer is full (F) or shared (S)")
    return tuple(spellings[item] for item in listed)


def read_quant(f: Reader) -> Fp8BlockConfig | None:
    raw = f.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise f.error("quantization_config", "must be an object")
    q = Reader(raw, f"{f.source}: quantization_config")
    only: dict[str, tuple[Any, ...]] = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "activation_scheme": ("dynamic", None),
        # The stored scales are read as they are; powers of two need nothing more.
        "scale_fmt": ("ue8m0", "float", None),
        "modules_to_convert": (None, []),
        "expert_dtype": ("fp8", None),
        "dequantize": (False, True, None),
    }
    for name, allowed in only.items():
        if raw.get(name) not in allowed:
            raise q.error(name, f"is {raw.get(name)!r}; only fp8 e4m3 weights with block scales are implemented")
    unknown = set(raw) - set(only) - {"weight_block_size", "modules_to_not_convert", "ignored_layers"}
    for name in sorted(unknown):
        if raw[name] is not None:
            raise q.error(name, "is not known to longfill and may change results")
    block = q.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise q.error("weight_block_size", f"must be two positive integers, got {block!r}")
    kept = dict.fromkeys((*q.strings("modules_to_not_convert"), *q.strings("ignored_layers")))
    return Fp8BlockConfig(block=(block[0], block[1]), modules_to_not_convert=tuple(kept))
