"""Rows that see any number of keys, as under context parallelism: with gaps between them, or a share of the keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.caches import RANK, ROPE, make_caches, random
from tests.kernels.conftest import MakeBackend
from tests.kernels.test_native_index_topk import Case, integer_case, random_case, with_float_keys
from tests.kernels.test_partial_attention import exact
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.cpu import NativeBackend, available, isa_names
from longfill.kernels.cpu.indexer import SCREENED_ISAS, index_topk, join_rows
from longfill.kernels.interface import RequestRows, ScoredRows, StepRows
from longfill.kernels.workspace import Workspace, WorkspaceSizes

HEADS = 3
# The fixture holds no state that an example could change.
examples = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def counts_of(data: st.DataObject, rows: int, length: int) -> Tensor:
    """Nondecreasing counts, some 0, some equal, the last perhaps far below the length."""
    counts = data.draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows))
    return torch.tensor(sorted(counts), dtype=torch.int64)


def brute_force(scores_TL: np.ndarray, topk: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Positions and scores of each row's best, ties to the lower position."""
    selection_TK = torch.full((len(counts), topk), -1, dtype=torch.int32)
    best_TK = torch.full((len(counts), topk), float("-inf"))
    for row, count in enumerate(counts):
        chosen = np.sort(np.argsort(-scores_TL[row, :count], kind="stable")[:topk])
        selection_TK[row, : len(chosen)] = torch.from_numpy(chosen).int()
        best_TK[row, : len(chosen)] = torch.from_numpy(scores_TL[row, chosen]).float()
    return selection_TK, best_TK


def select(backend: Backend, case: Case, chunks: list[list[ScoredRows]], topk: int) -> tuple[Tensor, Tensor]:
    selection_TK = torch.full((case.q_TID.shape[0], topk), -7, dtype=torch.int32)
    scores_TK = torch.full(selection_TK.shape, float("nan"))
    workspace = Workspace(WorkspaceSizes(2**22, 0, 0, 0, topk))
    counted = backend.index_topk(
        case.q_TID, case.w_TI, case.cache, chunks, selection_TK, workspace, scores_TK=scores_TK
    )
    if isinstance(backend, NativeBackend):
        seen = sum(int(rows.visible(0, rows.num_rows).sum()) for chunk in chunks for rows in chunk)
        assert counted.pairs == seen
    return selection_TK, scores_TK


def with_counts(case: Case, visible_T: Tensor) -> ScoredRows:
    request = replace(case.request, visible_T=visible_T)
    return ScoredRows(request, 0, visible_T.shape[0], 0, visible_T)


@given(rows=st.integers(1, 40), length=st.integers(1, 900), topk=st.sampled_from([1, 8, 64]), data=st.data())
@examples
def test_a_row_selects_among_the_keys_that_it_sees(
    backend_of: MakeBackend, rows: int, length: int, topk: int, data: st.DataObject
) -> None:
    case, scores_TL = integer_case(3, 16, max(rows, length), rows)
    visible_T = counts_of(data, rows, max(rows, length))
    if data.draw(st.booleans()):
        case = with_float_keys(case)
    selection_TK, scores_TK = select(backend_of(torch.float32), case, [[with_counts(case, visible_T)]], topk)
    want_TK, want_scores_TK = brute_force(scores_TL, topk, visible_T.tolist())
    assert torch.equal(selection_TK, want_TK)
    assert torch.equal(scores_TK, want_scores_TK)


@pytest.mark.parametrize(
    ("isa", "screen"), [(isa, screen) for isa in isa_names() for screen in ("off", "on")[: 1 + (isa in SCREENED_ISAS)]]
)
@pytest.mark.skipif(not available(), reason="native kernels")
def test_rows_with_wide_gaps_keep_their_bits_under_every_cut(isa: str, screen: str) -> None:
    """Long enough for a screen with thresholds from the start, for keys split over threads, and for several blocks."""
    rows, length, topk = 300, 12_000, 32
    case = random_case(4, 32, length, rows)
    visible_T = torch.cat([torch.tensor([0, 0, 1, topk, topk]), torch.linspace(3000, length, rows - 5).long()])

    def run(scored: list[ScoredRows], num_threads: int = 1) -> tuple[Tensor, Tensor]:
        selection_TK = torch.full((rows, topk), -7, dtype=torch.int32)
        scores_TK = torch.full(selection_TK.shape, float("nan"))
        index_topk(
            case.q_TID, case.w_TI, case.cache, [scored], selection_TK,
            num_threads=num_threads, scores_TK=scores_TK, isa=isa, screen=screen,
        )  # fmt: skip
        return selection_TK, scores_TK

    want = run([ScoredRows(case.request, row, 1, max(int(count) - 1, 0)) for row, count in enumerate(visible_T)])
    want[0][:2], want[1][:2] = -1, float("-inf")  # these two see no key, which a position cannot say
    whole = with_counts(case, visible_T)
    parts = [
        replace(whole, first_row=first, num_rows=min(70, rows - first), visible_T=visible_T[first : first + 70])
        for first in range(0, rows, 70)
    ]
    for scored in ([whole], parts, [replace(part, request=replace(part.request)) for part in parts]):
        for num_threads in (1, 3):
            got = run(scored, num_threads)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


