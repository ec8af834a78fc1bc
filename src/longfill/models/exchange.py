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


class NewKeys:
    """Computes and stores a layer's new latent rows and index keys."""

    def __init__(self, config: ModelConfig, backend: Backend, caches: LayerCaches, group: Group) -> None:
        self._config = config
        self._backend = backend
        self._caches = caches
        self._group = group

    def start(
        self, layer: int, w: AttentionWeights, x_OC: Tensor, cos_OF: Tensor, sin_OF: Tensor, rows: RankRows
    ) -> Pending | None:
        """Store the rows held here, or with several ranks begin to send them; `finish` does the rest."""
        latent, index = self._caches.latent[layer], self._caches.index.get(layer) if w.indexer is not None else None
        if rows.order_K is None:
            self._write(w, x_OC, cos_OF, sin_OF, latent, index, rows.slots_K)
            return None
        count = x_OC.shape[0]
        own_latent, own_index = _staging(latent, count), None if index is None else _index_staging(index, count)
        self._write(w, x_OC, cos_OF, sin_OF, own_latent, own_index, torch.arange(count))
        return self._group.start_gather("new_keys", _message(own_latent, own_index, count), rows.held)

    def finish(self, layer: int, pending: Pending | None, rows: RankRows) -> None:
        """Store what has come from all ranks, as far as this one keeps it."""
        if pending is None:
            return
        assert rows.order_K is not None
        message_KM = pending.wait()[rows.order_K]
        latent, index = self._caches.latent[layer], self._caches.index.get(layer)
        width = latent.rows_NBX.shape[2]
        put_rows(latent.rows_NBX, rows.slots_K, message_KM[:, :width])
        if message_KM.shape[1] == width:
            return
        assert index is not None
        end = width + index.values_NBX.shape[2]
        put_rows(index.values_NBX, rows.slots_K, message_KM[:, width:end])
        if index.scales_NB is not None:
            page_size = index.scales_NB.shape[1]
            scales_K = message_KM[:, end:].contiguous().view(torch.float32)[:, 0]
            index.scales_NB[rows.slots_K // page_size, rows.slots_K % page_size] = scales_K

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


def put_rows(cache_NBX: Tensor, slots_K: Tensor, rows_KX: Tensor) -> None:
    """Write rows (uint8) into the pages of a strided view, four bytes at a time: rows are multiples of that."""
    words = cache_NBX.view(torch.int32)
    words[slots_K // words.shape[1], slots_K % words.shape[1]] = rows_KX.contiguous().view(torch.int32)


def _staging(cache: LatentCache, count: int) -> LatentCache:
    """One page of `count` rows in the cache's format."""
    return dataclasses.replace(
        cache, rows_NBX=torch.empty(1, max(count, 1), cache.rows_NBX.shape[2], dtype=torch.uint8)
    )


def _index_staging(cache: IndexCache, count: int) -> IndexCache:
    values = torch.empty(1, max(count, 1), cache.values_NBX.shape[2], dtype=torch.uint8)
    scales = None if cache.scales_NB is None else torch.empty(1, max(count, 1))
    return dataclasses.replace(cache, values_NBX=values, scales_NB=scales)


def _message(latent: LatentCache, index: IndexCache | None, count: int) -> Tensor:
    """uint8 [O, M]: latent row, index key and its scale side by side."""
    parts = [latent.rows_NBX[0, :count]]
    if index is not None:
        parts.append(index.values_NBX[0, :count])
        if index.scales_NB is not None:
            parts.append(index.scales_NB[0, :count, None].view(torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def message_bytes(latent: LatentCache, index: IndexCache | None) -> int:
    """M of a layer's messages."""
    size = latent.rows_NBX.shape[2]
    if index is not None:
        size += index.values_NBX.shape[2] + (0 if index.scales_NB is None else 4)
    return size
