"""Who reads from whom when the two sides of a KV transfer have different tensor-parallel sizes.

Imports nothing of the house but `partition.lengths`. Invariant: the larger size is a multiple of the smaller, so that
no rank's share straddles two.
"""

from __future__ import annotations

from longfill.partition.lengths import positive


def tp_source_ranks(tp_rank: int, tp_size: int, source_tp_size: int, *, replicated: bool = True) -> tuple[int, ...]:
    """Source ranks whose KV rank `tp_rank` of `tp_size` reads.

    `replicated` (every source rank holds the whole latent cache): one rank, chosen so that readers spread evenly. Else
    (source ranks hold equal shares) every rank whose share lies in the reader's own.

    Raises ValueError where neither size is a multiple of the other, or the rank is out of range.
    """
    _check_sizes(tp_size, source_tp_size)
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank is {tp_rank}; with a TP size of {tp_size} it must be in [0, {tp_size})")
    first = tp_rank * source_tp_size // tp_size
    share = 1 if replicated else max(1, source_tp_size // tp_size)
    return tuple(range(first, first + share))


def expected_acks(producer_tp_size: int, consumer_tp_size: int) -> int:
    """Acknowledgements after which one producer rank may free a request's pages.

    One comes from each consumer rank whose share meets the producer's; a reader of a replicated cache, which reads one
    rank only, also notifies the other ranks of its share (`tp_source_ranks` with `replicated=False`).

    Raises ValueError where neither size is a multiple of the other.
    """
    _check_sizes(consumer_tp_size, producer_tp_size)
    return max(1, consumer_tp_size // producer_tp_size)


def _check_sizes(reader: int, source: int) -> None:
    small, large = sorted((positive("the reader's TP size", reader), positive("the source's TP size", source)))
    if large % small:
        raise ValueError(
            f"TP sizes {reader} (reader) and {source} (source): the larger must be a multiple of the smaller"
        )
