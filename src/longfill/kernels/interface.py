"""What a kernel backend takes and gives: tensors over the paged caches, and a step's rows.

May import torch and the integer plans of `partition/`. Invariant: a row's result depends on that row's inputs alone.

Shape suffixes: T tokens (rows) of the step · H heads · R latent rank · P rope dim · I indexer heads · D indexer dim ·
K top-k · N pages of the pool · B tokens of a page · L tokens of a context · C hidden size · E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RequestRows:
    """One request's rows in a step: rows `[first_row, first_row + query_len)`, its positions from `start` on unless
    `visible_T` says what each of them sees: then positions may have gaps, or the pages hold a share of the keys.
    """

    first_row: int
    query_len: int
    start: int
    """Tokens already in the cache before this step = position of the first row."""
    pages: Tensor
    """int64 [pages of the request]: its page table, covering at least `seq_len` tokens."""
    visible_T: Tensor | None = None
    """int64 [query_len], nondecreasing: row i sees the first `visible_T[i]` keys of the page table. None: all up to its
    own position, `start + i + 1`."""

    @property
    def seq_len(self) -> int:
        """Tokens of the page table that the last row sees, once this step's rows are stored."""
        if self.visible_T is None:
            return self.start + self.query_len
        return int(self.visible_T[-1]) if self.query_len else 0

    def visible(self, first: int, last: int) -> Tensor:
        """int64 [last - first]: keys that its rows [first, last) see, counted from its own first one."""
        return _visible(self.visible_T, self.start, first, last)

    def part(self, first: int, last: int, origin: int) -> RequestRows:
        """Its rows [first, last), counted from its own first one, in a step that begins at row `origin` of this one."""
        visible_T = None if self.visible_T is None else self.visible_T[first:last]
        return RequestRows(self.first_row + first - origin, last - first, self.start + first, self.pages, visible_T)


def _visible(visible_T: Tensor | None, first_position: int, first: int, last: int) -> Tensor:
    if visible_T is not None:
        return visible_T[first:last]
    return torch.arange(first_position + first + 1, first_position + last + 1)


@dataclass(frozen=True)
class LatentCache:
    """One layer's latent rows in every page of the pool, as bytes.

    `rows_NBX`: uint8 [N, B, row bytes], a strided view into the page records (page stride = record bytes, row stride =
    row bytes, last stride 1). `format`: "float32", "bfloat16", "fp8" or "fp8_ds_mla" (see `cache.formats`).
    """

    rows_NBX: Tensor
    format: str
    rank: int
    rope_dim: int
    scale: float
    """Static scale of the latent part in format "fp8": a power of two, from a bound on the normalised latent."""
    rope_scale: float
    """The same of the rotary part, from a bound on the projection that is rotated."""


@dataclass(frozen=True)
class IndexCache:
    """One full-indexer layer's index keys in every page of the pool, planar inside a page.

    `format` "fp8": `values_NBX` uint8 [N, B, D] holds e4m3 values and `scales_NB` float32 [N, B] a power-of-two scale
    per key. "float32": `values_NBX` uint8 [N, B, 4 D] holds float32 values and `scales_NB` is None.
    """

    values_NBX: Tensor
    scales_NB: Tensor | None
    format: str
    dim: int


@dataclass(frozen=True)
class ScoredRows:
    """A q-chunk of one request as the indexer takes it: rows of the step and the keys they may score.

    Row `first_row + i` scores the first `visible_T[i]` keys of the page table; without `visible_T` it sits at position
    `first_position + i` and scores keys `[0, position + 1)`.
    """

    request: RequestRows
    first_row: int
    num_rows: int
    first_position: int
    visible_T: Tensor | None = None
    """int64 [num_rows], nondecreasing; a row that sees no key selects nothing."""

    def visible(self, first: int, last: int) -> Tensor:
        """int64 [last - first]: keys that its rows [first, last) score, counted from its own first one."""
        return _visible(self.visible_T, self.first_position, first, last)


@dataclass(frozen=True)
class ScreenCounts:
    """(row, key) pairs of calls to `index_topk`, for statistics.

    Where a screen sets in depends on how the work is cut, so only `pairs` is the same for every number of threads and
    chunks; the selection is.
    """

    pairs: int = 0
    """Rows times the keys that each sees."""
    screened: int = 0
    """Of `pairs`, those tested in int8."""
    survivors: int = 0
    """Of `screened`, those scored exactly all the same."""

    def __add__(self, other: ScreenCounts) -> ScreenCounts:
        return ScreenCounts(self.pairs + other.pairs, self.screened + other.screened, self.survivors + other.survivors)


