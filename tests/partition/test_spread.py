"""A step's rows spread over ranks: each is attended for where it should be, held once, stored once, and found again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longfill.partition import StepPlan, StepRequest, plan_step
from longfill.partition.mesh import MeshShape
from longfill.partition.slots import NO_SLOT
from longfill.partition.spread import Cut
from longfill.units import PageSize

PAGE = PageSize(4)
TOPK = 6

SHAPES = [
    MeshShape(),
    MeshShape(tp=2),
    MeshShape(tp=4, dcp=2),
    MeshShape(pcp=2),
    MeshShape(pcp=3),
    MeshShape(tp=2, pcp=2),
    MeshShape(pcp=2, dcp=2),
    MeshShape(tp=2, pcp=2, dcp=2),
    MeshShape(tp=2, pcp=2, dcp=4),
]


def request(name: int, start: int, query_len: int, dcp: int, *, drafts: int = 0) -> StepRequest:
    pages = 1 + 100 * name + np.arange(-(-(start + query_len) // (PAGE * dcp)))
    tokens = 1000 * name + np.arange(start, start + query_len)
    return StepRequest(str(name), start, query_len, pages, tokens, samples=True, num_drafts=drafts)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shape = draw(st.sampled_from(SHAPES))
    split = draw(st.sampled_from(["zigzag", "interleave", "contiguous"]))
    return Cut(shape, 0, split, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 40])))


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    parts = st.tuples(st.integers(0, 30), st.integers(1, 25))
    return [
        (start, length, draw(st.integers(0, min(2, length - 1))))
        for start, length in draw(st.lists(parts, min_size=1, max_size=5))
    ]


def plans(batch: list[tuple[int, int, int]], cut: Cut) -> list[StepPlan]:
    requests = [request(i, start, n, cut.shape.dcp, drafts=d) for i, (start, n, d) in enumerate(batch)]
    return [
        plan_step(
            requests,
            page_size=PAGE,
            topk=TOPK,
            indexer_workspace_rows=1000,
            max_logits_bytes=4000,
            workspace_rows=60,
            cut=replace(cut, rank=rank),
        )
        for rank in range(cut.shape.world)
    ]


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), batch=batches())
def test_every_row_is_attended_for_with_every_head_and_held_once(cut: Cut, batch: list[tuple[int, int, int]]) -> None:
    every = plans(batch, cut)
    rows = every[0].positions.size
    for tp in range(cut.shape.tp):
        attended = np.concatenate([every[p * cut.shape.tp + tp].share.rows for p in range(cut.shape.pcp)])
        assert set(attended.tolist()) == set(range(rows)), "each share of the heads attends for every row"
    gathered = np.concatenate([plan.share.rows[plan.share.own] for plan in every])
    for plan in every:
        share = plan.share
        assert gathered[share.order].tolist() == list(range(rows))
        assert sum(share.tp_counts) == share.rows.size
        assert share.held == tuple(p.share.own.stop - p.share.own.start for p in every)


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), batch=batches())
def test_runs_are_the_rows_in_order_at_equal_distances(cut: Cut, batch: list[tuple[int, int, int]]) -> None:
    for plan in plans(batch, cut):
        found: list[int] = []
        for run, dense in zip(plan.runs, plan.dense_rows, strict=True):
            positions = run.start + run.stride * np.arange(run.num_rows)
            first = int(plan.query_starts[run.request]) - plan.requests[run.request].start
            assert run.first_row == len(found)
            found += (first + positions).tolist()
            assert dense == (positions < TOPK).sum()
            assert run.seq_len == positions[-1] + 1
        assert found == plan.share.rows.tolist()
        assert plan.scored_pairs == sum(p + 1 for p in plan.positions[plan.share.rows].tolist() if p >= TOPK)
        cut_rows = sum(len(chunk.queries) for chunk in plan.indexer_chunks)
        assert cut_rows == sum(run.num_rows for run in plan.runs) - int(plan.dense_rows.sum())


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), batch=batches())
def test_every_token_has_one_slot_on_each_replica_of_its_shard(cut: Cut, batch: list[tuple[int, int, int]]) -> None:
    every = plans(batch, cut)
    for group in {cut.shape.group("dcp", rank) for rank in range(cut.shape.world)}:
        keepers = np.array([every[rank].slots != NO_SLOT for rank in group]).sum(0)
        assert set(keepers.tolist()) == {1}
    for plan in every:
        kept = plan.slots[plan.slots != NO_SLOT].tolist()
        assert len(kept) == len(set(kept)), "no two tokens share a slot"


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), batch=batches(), data=st.data())
def test_picked_rows_come_back_as_they_were_asked_for(
    cut: Cut, batch: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    every = plans(batch, cut)
    rows = every[0].positions.size
    wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), dtype=np.int64)
    picks = [plan.share.pick(wanted) for plan in every]
    held = [plan.share.rows[plan.share.own] for plan in every]
    sent = [held[rank][picks[rank].local[rank]] for rank in range(cut.shape.world)]
    assert picks[0].counts == tuple(part.size for part in sent)
    assert np.concatenate(sent)[picks[0].order].tolist() == wanted.tolist()


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), batch=batches())
def test_rows_of_a_shard_group_are_whole_or_gathered(cut: Cut, batch: list[tuple[int, int, int]]) -> None:
    every = plans(batch, cut)
    for plan in every:
        whole = plan.share.whole_rows
        if cut.shape.dcp == 1:
            assert whole == 0
            assert not plan.context_chunks
            continue
        assert plan.share.rows[:whole].tolist() == list(range(whole)), "the same rows on every rank, and first"
        behind = [row for chunk in plan.context_chunks for row in chunk.rows]
        assert behind == list(range(whole, plan.share.rows.size))
        for chunk in plan.context_chunks:
            contexts = [plan.requests[i].seq_len for i in chunk.requests]
            assert sum(contexts) <= 60
            owners = {run.request for run in plan.runs if run.first_row in chunk.rows}
            assert owners <= set(chunk.requests)
    assert len({tuple(c.requests for c in plan.context_chunks) for plan in every}) == 1


@settings(max_examples=100, deadline=None)
@given(cut=cuts(), batch=batches())
def test_the_ranks_that_score_share_all_pairs(cut: Cut, batch: list[tuple[int, int, int]]) -> None:
    every = plans(batch, cut)
    pairs = every[0].rank_scored_pairs
    assert all(plan.rank_scored_pairs == pairs for plan in every)
    for rank, plan in enumerate(every):
        own = plan.scored_pairs
        place = cut.shape.place(rank)
        of_group = pairs[place["pcp"] * cut.shape.tp : (place["pcp"] + 1) * cut.shape.tp]
        assert own == (of_group[0] if plan.score_counts is None else sum(of_group))
        if plan.score_counts is not None:
            assert sum(plan.score_counts) == plan.share.rows.size


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_ranks_score_within_five_percent_of_each_other_over_128k(ranks: int) -> None:
    """CP-04: chunk by chunk and over the whole prompt."""
    total: Counter[int] = Counter()
    for start in range(0, 131_072, 16_384):
        plan = plan_step(
            [StepRequest("a", start, 16_384, 1 + np.arange(2048), np.zeros(16_384, np.int64), samples=False)],
            page_size=PageSize(64),
            topk=2048,
            indexer_workspace_rows=1 << 24,
            max_logits_bytes=1 << 29,
            workspace_rows=1 << 21,
            cut=Cut(MeshShape(pcp=ranks)),
        )
        pairs = plan.rank_scored_pairs
        if start:
            assert max(pairs) / min(pairs) <= 1.01
        total.update(dict(enumerate(pairs)))
    assert max(total.values()) / min(total.values()) <= 1.01


def test_scoring_is_shared_from_the_pairs_on_that_it_must_spare() -> None:
    """Rows of 8 to 11 scored keys: the ranks score 17 and 21 of the 38, so that the one with most is spared 17."""
    batch = [(7, 4, 0)]
    (shared, _), (whole, _) = (plans(batch, Cut(MeshShape(tp=2), min_saved_pairs=pairs)) for pairs in (17, 18))
    assert shared.score_counts == (2, 2)
    assert shared.rank_scored_pairs == (17, 21)
    assert whole.score_counts is None
    assert whole.rank_scored_pairs == (38, 38)


def test_two_medium_prompts_share_a_context_parallel_step() -> None:
    """CP-04: both are split, and every rank has rows of both."""
    for plan in plans([(0, 20, 0), (0, 24, 0)], Cut(MeshShape(pcp=2))):
        assert {run.request for run in plan.runs} == {0, 1}


def test_a_rank_counts_its_own_shard_of_the_keys() -> None:
    cut = Cut(MeshShape(tp=2, dcp=2), 1, "zigzag", 2)
    assert cut.dcp_rank == 1
    plan = plan_step(
        [request(0, 0, 10, 2)], page_size=PAGE, topk=None, indexer_workspace_rows=10, max_logits_bytes=40,
        workspace_rows=10, cut=cut,
    )  # fmt: skip
    # Positions 2, 3, 6, 7 are the second rank's, in the first page (4 tokens of 8) of its pool.
    assert plan.slots.tolist() == [NO_SLOT, NO_SLOT, 4, 5, NO_SLOT, NO_SLOT, 6, 7, NO_SLOT, NO_SLOT]
