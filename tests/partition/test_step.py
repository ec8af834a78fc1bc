"""The plan of a step: what every row is, where it is stored, which rows are scored, what runs together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.errors import CapacityError
from longfill.partition import (
    StepPlan,
    StepRequest,
    indexer_workspace_rows,
    plan_step,
    prefill_workspace_rows,
)
from longfill.units import PageSize

MIB = 1 << 20


def request(
    name: str, start: int, query_len: int, *, page_size: int = 4, samples: bool = False, first_page: int = 1,
    num_drafts: int = 0,
):  # fmt: skip
    width = -(-(start + query_len) // page_size)
    return StepRequest(
        request_id=name,
        start=start,
        query_len=query_len,
        pages=np.arange(first_page, first_page + width)[::-1].copy(),
        token_ids=np.arange(start, start + query_len) * 10 + 1,
        samples=samples,
        num_drafts=num_drafts,
    )


def plan(requests: list[StepRequest], **limits: Any) -> StepPlan:
    defaults = {
        "page_size": PageSize(4),
        "topk": 6,
        "indexer_workspace_rows": 100,
        "max_logits_bytes": 400,
        "workspace_rows": 100,
    }
    return plan_step(requests, **(defaults | limits))


def test_one_token_rows_come_first_and_the_rest_keep_their_order() -> None:
    got = plan([request("long", 0, 9), request("a", 4, 1), request("mid", 3, 2), request("b", 0, 1)])
    assert [r.request_id for r in got.requests] == ["a", "b", "long", "mid"]
    assert got.query_starts.tolist() == [0, 1, 2, 11, 13]


def test_rows_with_drafts_stand_beside_one_token_rows_and_all_of_them_are_sampled_from() -> None:
    drafts = request("drafts", 3, 4, samples=True, num_drafts=3)
    tail = request("tail", 2, 4, samples=True, num_drafts=2)  # two rows that no draft is in
    got = plan([tail, request("long", 0, 9), drafts, request("a", 4, 1, samples=True), request("b", 0, 1)])
    assert [r.request_id for r in got.requests] == ["drafts", "a", "b", "tail", "long"]
    assert got.sample_rows.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    assert got.sample_starts.tolist() == [0, 4, 5, 8]


@pytest.mark.parametrize(
    ("query_len", "num_drafts", "samples"), [(1, 1, True), (3, 3, True), (3, 1, False), (2, -1, True)]
)
def test_drafts_without_a_row_to_sample_from_are_refused(query_len: int, num_drafts: int, samples: bool) -> None:
    with pytest.raises(ValueError, match=rf"request odd: {num_drafts} drafts in {query_len} rows"):
        plan([request("odd", 4, query_len, samples=samples, num_drafts=num_drafts)])


def test_an_example_to_read() -> None:
    prefill = request("prefill", 4, 5, samples=False)  # positions 4..8 on pages 3, 2, 1 (positions 8.. on page 1)
    decode = request("decode", 9, 1, samples=True, first_page=10)  # position 9 on page 10
    got = plan([prefill, decode])
    assert got.positions.tolist() == [9, 4, 5, 6, 7, 8]
    assert got.token_ids.tolist() == [91, 41, 51, 61, 71, 81]
    assert got.slots.tolist() == [41, 8, 9, 10, 11, 4]
    assert got.dense_rows.tolist() == [0, 2], "positions 4 and 5 see at most 6 keys"
    assert got.scored == (0, 1)
    assert [(c.requests, c.queries) for c in got.indexer_chunks] == [(range(0, 2), range(0, 4))]
    assert got.workspace_chunks == (range(0, 2),)
    assert got.sample_rows.tolist() == [0]
    assert got.scored_pairs == 10 + 7 + 8 + 9
    assert got.gathered_rows == 10 + 9


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[StepRequest], int, int | None]:
    page_size = draw(st.integers(1, 7))
    requests, first_page = [], 1
    for i in range(draw(st.integers(0, 6))):
        query_len, samples = draw(st.one_of(st.just(1), st.integers(1, 20))), draw(st.booleans())
        r = request(
            f"r{i}",
            draw(st.integers(0, 40)),
            query_len,
            page_size=page_size,
            samples=samples,
            first_page=first_page,
            num_drafts=draw(st.integers(0, query_len - 1)) if samples else 0,
        )
        first_page += r.pages.size
        requests.append(r)
    return requests, page_size, draw(st.one_of(st.none(), st.integers(0, 70)))


@given(step=steps(), logits=st.integers(0, 5000), rows=st.integers(60, 300))
def test_a_plan_equals_walking_its_rows_one_by_one(
    step: tuple[list[StepRequest], int, int | None], logits: int, rows: int
) -> None:
    requests, page_size, topk = step
    got = plan(
        requests,
        page_size=page_size,
        topk=topk,
        indexer_workspace_rows=rows,
        max_logits_bytes=logits,
        workspace_rows=rows,
    )
    singles = [r for r in requests if r.query_len - r.num_drafts == 1]
    ordered = singles + [r for r in requests if r not in singles]
    assert list(got.requests) == ordered
    tokens, positions, slots, samples, dense, scored_positions = [], [], [], [], [], []
    starts = [0]
    for r in ordered:
        scored = []
        for i, position in enumerate(range(r.start, r.start + r.query_len)):
            tokens.append(r.token_ids[i])
            positions.append(position)
            slots.append(r.pages[position // page_size] * page_size + position % page_size)
            if topk is not None and position + 1 > topk:
                scored.append(position)
        dense.append(r.query_len - len(scored))
        scored_positions.append(scored)
        if r.samples:
            samples += range(len(positions) - 1 - r.num_drafts, len(positions))
            starts.append(len(samples))
    assert got.token_ids.tolist() == tokens
    assert got.positions.tolist() == positions
    assert got.slots.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert got.sample_rows.tolist() == samples
    assert got.sample_starts.tolist() == starts
    assert got.dense_rows.tolist() == dense
    assert list(got.scored) == [i for i, scored in enumerate(scored_positions) if scored]
    assert got.scored_pairs == sum(p + 1 for scored in scored_positions for p in scored)
    assert got.gathered_rows == sum(ordered[i].start + ordered[i].query_len for i in got.scored)

    chunked = []
    for chunk in got.indexer_chunks:
        in_chunk = [(i, p) for i in chunk.requests for p in scored_positions[got.scored[i]]]
        chunked += [in_chunk[row] for row in chunk.queries]
    assert chunked == [(i, p) for i, s in enumerate(got.scored) for p in scored_positions[s]], "each scored row once"
    assert [i for c in got.workspace_chunks for i in c] == list(range(len(got.scored)))
    for array in (
        got.query_starts,
        got.token_ids,
        got.positions,
        got.slots,
        got.dense_rows,
        got.sample_rows,
        got.sample_starts,
    ):
        assert array.dtype == np.int64


@pytest.mark.parametrize(("topk", "dense"), [(0, 0), (3, 0), (4, 0), (5, 1), (7, 3), (8, 4), (9, 4), (None, 4)])
def test_a_row_is_dense_exactly_while_its_causal_range_is_no_longer_than_topk(topk: int | None, dense: int) -> None:
    got = plan([request("a", 4, 4)], topk=topk)
    assert got.dense_rows.tolist() == [dense]
    assert got.scored == ((0,) if dense < 4 else ())


def test_dense_rows_do_not_depend_on_how_the_prompt_was_cut_nor_on_batch_mates() -> None:
    def dense_positions(cuts: list[int], others: list[StepRequest]) -> list[int]:
        found = []
        for a, b in zip([0, *cuts], [*cuts, 20], strict=True):
            got = plan([*others, request("a", a, b - a)])
            index = [r.request_id for r in got.requests].index("a")
            found += range(a, a + int(got.dense_rows[index]))
        return found

    mates = [request("long", 30, 9, first_page=50), request("short", 0, 2, first_page=80)]
    for cuts in ([], [1], [5], [6], [7], [3, 6, 9]):
        for others in ([], mates):
            assert dense_positions(cuts, others) == list(range(6))


def test_an_empty_step_is_an_empty_plan() -> None:
    got = plan([])
    assert (got.requests, got.scored, got.indexer_chunks, got.workspace_chunks) == ((), (), (), ())
    assert (got.slots.size, got.query_starts.tolist(), got.scored_pairs, got.gathered_rows) == (0, [0], 0, 0)
    assert (got.sample_rows.size, got.sample_starts.tolist()) == (0, [0])


@pytest.mark.parametrize(("start", "query_len", "position"), [(8, 5, 12), (12, 1, 12), (0, 13, 12), (-1, 2, -1)])
def test_dsa_08_a_position_outside_the_page_table_names_request_position_and_width(
    start: int, query_len: int, position: int
) -> None:
    bad = StepRequest("late", start, query_len, np.array([4, 5, 6]), np.zeros(query_len, dtype=np.int64), False)
    message = rf"request late: position {position} is outside its page table of 3 pages of 4 tokens"
    with pytest.raises(ValueError, match=message):
        plan([request("good", 0, 3), bad])


def test_dsa_08_a_table_may_be_exactly_full() -> None:
    full = StepRequest("full", 8, 4, np.array([4, 5, 6]), np.zeros(4, dtype=np.int64), False)
    assert plan([full]).slots.tolist() == [24, 25, 26, 27]


def test_a_page_that_was_never_allocated_names_the_request() -> None:
    hole = StepRequest("hole", 5, 2, np.array([4, -1]), np.zeros(2, dtype=np.int64), False)
    with pytest.raises(ValueError, match="request hole: entry 1 of the page table is -1"):
        plan([hole])
    behind = StepRequest("behind", 5, 2, np.array([-1, 4]), np.zeros(2, dtype=np.int64), False)
    assert plan([behind]).slots.tolist() == [17, 18], "a page that this step does not write may be gone"


def test_requests_without_tokens_or_with_the_wrong_number_are_refused() -> None:
    with pytest.raises(ValueError, match="request none: query_len is 0"):
        plan([StepRequest("none", 0, 0, np.array([1]), np.zeros(0, dtype=np.int64), False)])
    with pytest.raises(ValueError, match=r"request two: token_ids has shape \(3,\); expected \(2,\)"):
        plan([StepRequest("two", 0, 2, np.array([1]), np.zeros(3, dtype=np.int64), False)])


def test_a_scored_context_longer_than_the_workspace_is_refused_and_a_dense_one_is_not() -> None:
    with pytest.raises(CapacityError, match="context of 9 tokens but the gather workspace holds 8"):
        plan([request("a", 0, 9)], workspace_rows=8)
    assert plan([request("a", 0, 9)], workspace_rows=8, topk=9).workspace_chunks == ()


class TestAMillionTokens:
    """A prompt of 1,048,576 tokens in steps of 16,384 with top-k 2,048."""

    LENGTH, BUDGET, TOPK = 1 << 20, 16384, 2048
    PAGES = np.arange(1, LENGTH // 64 + 1)
    TOKENS = np.zeros(BUDGET, dtype=np.int64)

    def plan(self, step: int) -> StepPlan:
        start = step * self.BUDGET
        last = start + self.BUDGET == self.LENGTH
        return plan_step(
            [StepRequest("a", start, self.BUDGET, self.PAGES, self.TOKENS, last)],
            page_size=PageSize(64),
            topk=self.TOPK,
            indexer_workspace_rows=indexer_workspace_rows(self.LENGTH),
            max_logits_bytes=512 * MIB,
            workspace_rows=prefill_workspace_rows(self.LENGTH),
        )

    def test_64_steps_4217_q_chunks_and_34_million_gathered_rows(self) -> None:
        plans = [self.plan(step) for step in range(64)]
        assert [p.sample_rows.size for p in plans] == [0] * 63 + [1], "the first token is sampled in step 64"
        assert sum(len(p.indexer_chunks) for p in plans) == 4217
        assert [len(c.queries) for c in plans[-1].indexer_chunks] == [128] * 128
        assert sum(p.gathered_rows for p in plans) == 34_078_720
        assert sum(int(p.dense_rows.sum()) for p in plans) == self.TOPK
        pairs = sum(p.scored_pairs for p in plans)
        assert pairs == self.LENGTH * (self.LENGTH + 1) // 2 - self.TOPK * (self.TOPK + 1) // 2
        every_pair = pairs + self.TOPK * (self.TOPK + 1) // 2
        assert round(21 * 32 * 128 * 2 * every_pair / 1e15, 2) == 94.58, "PFLOP of the indexer"
        slots = np.concatenate([p.slots for p in plans])
        assert np.array_equal(slots, np.arange(64, self.LENGTH + 64))
