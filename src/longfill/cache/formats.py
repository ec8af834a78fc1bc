"""Bytes of one cached token: the latent row and the index key of a layer, by format name.

Imports errors and units only. Invariant: every row is a multiple of 4 bytes, so that the fp32 scales in a record can be
viewed in place.

R is the latent rank (`kv_lora_rank`), P the rotary dimension, D the indexer's head dimension.

| latent row   | bytes                      | content                                                            |
|--------------|----------------------------|--------------------------------------------------------------------|
| `float32`    | 4 (R + P)                  | latent, then rotary part                                           |
| `bfloat16`   | 2 (R + P)                  | the same                                                           |
| `fp8`        | R + P                      | e4m3; each part has one static scale a layer (`worker.pool`)       |
| `fp8_ds_mla` | R + 4 ceil(R / 128) + 2 P  | e4m3 latent, one fp32 scale per 128 values, bfloat16 rotary part   |

| index key | bytes | content                                                                                     |
|-----------|-------|---------------------------------------------------------------------------------------------|
| `fp8`     | D + 4 | e4m3 and one fp32 scale; planar in a page: the values of all its tokens, then all scales    |
| `float32` | 4 D   | plain values                                                                                |
"""

from __future__ import annotations

from longfill.errors import ConfigError
from longfill.units import SCALE_GROUP

LAYOUT_VERSION = 1
"""Version of the byte layout of a record; part of every prefix hash, so records of two layouts never mix."""

LATENT_FORMATS = ("float32", "bfloat16", "fp8", "fp8_ds_mla")
INDEX_FORMATS = ("float32", "fp8")

SCALE_BYTES = 4


def latent_row_bytes(format: str, kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of one token's latent row in one layer.

    Raises ConfigError for an unknown format, and for dimensions whose parts are no multiple of 4 bytes.
    """
    if format not in LATENT_FORMATS:
        raise ConfigError(f"--kv-cache-dtype: {format!r} is not one of {', '.join(LATENT_FORMATS)}")
    width = kv_lora_rank + rope_dim
    if format == "fp8_ds_mla":
        scales = SCALE_BYTES * -(-kv_lora_rank // SCALE_GROUP)
        segments = [kv_lora_rank, scales, 2 * rope_dim]
    else:
        segments = [width * {"float32": 4, "bfloat16": 2, "fp8": 1}[format]]
    if any(segment % SCALE_BYTES for segment in segments):
        raise ConfigError(
            f"--kv-cache-dtype {format}: with kv_lora_rank {kv_lora_rank} and rope_dim {rope_dim} the parts of a row "
            f"take {segments} bytes, which are not all multiples of {SCALE_BYTES}; use float32 for this model"
        )
    return sum(segments)


def index_value_bytes(format: str, index_head_dim: int) -> int:
    """Bytes of one index key's values, without its scale. Raises ConfigError like `latent_row_bytes`."""
    if format not in INDEX_FORMATS:
        raise ConfigError(f"--indexer-cache-dtype: {format!r} is not one of {', '.join(INDEX_FORMATS)}")
    values = index_head_dim * {"float32": 4, "fp8": 1}[format]
    if values % SCALE_BYTES:
        raise ConfigError(
            f"--indexer-cache-dtype {format}: an index key of index_head_dim {index_head_dim} takes {values} bytes, "
            f"which is not a multiple of {SCALE_BYTES}; use float32 for this model"
        )
    return values


def index_scale_bytes(format: str) -> int:
    """Bytes of one index key's scale: 4 for `fp8`, 0 for `float32`."""
    return SCALE_BYTES if format == "fp8" else 0
