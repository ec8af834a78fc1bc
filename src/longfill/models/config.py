"""config.json -> ModelConfig: what a model is, in the engine's own terms, whatever spelling the file uses.

Imports errors only, so a plan can be made without torch. Invariant: every field of the file is honoured or provably
inert (see `config_fields`); a feature that the engine does not compute is refused by name, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longfill.errors import ModelError
from longfill.models.config_fields import Raw, Reader, check_fields
from longfill.models.config_parts import (
    FAMILIES,
    Fp8BlockConfig,
    IndexerConfig,
    MoeConfig,
    RopeConfig,
    read_indexer,
    read_moe,
    read_moe_layers,
    read_quant,
    read_rope,
)

__all__ = ["FAMILIES", "Fp8BlockConfig", "IndexerConfig", "ModelConfig", "MoeConfig", "RopeConfig"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with multi-head latent attention; sizes in elements, `moe_layers` one flag per layer.

    A draft layer has experts where the last layer has them.
    """

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope_interleave: bool
    rope: RopeConfig
    moe_layers: tuple[bool, ...]
    moe: MoeConfig | None
    indexer: IndexerConfig | None
    quant: Fp8BlockConfig | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_mtp_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    """Weights' and activations' dtype as the file states it: "float32", "bfloat16" or "float16"."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def full_indexer_layers(self) -> tuple[int, ...]:
        """Layers that have an indexer of their own, in order."""
        if self.indexer is None:
            return ()
        return tuple(layer for layer, kind in enumerate(self.indexer.types) if kind == "full")

    @classmethod
    def from_folder(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read `path`/config.json, with `overrides` replacing its top-level fields (null removes one).

        Stop tokens of generation_config.json, where there is one, are added to the config's own.
        """
        folder = Path(path)
        raw = {**_read_json(folder / "config.json"), **(overrides or {})}
        generation = folder / "generation_config.json"
        extra_eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        raw["eos_token_id"] = list(dict.fromkeys([*_as_list(raw.get("eos_token_id")), *_as_list(extra_eos)])) or None
        return cls.from_dict(raw, source=str(folder / "config.json"))

    @classmethod
    def from_dict(cls, raw: Raw, source: str = "config.json") -> ModelConfig:
        """Raises `ModelError` for a family, field or value that is not honoured; the text names it and `source`."""
        f = Reader(raw, source)
        family = f.get("model_type")
        if family not in FAMILIES:
            raise f.error("model_type", f"is {family!r}; longfill runs {', '.join(FAMILIES)}")
        check_fields(raw, source)
        num_layers, num_heads = f.integer("num_hidden_layers"), f.integer("num_attention_heads")
        moe = read_moe(f, family)
        config = cls(
            model_type=family,
            architectures=f.strings("architectures"),
            vocab_size=f.integer("vocab_size"),
            hidden_size=f.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            q_lora_rank=_q_lora_rank(f),
            kv_lora_rank=f.integer("kv_lora_rank"),
            qk_nope_head_dim=f.integer("qk_nope_head_dim"),
            qk_rope_head_dim=f.integer("qk_rope_head_dim"),
            v_head_dim=f.integer("v_head_dim"),
            intermediate_size=f.integer("intermediate_size"),
            rms_norm_eps=f.number("rms_norm_eps"),
            attention_bias=f.boolean("attention_bias", default=False),
            mlp_bias=f.boolean("mlp_bias", default=False),
            rope_interleave=f.boolean("rope_interleave", default=True),
            rope=read_rope(f),
            moe_layers=read_moe_layers(f, num_layers) if moe else (False,) * num_layers,
            moe=moe,
            indexer=read_indexer(f, family, num_layers),
            quant=read_quant(f),
            tie_word_embeddings=f.boolean("tie_word_embeddings", default=False),
            max_position_embeddings=f.integer("max_position_embeddings"),
            num_mtp_layers=f.integer("num_nextn_predict_layers", "num_mtp_layers", low=0, default=0),
            bos_token_id=f.optional_integer("bos_token_id"),
            eos_token_ids=_eos(f),
            pad_token_id=f.optional_integer("pad_token_id"),
            dtype=_dtype(f),
        )
        _check_agreement(f, config)
        return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model folder holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold one JSON object")
    return raw


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _eos(f: Reader) -> tuple[int, ...]:
    ids = _as_list(f.get("eos_token_id"))
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise f.error("eos_token_id", f"must be a token id or a list of them, got {ids!r}")
    return tuple(ids)


def _dtype(f: Reader) -> str:
    value = f.get("dtype", "torch_dtype")
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        problem = "is missing" if value is None else f"is {value!r}; longfill computes in {', '.join(_DTYPES)}"
        raise f.error("dtype", f'{problem}. Set it with hf_overrides {{"dtype": "bfloat16"}}')
    return name


def _q_lora_rank(f: Reader) -> int | None:
    if "q_lora_rank" not in f.raw:
        raise f.error("q_lora_rank", "is missing; write null for a model that projects queries directly")
    return f.optional_integer("q_lora_rank", low=1)


def _check_agreement(f: Reader, config: ModelConfig) -> None:
    """Fields that repeat others must agree with them."""
    repeated = {"num_key_value_heads": config.num_heads, "qk_head_dim": config.qk_head_dim}
    for name, want in repeated.items():
        if f.get(name) not in (None, want):
            raise f.error(name, f"is {f.get(name)!r}, the other fields say {want}")
    dsa = config.indexer is not None
    kinds = {"indexed_attention", "deepseek_sparse_attention"} if dsa else {"full_attention"}
    types = f.strings("layer_types")
    if types and (len(types) != config.num_layers or set(types) - kinds):
        raise f.error("layer_types", f"must hold {config.num_layers} times {' or '.join(sorted(kinds))}")
    if config.mlp_bias and config.model_type != "deepseek_v2":
        raise f.error("mlp_bias", f"is true, which {config.model_type} does not use")
