"""How the indexer's scoring is cut so that a backend that writes its scores down stays inside two limits.

May import NumPy and `partition.lengths`. Invariant: every query row lies in exactly one chunk, in batch order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longfill.partition.lengths import (
    Int64Array,
    Lengths,
    as_lengths,
    as_query_and_seq_lens,
    positive,
    row_positions,
    row_starts,
)

BYTES_PER_SCORE = 4


@dataclass(frozen=True)
class IndexerChunk:
    """Query rows that are scored together, against the keys of their requests.

    `requests` are indices into the batch; `queries` counts rows from the first row of the chunk's first request.
    `gather` is False where the chunk before gathered the same keys, so they can be used as they lie.
    """

    requests: range
    queries: range
    gather: bool


def indexer_chunks(
    query_lens: Lengths,
    key_lens: Lengths,
    *,
    workspace_rows: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[IndexerChunk]:
    """Cut the scoring of a batch into chunks.

    Whole requests are packed first, in order, while their keys fit `workspace_rows` and the fp32 scores of all their
    rows against all their keys fit `max_logits_bytes` (equal fits). A request that breaks a limit by itself stands
    alone and is cut along its queries to keep the second limit; the first is not enforced for it, and a chunk has at
    least one query even where its scores are over the limit.

    `key_lens` are the keys of each request after this step (compressed, where keys are). `request_offset` is added to
    every index in `requests`: the number of requests that stand before these in the batch.

    Raises ValueError for negative lengths or lists of different length.
    """
    queries, keys = as_lengths("query_lens", query_lens).tolist(), as_lengths("key_lens", key_lens).tolist()
    if len(queries) != len(keys):
        raise ValueError(f"query_lens has {len(queries)} requests and key_lens {len(keys)}; give one of each a request")
    max_scores = max_logits_bytes // BYTES_PER_SCORE
    chunks: list[IndexerChunk] = []
    first = 0
    while first < len(queries):
        end, num_queries, num_keys = first + 1, queries[first], keys[first]
        while (
            end < len(queries)
            and num_keys + keys[end] <= workspace_rows
            and (num_queries + queries[end]) * (num_keys + keys[end]) <= max_scores
        ):
            num_queries += queries[end]
            num_keys += keys[end]
            end += 1
        rows = max(1, max_scores // num_keys if num_keys else num_queries)
        requests = range(first + request_offset, end + request_offset)
        chunks += [
            IndexerChunk(requests, range(row, min(row + rows, num_queries)), gather=row == 0)
            for row in range(0, num_queries, rows)
        ]
        first = end
    return chunks


def key_ranges(query_lens: Lengths, seq_lens: Lengths, *, compress_ratio: int = 1) -> Int64Array:
    """int64 [T, 2]: first key and one past the last key that each query row may score.

    Keys are counted in the chunk's packed order: the requests' keys one after another. A request of S tokens has
    `S // compress_ratio` keys; the row at position p sees the keys that its first p + 1 tokens complete, itself
    included. `seq_lens` counts tokens (not keys) after this step.

    Raises ValueError where a request has more queries than tokens.
    """
    positive("compress_ratio", compress_ratio)
    queries, seqs = as_query_and_seq_lens(query_lens, seq_lens)
    first_keys = np.repeat(row_starts(seqs // compress_ratio)[:-1], queries)
    visible = (row_positions(queries, seqs) + 1) // compress_ratio
    return np.stack([first_keys, first_keys + visible], axis=1)
