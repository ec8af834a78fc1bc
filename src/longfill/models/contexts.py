"""Whole contexts of prompts whose rows are split over ranks and whose keys are too, brought together for one layer.

May import kernels, `parallel` and models' rows. Invariant: what is brought together are the bytes that the caches hold,
in the order of positions, so that rows attend to it as to a cache of one rank, with the same bits.

Each rank's share of a context comes as one run of rows, rank after rank; `order` maps positions into that.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from longfill.kernels.interface import IndexCache, LatentCache, RequestRows, StepRows
from longfill.models.rows import ContextRows
from longfill.parallel.group import Group
from longfill.partition.dcp import dcp_local_lens, dcp_local_position, dcp_owner


class Context:
    """One chunk of contexts in a step: where each rank's rows of it lie, the same in every layer."""

    def __init__(self, context: ContextRows, rows: StepRows, group: Group, *, interleave: int, page_size: int) -> None:
        """`rows` are those that attend to it, of which `context.requests` says whose they are."""
        self.span = context.rows
        self._group = group
        self._page_size = page_size
        lens = [
            dcp_local_lens(context.seq_lens, ranks=group.size, rank=rank, interleave=interleave)
            for rank in range(group.size)
        ]
        self._counts = [int(own.sum()) for own in lens]
        self._slots = torch.cat(
            [_slots(pages, int(n), page_size) for pages, n in zip(context.pages, lens[group.rank], strict=True)]
        )
        pages = [-(-length // page_size) for length in context.seq_lens]
        self._num_pages = sum(pages)
        order = torch.zeros(self._num_pages * page_size, dtype=torch.int64)
        tables, first_page = [], 0
        for request, length in enumerate(context.seq_lens):
            at = torch.arange(length)
            owner = dcp_owner(at.numpy(), ranks=group.size, interleave=interleave)
            local = dcp_local_position(at.numpy(), ranks=group.size, interleave=interleave)
            starts = torch.tensor(
                [sum(self._counts[:rank]) + int(lens[rank][:request].sum()) for rank in range(group.size)]
            )
            order[first_page * page_size + at] = starts[torch.from_numpy(owner)] + torch.from_numpy(local)
            tables.append(torch.arange(first_page, first_page + pages[request]))
            first_page += pages[request]
        self._order = order
        self.rows = _with_tables(rows, [tables[i] for i in context.requests])

    def latent(self, cache: LatentCache) -> LatentCache:
        """The layer's latent rows of the contexts, as a cache of their own."""
        return dataclasses.replace(cache, rows_NBX=self._gather("context_latents", cache.rows_NBX))

    def index(self, cache: IndexCache) -> IndexCache:
        """The layer's index keys likewise."""
        values = self._gather("context_index_keys", cache.values_NBX)
        if cache.scales_NB is None:
            return dataclasses.replace(cache, values_NBX=values)
        scales = self._gather("context_index_scales", cache.scales_NB[..., None])
        return dataclasses.replace(cache, values_NBX=values, scales_NB=scales[..., 0].contiguous())

    def _gather(self, what: str, pages_NBX: Tensor) -> Tensor:
        """[pages of the contexts, B, X] in the order of positions."""
        words = pages_NBX if pages_NBX.dtype == torch.float32 else pages_NBX.view(torch.int32)
        own = words[self._slots // self._page_size, self._slots % self._page_size]
        every = self._group.gather_rows(what, own, self._counts)
        ordered = every[self._order].view(self._num_pages, self._page_size, -1)
        return ordered if pages_NBX.dtype == torch.float32 else ordered.view(torch.uint8)


def _slots(pages: Tensor, count: int, page_size: int) -> Tensor:
    """int64 [count]: where the first rows of a page table lie."""
    at = torch.arange(count)
    return pages[at // page_size] * page_size + at % page_size


def _with_tables(rows: StepRows, tables: list[Tensor]) -> StepRows:
    """The same rows over other page tables, one for each of their runs."""
    by_old_table = {old.pages.data_ptr(): table for old, table in zip(rows.requests, tables, strict=True)}
    moved: dict[int, RequestRows] = {}

    def over(request: RequestRows) -> RequestRows:
        if id(request) not in moved:
            moved[id(request)] = dataclasses.replace(request, pages=by_old_table[request.pages.data_ptr()])
        return moved[id(request)]

    chunks = [[dataclasses.replace(part, request=over(part.request)) for part in c] for c in rows.index_chunks]
    return dataclasses.replace(rows, requests=tuple(over(r) for r in rows.requests), index_chunks=chunks)
