"""The lightning indexer with its exact top-k fused: what `reference.indexer.index_topk` means, in native code.

May import torch and the extension. Invariant: a row's scores and selection are a function of that row, its keys and
the instruction set; chunks, threads and neighbours change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from longfill.errors import ConfigError
from longfill.kernels.cpu.extension import isa_names, selected_isa
from longfill.kernels.interface import IndexCache, IndexChunks, ScoredRows, ScreenCounts

SCREENED_ISAS = ("avx512_bf16",)
"""Instruction sets with an int8 screen."""


def index_topk(
    q_TID: Tensor,
    w_TI: Tensor,
    cache: IndexCache,
    chunks: IndexChunks,
    selection_TK: Tensor,
    *,
    num_threads: int,
    scores_TK: Tensor | None = None,
    isa: str | None = None,
    screen: str = "auto",
) -> ScreenCounts:
    """Write the selected positions of every scored row into `selection_TK` (int32 [T, K], in place).

    `q_TID`: fp32 [T, I, D], D a multiple of 16, for keys in format "fp8" with e4m3 values (exact in bf16); `w_TI`: fp32
    [T, I] head weights with all scales folded in; keys already include this step's rows. Positions ascend, -1 where
    fewer count. `scores_TK`, if given, receives the fp32 scores of the selected positions, -inf in the padding. `isa`
    overrides the process's instruction set.

    `screen` "on" first tests keys in int8 against a bound that no exact score exceeds and scores only what passes;
    "off" scores every key; "auto" screens where few keys pass, and nothing on an instruction set without a screen. The
    selection and its scores are the same bits in all three.

    Raises ConfigError for a screen that the instruction set or the keys' format lacks, ValueError for shapes, strides
    or pages that do not fit together.
    """
    # Imported here because an installation without a compiler has no extension.
    chosen = isa or selected_isa()
    check_screen(screen, chosen, cache.format)
    from longfill.kernels.cpu import _native

    pairs, screened, survivors = _native.index_topk(
        chosen,
        q_TID.contiguous(),
        w_TI.contiguous(),
        cache.values_NBX,
        cache.scales_NB,
        [
            (rows.first_row, rows.num_rows, rows.first_position, rows.visible_T, rows.request.pages)
            for rows in join_rows(rows for chunk in chunks for rows in chunk)
        ],
        selection_TK,
        scores_TK,
        screen,
        num_threads,
    )
    return ScreenCounts(pairs, screened, survivors)


def check_screen(screen: str, isa: str, index_format: str) -> None:
    """Raise ConfigError where `screen` insists on what the instruction set or the keys' format lacks."""
    if screen not in ("auto", "on", "off"):
        raise ConfigError(f"the indexer screen is auto, on or off, not {screen!r}")
    if screen == "on" and index_format != "fp8":
        raise ConfigError(f"--indexer-screen on: index keys in {index_format} have no screen; fp8 ones have")
    if screen == "on" and isa in isa_names() and isa not in SCREENED_ISAS:
        raise ConfigError(f"--indexer-screen on: instruction set {isa} has no screen ({', '.join(SCREENED_ISAS)} has)")


def join_rows(scored: Iterable[ScoredRows]) -> list[ScoredRows]:
    """The same rows in fewer pieces: neighbours of one request become one, so that they share unpacked keys.

    Chunks are cut to bound the scores that a backend writes down; this one writes none.
    """
    runs: list[list[ScoredRows]] = []
    for rows in scored:
        if rows.num_rows == 0:
            continue
        if runs and _continues(runs[-1][-1], rows):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    return [_joined(run) for run in runs]


def _continues(before: ScoredRows, rows: ScoredRows) -> bool:
    """Whether `rows` stand right behind `before`, and see on from where those ended."""
    if before.request is not rows.request or before.first_row + before.num_rows != rows.first_row:
        return False
    if before.visible_T is None or rows.visible_T is None:
        consecutive = before.visible_T is None and rows.visible_T is None
        return consecutive and before.first_position + before.num_rows == rows.first_position
    return bool(before.visible_T[-1] <= rows.visible_T[0])


def _joined(run: list[ScoredRows]) -> ScoredRows:
    if len(run) == 1:
        return run[0]
    counts = [rows.visible_T for rows in run if rows.visible_T is not None]
    visible_T = torch.cat(counts) if counts else None
    return replace(run[0], num_rows=sum(rows.num_rows for rows in run), visible_T=visible_T)


def merge_topk(
    scores_TN: Tensor, positions_TN: Tensor, selection_TK: Tensor, *, num_threads: int, isa: str | None = None
) -> None:
    """Write each row's exact top-k of its candidates into `selection_TK` (int32 [T, K], in place).

    `scores_TN` (fp32) and `positions_TN` (int32) hold the candidates of several shards side by side, as `index_topk`
    gave them for each shard. Negative positions and scores of NaN or -inf are none; ties go to the lower position;
    positions ascend, -1 where fewer count. Raises ValueError for shapes or strides that do not fit together.
    """
    chosen = isa or selected_isa()
    from longfill.kernels.cpu import _native

    _native.merge_topk(chosen, scores_TN, positions_TN, selection_TK, num_threads)


def merge_scratch_bytes(*, candidates: int, num_threads: int) -> int:
    """The most bytes that `merge_topk` allocates for rows of so many candidates."""
    from longfill.kernels.cpu import _native

    return _native.merge_topk_scratch_bytes(candidates, num_threads)


def scratch_bytes(
    *, heads: int, dim: int, topk: int, num_threads: int, isa: str | None = None, screen: str = "auto",
    index_format: str = "fp8",
) -> int:  # fmt: skip
    """The most bytes that `index_topk` allocates for itself, for any rows and any context."""
    chosen = isa or selected_isa()
    check_screen(screen, chosen, index_format)
    from longfill.kernels.cpu import _native

    return _native.index_topk_scratch_bytes(chosen, index_format == "fp8", heads, dim, topk, screen, num_threads)
