"""Fixtures of the tests of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny import make_checkpoint

from longfill.worker import memory


@pytest.fixture
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are arithmetic: budgets beyond this machine's memory are planned too."""
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: 2**40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", max_position_embeddings=2**20, num_hidden_layers=2)
    return path