class Linear(Protocol):
    """A weight [O, C] with its bias, in the form that a backend multiplies with."""

    @property
    def out_size(self) -> int: ...
    @property
    def in_size(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...

    def rows(self, first: int, last: int) -> Tensor:
        """fp32 [last - first, C]: output rows as they count, scales applied."""
        ...


@dataclass(frozen=True)
class StoredLinear:
    """A weight as a checkpoint has it: y = x @ weight.T + bias.

    fp8: `weight` is e4m3 as stored, and the value of element (i, j) is weight[i, j] * scale[i // block[0],
    j // block[1]], with float32 scales.
    """

    weight: Tensor  # [O, C]
    bias: Tensor | None = None  # [O]
    scale: Tensor | None = None  # float32 [ceil(O / block[0]), ceil(C / block[1])]
    block: tuple[int, int] | None = None

    @property
    def out_size(self) -> int:
        return self.weight.shape[0]

    @property
    def in_size(self) -> int:
        return self.weight.shape[1]

    def rows(self, first: int, last: int) -> Tensor:
        """fp32 [last - first, C]: output rows as they count, scales applied."""
        values = self.weight[first:last].float()
        if self.scale is None or self.block is None:
            return values
        rows = torch.arange(first, last) // self.block[0]
        columns = torch.arange(self.in_size) // self.block[1]
        return values.mul_(self.scale[rows][:, columns])


@dataclass(frozen=True)
class StoredMlp:
    """Weights of one SwiGLU block as a checkpoint has them."""

    gate: StoredLinear  # [F, C]
    up: StoredLinear  # [F, C]
    down: StoredLinear  # [C, F]


class Heads(Protocol):
    """One matrix [A, B] a head, in the form that a backend multiplies with."""

    @property
    def num_heads(self) -> int: ...
    @property
    def in_size(self) -> int: ...
    @property
    def out_size(self) -> int: ...


class Mlp(Protocol):
    """Weights of one SwiGLU block: down(silu(gate x) * up x)."""

    @property
    def gate(self) -> Linear: ...
    @property
    def up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...


@dataclass(frozen=True)
class ExpertChoice:
    """How a router's scores become experts and weights."""

    scoring: str
    """"sigmoid" or "softmax"."""
    experts_per_token: int
    num_groups: int
    topk_groups: int
    group_value: str | None
    """What ranks a group: "top2" (sum of its two best), "max", or None where groups play no part."""
    normalise: bool
    scale: float


def pages_of(request: RequestRows, page_size: int) -> Tensor:
    """int64 [ceil(seq_len / page_size)]: exactly the pages that hold the request's context."""
    return request.pages[: -(-request.seq_len // page_size)]


IndexChunks = Sequence[Sequence[ScoredRows]]
"""The step's q-chunks in order; the rows of one chunk share one gather of keys."""


@dataclass(frozen=True)
class StepRows:
    """Rows of a step with what they attend to: the tensors and spans of a `partition.StepPlan`."""

    token_ids_T: Tensor
    positions_T: Tensor
    requests: tuple[RequestRows, ...]
    dense_rows: tuple[int, ...]
    """Of each request: leading rows whose causal range is no longer than top-k; they select everything."""
    index_chunks: IndexChunks
    workspace_chunks: tuple[tuple[int, ...], ...]
    """Requests (indices into `requests`) whose contexts are gathered together; the workspace path only."""

    @property
    def num_rows(self) -> int:
        return self.token_ids_T.shape[0]

    def blocks(self, block_rows: int) -> list[tuple[slice, StepRows]]:
        """The rows in pieces of at most `block_rows`, each with its place among these."""
        if self.num_rows <= block_rows:
            return [(slice(0, self.num_rows), self)]
        spans = [slice(i, min(i + block_rows, self.num_rows)) for i in range(0, self.num_rows, block_rows)]
        return [(span, self.part(span)) for span in spans]

    def part(self, span: slice) -> StepRows:
        """The rows of `span` alone. Where contexts are gathered, each request of it is gathered by itself."""
        requests: list[RequestRows] = []
        dense_rows: list[int] = []
        scored: list[int] = []
        for request, dense in zip(self.requests, self.dense_rows, strict=True):
            first = max(span.start - request.first_row, 0)
            last = min(span.stop - request.first_row, request.query_len)
            if first >= last:
                continue
            if last > dense:
                scored.append(len(requests))
            requests.append(request.part(first, last, span.start))
            dense_rows.append(min(max(dense - first, 0), last - first))
        chunks = [[part for rows in chunk for part in _scored_part(rows, span)] for chunk in self.index_chunks]
        return StepRows(
            token_ids_T=self.token_ids_T[span],
            positions_T=self.positions_T[span],
            requests=tuple(requests),
            dense_rows=tuple(dense_rows),
            index_chunks=[chunk for chunk in chunks if chunk],
            workspace_chunks=tuple((i,) for i in scored),
        )


def _scored_part(rows: ScoredRows, span: slice) -> list[ScoredRows]:
    first, last = max(rows.first_row, span.start), min(rows.first_row + rows.num_rows, span.stop)
    if first >= last:
        return []
    skipped = first - rows.first_row
    visible_T = None if rows.visible_T is None else rows.visible_T[skipped : skipped + last - first]
    return [ScoredRows(rows.request, first - span.start, last - first, rows.first_position + skipped, visible_T)]


@dataclass(frozen=True)
class LayerCaches:
    """The pool as each layer sees it."""

    latent: tuple[LatentCache, ...]
    index: dict[int, IndexCache]
    """By layer; full-indexer layers only."""
