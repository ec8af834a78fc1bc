"""Lengths and row positions, checked once for every function of `partition/`.

May import NumPy only. Invariant: rows of a batch stand request after request, each request's rows by position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Lengths = Sequence[int] | Int64Array
"""One count per request, in batch order."""


def as_lengths(name: str, lengths: Lengths) -> Int64Array:
    """`lengths` as int64 [R]; raises ValueError, naming the request, where one is negative."""
    array = np.asarray(lengths, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; give one count per request")
    if array.size and array.min() < 0:
        request = int(array.argmin())
        raise ValueError(f"{name}[{request}] is {array[request]}; a length cannot be negative")
    return array


def as_query_and_seq_lens(query_lens: Lengths, seq_lens: Lengths) -> tuple[Int64Array, Int64Array]:
    """Both as int64 [R]; raises ValueError unless each request's queries are the tail of its sequence."""
    queries, seqs = as_lengths("query_lens", query_lens), as_lengths("seq_lens", seq_lens)
    if queries.size != seqs.size:
        raise ValueError(f"query_lens has {queries.size} requests and seq_lens {seqs.size}; give one of each a request")
    too_short = np.flatnonzero(queries > seqs)
    if too_short.size:
        request = int(too_short[0])
        raise ValueError(
            f"request {request} has {queries[request]} queries but a sequence of {seqs[request]} tokens; "
            "seq_lens counts the tokens after this step, its queries included"
        )
    return queries, seqs


def positive(name: str, value: int) -> int:
    """`value`; raises ValueError unless it is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def even_cuts(size: int, ranks: int) -> tuple[int, ...]:
    """[ranks + 1]: bounds of contiguous parts of almost equal size, from 0 to `size`."""
    return tuple(size * rank // ranks for rank in range(ranks + 1))


def row_starts(lens: Int64Array) -> Int64Array:
    """int64 [R+1]: first row of each request, then the number of rows."""
    starts = np.zeros(lens.size + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts


def row_positions(query_lens: Int64Array, seq_lens: Int64Array) -> Int64Array:
    """int64 [T]: position in its own sequence of each query row."""
    starts = row_starts(query_lens)
    first_positions = seq_lens - query_lens
    return np.arange(starts[-1]) + np.repeat(first_positions - starts[:-1], query_lens)
