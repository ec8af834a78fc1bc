"""How a step's new keys reach every rank that keeps them.

May import kernels, `parallel` and models' rows. Invariant: a row's record is computed once, by the rank that holds the
row, and travels as the bytes that caches keep; so all copies are equal, and quantised ones are the smallest.

Suffixes: O rows that this rank holds · K rows that it stores · M bytes of a message's row.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import IndexCache, LatentCache, LayerCaches
from longfill.models.config import ModelConfig
from longfill.models.rows import RankRows
from longfill.models.weights import AttentionWeights
from longfill.parallel.group import Group, Pending


class Arriving:
    """New keys on their way. What needs none of them can be computed before `finish`."""

    def __init__(self, backend: Backend, parts: list[Tensor], rows: RankRows, pending: Pending | None) -> None:
        """`parts`: uint8 [N, B, X], the caches that a message's row holds a row of, side by side."""
        self._backend = backend
        self._parts = parts
        self._rows = rows
        self._pending = pending

    def finish(self) -> None:
        """Store what comes from all ranks, as far as this one keeps it; once, however often it is called."""
        if self._pending is None:
            return
        message_TM, self._pending = self._pending.wait(), None
        assert self._rows.order_K is not None
        first = 0
        for part_NBX in self._parts:
            end = first + part_NBX.shape[2]
            self._backend.put_rows(message_TM[:, first:end], self._rows.order_K, part_NBX, self._rows.slots_K)
            first = end


class NewKeys:
    """Computes and stores a layer's new latent rows and index keys."""

    def __init__(self, config: ModelConfig, backend: Backend, caches: LayerCaches, group: Group) -> None:
        self._config = config
        self._backend = backend
        self._caches = caches
        self._group = group

    def start(
        self, layer: int, w: AttentionWeights, x_OC: Tensor, cos_OF: Tensor, sin_OF: Tensor, rows: RankRows
    ) -> Arriving:
        """Store the rows held here, or with several ranks begin to send them; `finish` of the result does the rest."""
        latent, index = self._caches.latent[layer], self._caches.index.get(layer) if w.indexer is not None else None
        if rows.order_K is None:
            self._write(w, x_OC, cos_OF, sin_OF, latent, index, rows.slots_K)
            return Arriving(self._backend, [], rows, None)
        count = x_OC.shape[0]
        parts = _parts(latent, index)
        message_TM = torch.empty(sum(rows.held), sum(part.shape[2] for part in parts), dtype=torch.uint8)
        first = sum(rows.held[: self._group.rank])
        message_OM = message_TM[first : first + count]
        if count:
            self._write(w, x_OC, cos_OF, sin_OF, *_inside(message_OM, latent, index), torch.arange(count))
        pending = self._group.start_gather("new_keys", message_OM, rows.held, out=message_TM)
        return Arriving(self._backend, parts, rows, pending)

    def _write(
        self, w: AttentionWeights, x_OC: Tensor, cos_OF: Tensor, sin_OF: Tensor, latent: LatentCache,
        index: IndexCache | None, slots_O: Tensor,
    ) -> None:  # fmt: skip
        backend, config = self._backend, self._config
        backend.store_latent(
            backend.linear(x_OC, w.kv_a), w.kv_a_norm, config.rms_norm_eps, cos_OF, sin_OF, latent, slots_O,
            interleaved=config.rope_interleave,
        )  # fmt: skip
        if index is None:
            return
        assert w.indexer is not None
        assert config.indexer is not None
        backend.store_index_keys(
            backend.linear(x_OC, w.indexer.wk), (w.indexer.k_norm_weight, w.indexer.k_norm_bias), cos_OF, sin_OF,
            index, slots_O, interleaved=config.indexer.rope_interleave,
        )  # fmt: skip


def _parts(latent: LatentCache, index: IndexCache | None) -> list[Tensor]:
    """uint8 [N, B, X]: latent rows, index keys, and their scales where there are any: what a message's row holds."""
    if index is None:
        return [latent.rows_NBX]
    scales_NB = index.scales_NB
    scales = [] if scales_NB is None else [scales_NB[..., None].view(torch.uint8)]
    return [latent.rows_NBX, index.values_NBX, *scales]


def _inside(message_OM: Tensor, latent: LatentCache, index: IndexCache | None) -> tuple[LatentCache, IndexCache | None]:
    """Caches of one page that lie in a message, whose rows are latent row, index key and its scale side by side."""
    message_1OM, end = message_OM[None], latent.rows_NBX.shape[2]
    own_latent = dataclasses.replace(latent, rows_NBX=message_1OM[..., :end])
    if index is None:
        return own_latent, None
    first, end = end, end + index.values_NBX.shape[2]
    scales = None if index.scales_NB is None else message_1OM[..., end:].view(torch.float32)[..., 0]
    return own_latent, dataclasses.replace(index, values_NBX=message_1OM[..., first:end], scales_NB=scales)
