"""Contexts that nobody computes: pages filled with random records on all ranks, and published as a cached prefix.

May import the engine, kernels' formats and partition. Invariant: the record of a position is the same in every layout
of ranks, so that all of them continue the same context.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.errors import CapacityError, LongfillError
from longfill.kernels.interface import IndexCache, LatentCache
from longfill.kernels.reference.quant import encode_latent, quantise_index_keys
from longfill.kernels.reference.store import put_rows
from longfill.models.config import ModelConfig
from longfill.parallel import Mesh
from longfill.partition.dcp import dcp_local_position, dcp_owner
from longfill.request import Request, SamplingParams, TokenIds
from longfill.worker.worker import Worker

BLOCK_TOKENS = 4096
"""Records that are drawn at once."""


def filled_engine(args: EngineArgs, token_ids: TokenIds, seed: int) -> LLMEngine:
    """An engine that has the KV of `token_ids` (whole pages, or none) cached, as if it had computed it.

    The values are random, but valid and of usual size: what computes with them takes as long as with others. Raises
    CapacityError where the pool is too small.
    """
    if not token_ids.size:
        return LLMEngine(args)
    engine = LLMEngine(args, partial(_filled_worker, num_tokens=token_ids.size, seed=seed))
    try:
        _publish(engine, token_ids)
    except BaseException:
        engine.close()
        raise
    return engine


def _filled_worker(
    args: EngineArgs, folder: Path, config: ModelConfig, mesh: Mesh, *, num_tokens: int, seed: int
) -> Worker:
    worker = Worker(args, folder, config, mesh)
    pages = worker.memory.num_pages - 1  # but the null page
    if pages * worker.page_tokens < num_tokens:
        raise CapacityError(
            f"the pool has {pages:,} pages of {worker.page_tokens:,} tokens, too few for a context of {num_tokens:,}; "
            "raise --memory-budget"
        )
    _fill(worker, num_tokens, seed)
    return worker


@torch.inference_mode()
def _fill(worker: Worker, num_tokens: int, seed: int) -> None:
    """Write records for the first tokens of a sequence whose pages are 1, 2, 3..."""
    generator = torch.Generator().manual_seed(seed)
    ranks, interleave = worker.mesh.shape.dcp, worker.args.cp_kv_cache_interleave_size
    caches, page_size = worker.decoder.caches, worker.layout.page_size
    for first in range(0, num_tokens, BLOCK_TOKENS):
        positions = np.arange(first, min(first + BLOCK_TOKENS, num_tokens))
        own = np.flatnonzero(dcp_owner(positions, ranks=ranks, interleave=interleave) == worker.mesh.dcp.rank)
        local = dcp_local_position(positions[own], ranks=ranks, interleave=interleave)
        rows, slots = torch.from_numpy(own), torch.from_numpy(local + page_size)  # page 0 is the null page
        for latent in caches.latent:
            _put_latents(
                latent, torch.randn(positions.size, latent.rank + latent.rope_dim, generator=generator)[rows], slots
            )
        for layer in sorted(caches.index):
            keys = caches.index[layer]
            _put_index_keys(keys, torch.randn(positions.size, keys.dim, generator=generator)[rows], slots)


def _put_latents(cache: LatentCache, rows_KX: torch.Tensor, slots_K: torch.Tensor) -> None:
    latent, rope = rows_KX[:, : cache.rank], rows_KX[:, cache.rank :]
    _put(cache.rows_NBX, slots_K, encode_latent(latent, rope, cache.format, cache.scale, cache.rope_scale))


def _put_index_keys(cache: IndexCache, keys_KD: torch.Tensor, slots_K: torch.Tensor) -> None:
    if cache.scales_NB is None:
        _put(cache.values_NBX, slots_K, keys_KD.view(torch.uint8))
        return
    values, scales = quantise_index_keys(keys_KD)
    _put(cache.values_NBX, slots_K, values)
    page_size = cache.scales_NB.shape[1]
    cache.scales_NB[slots_K // page_size, slots_K % page_size] = scales


def _publish(engine: LLMEngine, token_ids: TokenIds) -> None:
    """Let the filled pages be found as the prefix of `token_ids`."""
    request = Request("filled", token_ids, SamplingParams(), arrival_time=0.0)
    allocated = engine.cache.allocate(request, token_ids.size)
    assert allocated, "the worker has checked that there are pages"
    pages = engine.cache.page_table(request.request_id)
    if not np.array_equal(pages, np.arange(1, pages.size + 1)):
        raise LongfillError("a new engine gives out pages in another order than 1, 2, 3...; please report this")
    engine.cache.publish(request, token_ids.size)
    engine.cache.free(request.request_id)


def _put(cache_NBX: torch.Tensor, slots_K: torch.Tensor, rows_KX: torch.Tensor) -> None:
    put_rows(rows_KX, torch.arange(rows_KX.shape[0]), cache_NBX, slots_K)
