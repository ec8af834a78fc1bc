"""Rows of a message reach their slots byte by byte, in every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.conftest import MakeBackend

from longfill.kernels.reference.backend import ReferenceBackend


@given(
    count=st.integers(0, 70), given_rows=st.integers(1, 90), size=st.integers(1, 700), page=st.integers(1, 9),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_go_to_their_slots_and_nowhere_else(
    backend_of: MakeBackend, count: int, given_rows: int, size: int, page: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pages = count // page + 2
    message = torch.randint(0, 256, (given_rows, size + 5), dtype=torch.uint8)
    order = torch.randint(0, given_rows, (count,))
    slots = torch.randperm(pages * page)[:count]
    # A layer's part of pages that hold more.
    record = torch.randint(0, 256, (pages, page * size + 7), dtype=torch.uint8)
    kept = record.clone()
    cache = record.as_strided((pages, page, size), (page * size + 7, size, 1), 3)
    backend_of(torch.float32).put_rows(message[:, 2 : 2 + size], order, cache, slots)
    for row, slot in zip(order.tolist(), slots.tolist(), strict=True):
        first = 3 + slot % page * size
        kept[slot // page, first : first + size] = message[row, 2 : 2 + size]
    assert torch.equal(record, kept)


@pytest.mark.parametrize(("order", "slots"), [([2], [0]), ([-1], [0]), ([0], [6]), ([0], [-1]), ([0, 1], [0])])
def test_rows_and_slots_that_are_not_there_are_refused(
    backend_of: MakeBackend, order: list[int], slots: list[int]
) -> None:
    backend = backend_of(torch.float32)
    if isinstance(backend, ReferenceBackend):
        pytest.skip("torch checks its own indices, and counts negative ones from the end")
    cache = torch.zeros(2, 3, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"slot|not there"):
        backend.put_rows(torch.ones(2, 4, dtype=torch.uint8), torch.tensor(order), cache, torch.tensor(slots))
    assert not cache.any()
