"""The bounded workspaces of prefill: their rows, and which requests' contexts share the attention's gather.

May import errors and `partition.lengths`. Invariant: what is gathered together never exceeds the workspace.
"""

from __future__ import annotations

from longfill.errors import CapacityError
from longfill.partition.lengths import Lengths, as_lengths, positive

LONG_MODEL_LEN = 262_144
"""Beyond this context length (tokens) the default factor drops, so that the workspace does not outgrow the cache."""

LATENT_ROW_BYTES = 1152
"""A gathered latent row: 512 + 64 values of bf16."""

INDEX_ROW_BYTES = 132
"""A gathered index key: 128 values of fp8 and one fp32 scale."""


def prefill_workspace_rows(max_model_len: int, factor: int | None = None) -> int:
    """Latent rows of the gather workspace: `max_model_len * factor`.

    `factor` None takes 5 up to 262,144 tokens and 2 beyond. Raises ValueError unless both are at least 1: a
    workspace must hold one context of full length.
    """
    if factor is None:
        factor = 5 if max_model_len <= LONG_MODEL_LEN else 2
    return positive("max_model_len", max_model_len) * positive("factor", factor)


def indexer_workspace_rows(max_model_len: int, factor: int | None = None, *, compress_ratio: int = 1) -> int:
    """Index keys that the indexer's gather workspace holds.

    8 (1152 // 132) for each row of `prefill_workspace_rows`: about the same bytes. Models that store one key for
    `compress_ratio` tokens need that many times fewer.
    """
    rows = prefill_workspace_rows(max_model_len, factor) * (LATENT_ROW_BYTES // INDEX_ROW_BYTES)
    return rows // positive("compress_ratio", compress_ratio)


def workspace_chunks(seq_lens: Lengths, workspace_rows: int) -> list[range]:
    """Ranges of requests whose whole contexts are gathered together, packed in order; an exact fit fits.

    Raises CapacityError where one context alone is longer than the workspace: it is not cut, since a row's selected
    keys may lie anywhere in it.
    """
    lens = as_lengths("seq_lens", seq_lens).tolist()
    chunks: list[range] = []
    first, used = 0, 0
    for request, length in enumerate(lens):
        if length > workspace_rows:
            raise CapacityError(
                f"request {request} has a context of {length:,} tokens but the gather workspace holds "
                f"{workspace_rows:,} rows; raise the workspace factor or lower max_model_len"
            )
        if used + length > workspace_rows:
            chunks.append(range(first, request))
            first, used = request, 0
        used += length
    if lens:
        chunks.append(range(first, len(lens)))
    return chunks