def test_counts_of_consecutive_rows_are_the_default(backend_of: MakeBackend) -> None:
    case = random_case(4, 32, length=500, rows=30)
    backend, rows = backend_of(torch.float32), case.rows
    given_T = rows.visible(0, 30)
    assert given_T.tolist() == list(range(471, 501)) == case.request.visible(0, 30).tolist()
    for mine, theirs in zip(
        select(backend, case, [[rows]], 16), select(backend, case, [[with_counts(case, given_T)]], 16), strict=True
    ):
        assert torch.equal(mine, theirs)


@given(rows=st.integers(1, 40), length=st.integers(1, 200), data=st.data())
@examples
def test_a_dense_row_attends_to_the_keys_that_it_sees(
    backend_of: MakeBackend, rows: int, length: int, data: st.DataObject
) -> None:
    cache, _, request = make_caches(length)
    visible_T, q_THX = counts_of(data, rows, length), random(rows, HEADS, RANK + ROPE, seed=9)
    backend = backend_of(torch.float32)
    out_THR, lse_TH = torch.full((rows, HEADS, RANK), float("nan")), torch.full((rows, HEADS), float("nan"))
    backend.dense_mla(q_THX, cache, request, visible_T, 0.2, out_THR, lse_TH)
    columns_K = torch.arange(length)
    selection_TK = torch.where(columns_K < visible_T[:, None], columns_K, -1).int()
    want_THR, want_TH = exact(q_THX, cache, request, selection_TK)
    torch.testing.assert_close(out_THR.double(), want_THR, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_TH.double(), want_TH, rtol=1e-5, atol=1e-5)
    empty_T = visible_T == 0
    assert out_THR[empty_T].eq(0).all()
    assert lse_TH[empty_T].eq(float("-inf")).all()
    for row in range(rows):
        at = slice(row, row + 1)
        alone_THR, alone_TH = torch.empty(1, HEADS, RANK), torch.empty(1, HEADS)
        backend.dense_mla(q_THX[at], cache, request, visible_T[at], 0.2, alone_THR, alone_TH)
        assert torch.equal(alone_THR, out_THR[at])
        assert torch.equal(alone_TH, lse_TH[at])


def test_a_part_of_a_step_carries_the_counts_of_its_rows() -> None:
    visible_T = torch.tensor([0, 2, 2, 7, 9, 30, 31])
    request = RequestRows(3, 7, 5, torch.arange(4), visible_T)
    assert request.seq_len == 31
    assert request.visible(2, 5).tolist() == [2, 7, 9]
    part = request.part(2, 5, 4)
    assert (part.first_row, part.query_len, part.seq_len) == (1, 3, 9)
    assert part.visible(0, 3).tolist() == [2, 7, 9]
    assert request.part(3, 3, 0).seq_len == 0
    scored = ScoredRows(request, 5, 5, 7, visible_T[2:])
    step = StepRows(
        token_ids_T=torch.arange(10), positions_T=torch.arange(10), requests=(request,),
        dense_rows=(2,), index_chunks=[[scored]], workspace_chunks=((0,),),
    )  # fmt: skip
    pieces = [rows for _, block in step.blocks(4) for chunk in block.index_chunks for rows in chunk]
    seen = [rows.visible(0, rows.num_rows).tolist() for rows in pieces]
    assert seen == [[2, 7, 9], [30, 31]]
    assert [block.requests[0].seq_len for _, block in step.blocks(4)] == [0, 9, 31]


def test_pieces_join_where_their_counts_go_on() -> None:
    request = RequestRows(0, 7, 0, torch.arange(2), torch.tensor([0, 2, 2, 7, 9, 30, 31]))
    visible_T = request.visible(0, 7)

    def piece(first: int, last: int) -> ScoredRows:
        return ScoredRows(request, first, last - first, 0, visible_T[first:last])

    (joined,) = join_rows([piece(0, 2), piece(2, 2), piece(2, 3), piece(3, 7)])
    assert (joined.first_row, joined.num_rows) == (0, 7)
    assert joined.visible(0, 7).tolist() == visible_T.tolist()
    falling = replace(piece(3, 7), visible_T=torch.tensor([1, 9, 30, 31]))
    consecutive = ScoredRows(request, 3, 4, 3)
    for apart in ([piece(0, 2), piece(3, 7)], [piece(0, 3), falling], [piece(0, 3), consecutive]):
        assert [(rows.first_row, rows.num_rows) for rows in join_rows(apart)] == [
            (rows.first_row, rows.num_rows) for rows in apart
        ]
