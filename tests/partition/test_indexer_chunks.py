"""Scoring is cut into chunks that cover every row once and stay inside both limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition import IndexerChunk, indexer_chunks, indexer_workspace_rows, key_ranges

MIB = 1 << 20


def brute_force(
    queries: list[int], keys: list[int], rows: int, max_bytes: int
) -> list[tuple[list[int], list[int], bool]]:
    """Groups found by trying every end from the longest down; each chunk as the lists of its requests and rows."""
    chunks, first = [], 0
    while first < len(queries):
        group = [first]
        for end in range(len(queries), first + 1, -1):
            prefixes = [list(range(first, e)) for e in range(first + 2, end + 1)]
            fits = [
                sum(keys[r] for r in g) <= rows
                and 4 * sum(queries[r] for r in g) * sum(keys[r] for r in g) <= max_bytes - max_bytes % 4
                for g in prefixes
            ]
            if all(fits):
                group = list(range(first, end))
                break
        total_keys, left, row = sum(keys[r] for r in group), sum(queries[r] for r in group), 0
        while left:
            take = 1
            while take < left and 4 * (take + 1) * total_keys <= max_bytes - max_bytes % 4:
                take += 1
            chunks.append((group, list(range(row, row + take)), row == 0))
            row, left = row + take, left - take
        first += len(group)
    return chunks


def spelled(chunks: list[IndexerChunk]) -> list[tuple[list[int], list[int], bool]]:
    return [(list(c.requests), list(c.queries), c.gather) for c in chunks]


def test_chunks_equal_a_brute_force_over_every_small_batch() -> None:
    lengths = [(q, k) for q in range(3) for k in range(4)]
    for size in (0, 1, 2, 3):
        for batch in itertools.product(lengths, repeat=size):
            queries, keys = [q for q, _ in batch], [k for _, k in batch]
            for rows, max_bytes in [(0, 0), (3, 12), (5, 24), (6, 15), (9, 64)]:
                chunks = indexer_chunks(queries, keys, workspace_rows=rows, max_logits_bytes=max_bytes)
                assert spelled(chunks) == brute_force(queries, keys, rows, max_bytes), (batch, rows, max_bytes)


lens = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4000)), max_size=12)


@given(batch=lens, rows=st.integers(0, 9000), max_bytes=st.integers(0, 2_000_000), offset=st.integers(0, 5))
def test_every_query_row_lies_in_exactly_one_chunk_and_limits_hold(
    batch: list[tuple[int, int]], rows: int, max_bytes: int, offset: int
) -> None:
    queries, keys = [q for q, _ in batch], [k for _, k in batch]
    chunks = indexer_chunks(queries, keys, workspace_rows=rows, max_logits_bytes=max_bytes, request_offset=offset)
    starts = np.concatenate([[0], np.cumsum(queries)])
    covered = []
    before = None
    for chunk in chunks:
        group = slice(chunk.requests.start - offset, chunk.requests.stop - offset)
        group_rows, group_keys = sum(queries[group]), sum(keys[group])
        assert 0 <= chunk.queries.start < chunk.queries.stop <= group_rows
        assert len(chunk.requests) == 1 or group_keys <= rows
        assert len(chunk.queries) == 1 or len(chunk.queries) * group_keys * 4 <= max_bytes or group_keys == 0
        assert len(chunk.requests) == 1 or len(chunk.queries) == group_rows, "only a lone request is cut"
        assert chunk.gather == (before is None or before.requests != chunk.requests)
        covered += [starts[group.start] + row for row in chunk.queries]
        before = chunk
    assert covered == list(range(sum(queries)))


@pytest.mark.parametrize(("spare", "groups"), [(-1, 2), (0, 1), (1, 1)])
def test_an_exact_fit_fits_and_one_more_does_not(spare: int, groups: int) -> None:
    queries, keys = [10, 6], [100, 28]
    by_rows = indexer_chunks(queries, keys, workspace_rows=128 + spare, max_logits_bytes=MIB)
    by_bytes = indexer_chunks(queries, keys, workspace_rows=1 << 30, max_logits_bytes=4 * (16 * 128 + spare))
    assert len(by_rows) == groups
    assert len({c.requests for c in by_bytes}) == groups


def test_a_lone_request_may_exceed_the_workspace_but_not_the_logits() -> None:
    chunks = indexer_chunks([100], [1000], workspace_rows=10, max_logits_bytes=40 * 1000 * 4)
    assert [c.queries for c in chunks] == [range(0, 40), range(40, 80), range(80, 100)]
    assert [c.gather for c in chunks] == [True, False, False]


def test_one_query_is_scored_even_where_its_keys_alone_exceed_the_logits_limit() -> None:
    chunks = indexer_chunks([3], [1000], workspace_rows=1000, max_logits_bytes=3)
    assert [c.queries for c in chunks] == [range(0, 1), range(1, 2), range(2, 3)]


def test_requests_without_queries_make_no_chunk_and_requests_without_keys_make_one() -> None:
    assert indexer_chunks([0, 0], [5, 9], workspace_rows=100, max_logits_bytes=MIB) == []
    assert indexer_chunks([7], [0], workspace_rows=100, max_logits_bytes=0) == [
        IndexerChunk(range(0, 1), range(0, 7), True)
    ]


@pytest.mark.parametrize(("queries", "keys"), [([1], [1, 2]), ([-1], [3]), ([1], [-3]), ([[1]], [[1]])])
def test_bad_lengths_are_refused(queries: list[int], keys: list[int]) -> None:
    with pytest.raises(ValueError, match=r"query_lens|key_lens"):
        indexer_chunks(queries, keys, workspace_rows=1, max_logits_bytes=4)


class TestAMillionTokens:
    """1,048,576 tokens in steps of 16,384, logits limit 512 MiB."""

    LENGTH = 1 << 20

    def chunks(self, seq_len: int, budget: int = 16384, limit_mib: int = 512) -> list[IndexerChunk]:
        rows = indexer_workspace_rows(self.LENGTH)
        return indexer_chunks([budget], [seq_len], workspace_rows=rows, max_logits_bytes=limit_mib * MIB)

    @pytest.mark.parametrize("budget", [8192, 16384])
    def test_a_full_layer_takes_4217_q_chunks_and_21_layers_88557(self, budget: int) -> None:
        ends = range(budget, self.LENGTH + 1, budget)
        assert len(ends) == {16384: 64, 8192: 128}[budget]
        assert sum(len(self.chunks(end, budget)) for end in ends) == 4217
        assert 21 * 4217 == 88_557

    def test_the_first_steps_take_2_4_7_8_11_13_15_16_and_the_last_127_128(self) -> None:
        counts = [len(self.chunks(end)) for end in range(16384, self.LENGTH + 1, 16384)]
        assert counts[:8] == [2, 4, 7, 8, 11, 13, 15, 16]
        assert counts[-2:] == [127, 128]

    @pytest.mark.parametrize(
        ("seq_len", "limit_mib", "count", "size"),
        [(1 << 20, 512, 128, 128), (1 << 20, 2048, 32, 512), (10**6, 512, 123, 134), (10**6, 2048, 31, 536)],
    )
    def test_the_last_step_is_cut_evenly(self, seq_len: int, limit_mib: int, count: int, size: int) -> None:
        chunks = self.chunks(seq_len, limit_mib=limit_mib)
        assert len(chunks) == count
        assert {len(c.queries) for c in chunks[:-1]} == {size}


def keys_seen(queries: list[int], seqs: list[int], ratio: int) -> list[tuple[int, int]]:
    """Key ranges by counting, token by token, the keys that are complete."""
    ranges, base = [], 0
    for q, s in zip(queries, seqs, strict=True):
        complete = 0
        for position in range(s):
            complete += position % ratio == ratio - 1
            if position >= s - q:
                ranges.append((base, base + complete))
        base += complete
    return ranges


@given(
    batch=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=6),
    ratio=st.integers(1, 5),
)
def test_key_ranges_are_causal_and_in_packed_order(batch: list[tuple[int, int]], ratio: int) -> None:
    queries, seqs = [q for q, _ in batch], [q + start for q, start in batch]
    got = key_ranges(queries, seqs, compress_ratio=ratio)
    assert got.shape == (sum(queries), 2)
    assert got.dtype == np.int64
    assert [tuple(row) for row in got.tolist()] == keys_seen(queries, seqs, ratio)


def test_key_ranges_worked_example() -> None:
    assert key_ranges([2, 1], [5, 3]).tolist() == [[0, 4], [0, 5], [5, 8]]


def test_key_ranges_of_a_long_context_are_64_bit() -> None:
    lengths = [1 << 20] * 2049
    last = key_ranges([0] * 2048 + [1], lengths)
    assert last.tolist() == [[2048 << 20, 2049 << 20]]


def test_more_queries_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request 1 has 4 queries but a sequence of 3"):
        key_ranges([1, 4], [9, 3])
