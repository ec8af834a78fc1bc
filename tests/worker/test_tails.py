"""What the worker knows before the scheduler does: true positions, newest tokens and drafts, admission by admission."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.partition import StepRequest
from longfill.scheduler import UNKNOWN, ScheduledRequest
from longfill.worker.tails import Tails

PAGES = np.arange(1, 20)


def scheduled(start: int, num_tokens: int, *, drafts: int = 0, unknown: int = 0, **fields: Any) -> ScheduledRequest:
    """Rows of request "a" whose known tokens are 100 + their position."""
    token_ids = np.arange(100 + start, 100 + start + num_tokens)
    token_ids[num_tokens - unknown :] = UNKNOWN
    given = {
        "request_id": "a", "admission": 1, "start": start, "num_tokens": num_tokens, "num_drafts": drafts,
        "num_unknown": unknown, "page_table": PAGES, "token_ids": token_ids, "next_token_id": UNKNOWN,
        "samples": True, "num_prompt_tokens": 5,
    }  # fmt: skip
    return ScheduledRequest(**(given | fields))


def resolved(tails: Tails, part: ScheduledRequest) -> StepRequest:
    request = tails.resolve(part)
    assert request is not None
    return request


def test_known_rows_are_handed_on_as_they_are() -> None:
    part = scheduled(3, 4, samples=False, next_token_id=9)
    got = resolved(Tails(), part)
    for name in ("request_id", "admission", "start", "samples", "num_drafts", "next_token_id"):
        assert getattr(got, name) == getattr(part, name)
    assert (got.query_len, got.pages) == (4, PAGES)
    assert got.token_ids.tolist() == [103, 104, 105, 106]


@pytest.mark.parametrize("unknown", [2, 3])
def test_drafts_and_a_token_in_flight_come_from_the_tail(unknown: int) -> None:
    tails = Tails()
    tails.book(resolved(tails, scheduled(0, 5)), [105], [7, 8, 9])
    got = resolved(tails, scheduled(5, 3, drafts=2, unknown=unknown))
    assert got.start == 5
    assert got.token_ids.tolist() == [105, 7, 8]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_step_begins_where_the_drafts_before_it_were_right_up_to(accepted: int) -> None:
    tails = Tails()
    tails.book(resolved(tails, scheduled(0, 5)), [105], [7, 8])
    step = resolved(tails, scheduled(5, 3, drafts=2, unknown=3))
    tails.book(step, [7, 8, 50][: 1 + accepted], [60, 61])
    # Scheduled while the step before it ran: all its drafts count as right.
    got = resolved(tails, scheduled(8, 3, drafts=2, unknown=3))
    assert got.start == 6 + accepted
    assert got.token_ids.tolist() == [[7, 8, 50][accepted], 60, 61]
    assert got.seq_len == 9 + accepted


def test_what_nothing_waits_for_is_left_out() -> None:
    tails = Tails()
    unknown = scheduled(5, 1, unknown=1)
    assert tails.resolve(unknown) is None, "its predecessor failed or was never run"
    tails.book(resolved(tails, scheduled(0, 5)), [105], [])
    assert resolved(tails, unknown).token_ids.tolist() == [105]
    assert tails.resolve(dataclasses.replace(unknown, admission=2)) is None
    tails.drop("b")
    assert len(tails) == 1
    tails.drop("a")
    assert len(tails) == 0
    assert tails.resolve(unknown) is None


def test_a_later_admission_replaces_the_tail_of_the_one_before() -> None:
    tails = Tails()
    tails.book(resolved(tails, scheduled(0, 5)), [105], [7])
    again = scheduled(0, 5, admission=2)
    tails.book(resolved(tails, again), [105], [8])
    assert resolved(tails, scheduled(5, 2, drafts=1, unknown=1, admission=2)).token_ids.tolist() == [105, 8]
    assert tails.resolve(scheduled(5, 2, drafts=1, unknown=1)) is None


@pytest.mark.parametrize(("start", "count"), [(5, 4), (4, 2)])
def test_a_schedule_that_no_tail_can_follow_is_refused(start: int, count: int) -> None:
    tails = Tails()
    tails.book(resolved(tails, scheduled(0, 5)), [105], [7, 8])
    message = (
        rf"request a: {count} rows are scheduled at position {start} at most, but its tail has 3 tokens from position 5"
    )
    with pytest.raises(ValueError, match=message):
        tails.resolve(scheduled(start, count, drafts=count - 1, unknown=count))


@given(
    accepted=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12), depth=st.integers(1, 3)
)
def test_positions_and_tokens_are_right_at_any_depth(accepted: list[tuple[int, int]], depth: int) -> None:
    """Steps are scheduled `depth` ahead of the booking, with the ledger's arithmetic; truth is token = its position."""
    tails = Tails()
    tails.book(resolved(tails, scheduled(0, 5)), [5], [6, 7, 8])
    computed, true_end = 5, 6
    in_flight: list[tuple[int, int]] = []
    for drafts, right in accepted:
        right = min(right, drafts)
        part = scheduled(computed, 1 + drafts, drafts=drafts, unknown=1 + drafts)
        computed += 1 + drafts
        step = resolved(tails, part)
        assert step.start == true_end - 1 <= part.start
        assert step.token_ids[0] == true_end - 1
        sampled = list(range(true_end, true_end + 1 + right))
        true_end += 1 + right
        tails.book(step, sampled, [true_end, true_end + 1, true_end + 2])
        in_flight.append((drafts, right))
        if len(in_flight) == depth:
            booked, kept = in_flight.pop(0)
            computed -= booked - kept
