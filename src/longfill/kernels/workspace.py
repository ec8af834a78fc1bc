"""Reserved transient memory of the reference kernels: sized once, reused by every step.

May import torch. Invariant: the bytes reserved here are the bytes that the memory plan lists, and none depends on how
long a context has become.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_TILE = 256
"""Query rows that the reference takes at once."""
KEY_TILE = 2048
"""Index keys that are decoded and scored at once."""
KEY_STEP = 64
"""Scored keys are padded to a multiple of this: below about 16 columns the BLAS sums in other orders (measured)."""
SELECT_TILE = 2**21
"""Scores among which the top-k is selected at once."""
CONTEXT_TILE = 1024
"""Context rows that dense attention takes at once, counted from position 0."""
ATTENTION_TILE_BYTES = 8 * 2**20
"""Bytes of gathered fp32 latent rows, or of dense scores, that attention holds at once."""


def attention_tile_bytes(topk: int, width: int) -> int:
    """Bytes of gathered fp32 rows that sparse attention holds at once: a tile, or one query row's if those are more."""
    return max(ATTENTION_TILE_BYTES, topk * width * 4)


@dataclass(frozen=True)
class WorkspaceSizes:
    """What to reserve. `context_rows` > 0 only for the workspace attention path."""

    logits_bytes: int
    """At least one row over `max_model_len` keys: the one q-chunk that the partition cannot cut. 0: no scores kept."""
    context_rows: int
    context_row_bytes: int
    selection_rows: int
    topk: int

    @property
    def score_tile_bytes(self) -> int:
        return ROW_TILE * KEY_TILE * 4 if self.logits_bytes else 0

    @property
    def context_bytes(self) -> int:
        return self.context_rows * self.context_row_bytes

    @property
    def selection_bytes(self) -> int:
        return self.selection_rows * self.topk * 4


class Workspace:
    """The buffers themselves. Untouched parts cost address space only."""

    def __init__(self, sizes: WorkspaceSizes) -> None:
        self.sizes = sizes
        self._logits = torch.empty(sizes.logits_bytes // 4, dtype=torch.float32)
        self._tile = torch.empty(sizes.score_tile_bytes // 4, dtype=torch.float32)
        self._context = torch.empty(sizes.context_bytes, dtype=torch.uint8)
        self._selection = torch.empty(sizes.selection_bytes // 4, dtype=torch.int32)

    def logits(self, num_rows: int, num_keys: int) -> Tensor:
        """fp32 [rows, keys], uninitialised; the partition keeps it within the reserved bytes."""
        wanted = num_rows * num_keys
        if wanted > self._logits.numel():
            raise ValueError(f"q-chunk of {num_rows} rows x {num_keys} keys exceeds the reserved logits")
        return self._logits[:wanted].view(num_rows, num_keys)

    def score_tile(self, num_rows: int, num_keys: int) -> Tensor:
        """fp32 [rows, keys], uninitialised: one head's products."""
        return self._tile[: num_rows * num_keys].view(num_rows, num_keys)

    def context(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] of `dtype` for the gathered contexts of one workspace chunk."""
        size = num_rows * width * dtype.itemsize
        if size > self._context.numel():
            raise ValueError(f"workspace chunk of {num_rows} rows exceeds the reserved {self.sizes.context_rows}")
        return self._context[:size].view(dtype).view(num_rows, width)

    def selection(self, num_rows: int, topk: int) -> Tensor:
        """int32 [rows, K], uninitialised: the positions that each row of the step attends to."""
        return self._selection[: num_rows * topk].view(num_rows, topk)
