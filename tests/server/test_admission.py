"""Tickets of the queue: bounded, and given back once, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from longfill.errors import OverloadedError
from longfill.server.admission import Admission, Ticket

MOST_REQS, MOST_TOKENS = 4, 100


class Tickets(RuleBasedStateMachine):
    tickets: Bundle[Ticket] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(max_num_queued_reqs=MOST_REQS, max_num_queued_tokens=MOST_TOKENS)
        self.waiting: dict[Ticket, int] = {}
        self.running: set[Ticket] = set()

    @rule(target=tickets)
    def enter(self) -> object:
        tokens = sum(self.waiting.values())
        if len(self.waiting) == MOST_REQS or tokens >= MOST_TOKENS:
            with pytest.raises(OverloadedError) as error:
                self.admission.enter("id", "/v1/completions")
            assert 1 <= error.value.retry_after <= 600
            return Ticket(Admission(max_num_queued_reqs=1, max_num_queued_tokens=1), "stray", "")
        ticket = self.admission.enter("id", "/v1/completions")
        self.waiting[ticket] = 0
        return ticket

    @rule(ticket=tickets, tokens=st.integers(1, 150))
    def queued(self, ticket: Ticket, tokens: int) -> None:
        if ticket not in self.waiting:
            return
        before = sum(self.waiting.values())
        if before and before + tokens > MOST_TOKENS:
            with pytest.raises(OverloadedError, match="prompt tokens"):
                ticket.queued(tokens)
        else:
            ticket.queued(tokens)
            self.waiting[ticket] += tokens

    @rule(ticket=tickets)
    def started(self, ticket: Ticket) -> None:
        if ticket in self.waiting:
            del self.waiting[ticket]
            self.running.add(ticket)
            ticket.started()
        elif ticket in self.running:
            ticket.started()  # every later token says so again

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket) -> None:
        if ticket in self.waiting or ticket in self.running:
            self.waiting.pop(ticket, None)
            self.running.discard(ticket)
            ticket.leave()

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        assert self.admission.num_queued_reqs == len(self.waiting)
        assert self.admission.num_queued_tokens == sum(self.waiting.values())
        assert set(self.admission.tickets.values()) == set(self.waiting) | self.running


TestTickets = Tickets.TestCase


def test_retry_after_is_longer_where_more_waits_and_less_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("longfill.server.admission.time.monotonic", lambda: now)
    admission = Admission(max_num_queued_reqs=4, max_num_queued_tokens=10_000)
    assert admission.retry_after == 5  # nothing is known yet
    for _ in range(10):
        now += 1
        admission.prefilled(100)
    few = admission.enter("a", "")
    few.queued(1000)
    short = admission.retry_after
    admission.enter("b", "").queued(8000)
    assert 1 <= short < admission.retry_after <= 600
