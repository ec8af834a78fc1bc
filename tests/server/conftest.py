"""Servers that tests of one module share: a random tiny model, a scripted one, and the bundled needle model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.running import Running, running
from tests.server.scripted import random_folder, scripted_folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model."""
    return random_folder(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that writes a tool call when it is told to."""
    return scripted_folder(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def tiny_server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The random model, served as "tiny" with small steps, so that a long prompt takes many."""
    log = tmp_path_factory.mktemp("log") / "tiny.log"
    flags = ("--served-model-name", "tiny", "--max-num-batched-tokens", "256", "--sse-keepalive-interval", "0.5")
    with running(
        random_model, *flags, "--max-model-len", "2048", "--num-gpu-blocks-override", "400", log=log
    ) as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server(scripted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The scripted model, served as "scripted"."""
    log = tmp_path_factory.mktemp("log") / "scripted.log"
    with running(scripted_model, "--served-model-name", "scripted", log=log) as server:
        yield server


@pytest.fixture(scope="module")
def needle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The bundled model, with room for 131,072 tokens and an answer."""
    log = tmp_path_factory.mktemp("log") / "needle.log"
    flags = ("--max-model-len", "131200", "--max-num-batched-tokens", "2048", "--sse-keepalive-interval", "1")
    with running("needle", *flags, log=log) as server:
        yield server
