"""Where everything lies inside a page's record: one contiguous range of bytes for all layers and both caches.

Imports units, errors and the row formats. Invariant: the segments of a record follow each other without gap or
overlap, each a multiple of 4 bytes: [layers x tokens x latent row | full layers x (index values | index scales)].
"""

from __future__ import annotations

from dataclasses import dataclass

from longfill.cache.formats import index_scale_bytes, index_value_bytes, latent_row_bytes
from longfill.errors import ConfigError
from longfill.units import Bytes, NumPages, PageSize


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Byte offsets inside one page's record, and its size.

    `full_layers` are the layers that own an indexer, ascending; empty for models without one, whose `index_format`
    may be None. Raises ConfigError for unknown formats, layers out of range and dimensions that break the 4-byte
    alignment. All offsets are plain Python ints: a pool may be far larger than 4 GiB.
    """

    page_size: PageSize
    num_layers: int
    full_layers: tuple[int, ...]
    latent_format: str
    index_format: str | None
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int

    def __post_init__(self) -> None:
        for name in ("page_size", "num_layers", "kv_lora_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"record layout: {name} must be at least 1, got {getattr(self, name)}")
        if self.rope_dim < 0:
            raise ConfigError(f"record layout: rope_dim must not be negative, got {self.rope_dim}")
        layers = self.full_layers
        if sorted(set(layers)) != list(layers) or (layers and not 0 <= layers[0] <= layers[-1] < self.num_layers):
            raise ConfigError(f"record layout: full_layers {layers} must ascend within 0..{self.num_layers - 1}")
        if layers and self.index_format is None:
            raise ConfigError(f"record layout: layers {layers} have an indexer, so index_format must be given")
        if layers and self.index_head_dim < 1:
            raise ConfigError(f"record layout: index_head_dim must be at least 1, got {self.index_head_dim}")
        _ = self.latent_row_bytes, self._index_value_bytes  # refuse bad formats now, not at the first use

    @property
    def latent_row_bytes(self) -> int:
        """Bytes of one token's latent row in one layer."""
        return latent_row_bytes(self.latent_format, self.kv_lora_rank, self.rope_dim)

    @property
    def bytes_per_token(self) -> Bytes:
        """Bytes of one token in all layers and both caches."""
        index_key = self._index_value_bytes + self._index_scale_bytes
        return Bytes(self.num_layers * self.latent_row_bytes + len(self.full_layers) * index_key)

    @property
    def record_bytes(self) -> Bytes:
        """Bytes of one page's record: the stride between pages of the pool."""
        return Bytes(self.page_size * self.bytes_per_token)

    def pool_bytes(self, num_pages: NumPages) -> Bytes:
        """Bytes of a pool of `num_pages` pages, the null page included."""
        return Bytes(num_pages * self.record_bytes)

    def latent_offset(self, layer: int) -> int:
        """Offset in a record of `layer`'s latent rows: page_size rows of `latent_row_bytes`."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"record layout: layer {layer} is not one of 0..{self.num_layers - 1}")
        return layer * self.page_size * self.latent_row_bytes

    def index_values_offset(self, layer: int) -> int:
        """Offset in a record of a full layer's index values: page_size keys back to back, without scales."""
        if layer not in self.full_layers:
            raise ConfigError(f"record layout: layer {layer} has no indexer; the full layers are {self.full_layers}")
        latent = self.num_layers * self.page_size * self.latent_row_bytes
        segment = self.page_size * (self._index_value_bytes + self._index_scale_bytes)
        return latent + self.full_layers.index(layer) * segment

    def index_scales_offset(self, layer: int) -> int:
        """Offset in a record of a full layer's fp32 index scales, page_size of them; only format `fp8` has any."""
        if self._index_scale_bytes == 0:
            raise ConfigError(f"record layout: index format {self.index_format} has no scales")
        return self.index_values_offset(layer) + self.page_size * self._index_value_bytes

    @property
    def _index_value_bytes(self) -> int:
        return (
            index_value_bytes(self.index_format, self.index_head_dim) if self.index_format and self.full_layers else 0
        )

    @property
    def _index_scale_bytes(self) -> int:
        return index_scale_bytes(self.index_format) if self.index_format and self.full_layers else 0
