"""Fixtures for tests with many engines of several ranks. For tests only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.parallel.forked import ForkedProcesses

from longfill.engine.executors import spawn


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Engines of the module fork their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "Processes", ForkedProcesses)
        yield
