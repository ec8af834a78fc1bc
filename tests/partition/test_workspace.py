"""Contexts are gathered together only as far as the workspace holds them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.errors import CapacityError
from longfill.partition import indexer_workspace_rows, prefill_workspace_rows, workspace_chunks


def brute_force(lens: list[int], rows: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    for request, length in enumerate(lens):
        if chunks and sum(lens[r] for r in chunks[-1]) + length <= rows:
            chunks[-1].append(request)
        else:
            chunks.append([request])
    return chunks


def test_chunks_equal_a_brute_force_over_every_small_batch() -> None:
    for size in range(6):
        for lens in itertools.product(range(4), repeat=size):
            for rows in (3, 4, 7):
                assert [list(c) for c in workspace_chunks(lens, rows)] == brute_force(list(lens), rows)


@given(lens=st.lists(st.integers(0, 1000), max_size=40), rows=st.integers(1000, 5000))
def test_every_request_is_in_one_chunk_and_no_chunk_could_take_its_successor(lens: list[int], rows: int) -> None:
    chunks = workspace_chunks(lens, rows)
    assert [r for c in chunks for r in c] == list(range(len(lens)))
    totals = [sum(lens[r] for r in c) for c in chunks]
    assert all(total <= rows for total in totals)
    assert all(total + lens[following.start] > rows for total, following in zip(totals[:-1], chunks[1:], strict=True))


def test_a_context_longer_than_the_workspace_is_refused_with_both_numbers() -> None:
    assert workspace_chunks([5, 4096], 4096) == [range(0, 1), range(1, 2)]
    with pytest.raises(CapacityError, match=r"request 1 has a context of 4,097 tokens .* holds 4,096 rows"):
        workspace_chunks([5, 4097], 4096)


@pytest.mark.parametrize(
    ("max_model_len", "latent_rows", "index_rows"),
    [
        (1, 5, 40),
        (262_143, 1_310_715, 10_485_720),
        (262_144, 1_310_720, 10_485_760),
        (262_145, 524_290, 4_194_320),
        (1_048_576, 2_097_152, 16_777_216),
    ],
)
def test_workspaces_hold_5_contexts_up_to_256k_and_2_beyond(
    max_model_len: int, latent_rows: int, index_rows: int
) -> None:
    assert prefill_workspace_rows(max_model_len) == latent_rows
    assert indexer_workspace_rows(max_model_len) == index_rows


def test_the_workspaces_of_a_million_tokens_take_2_42_and_2_21_gb() -> None:
    assert prefill_workspace_rows(1 << 20) * 1152 == 2_415_919_104
    assert indexer_workspace_rows(1 << 20) * 132 == 2_214_592_512


def test_a_factor_and_a_compress_ratio_are_obeyed() -> None:
    assert prefill_workspace_rows(1000, 3) == 3000
    assert indexer_workspace_rows(1000, 3) == 24_000
    assert indexer_workspace_rows(1001, 3, compress_ratio=5) == 4804


@pytest.mark.parametrize(("max_model_len", "factor"), [(0, None), (-1, 2), (10, 0), (10, -1)])
def test_a_workspace_that_cannot_hold_one_context_is_refused(max_model_len: int, factor: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        prefill_workspace_rows(max_model_len, factor)


def test_a_million_token_prompt_gathers_34_million_rows_a_layer() -> None:
    """What the workspace path copies over a request's 64 steps: each step gathers the whole context once."""
    rows = prefill_workspace_rows(1 << 20)
    ends = range(16384, (1 << 20) + 1, 16384)
    assert all(workspace_chunks([end], rows) == [range(0, 1)] for end in ends)
    assert sum(ends) == 34_078_720
