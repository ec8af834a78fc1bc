"""Fixtures: the command line in this process, over a fake engine and a standard input of our own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fake_engine import MODEL_LIMIT, Engines

from longfill.cli import session
from longfill.cli.main import exit_code


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(session, "load_engine", made.load)
    monkeypatch.setattr("longfill.cli.check.load_engine", made.load)
    # A fake engine holds no memory, and collecting what all tests have made takes most of a second each time.
    monkeypatch.setattr("longfill.cli.check.gc", SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr("longfill.cli.needle_task.model_limit", lambda _args: MODEL_LIMIT)
    return made


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def longfill(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line in this process."""

    def run(*args: str) -> Ran:
        capsys.readouterr()
        code = exit_code(args)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


class Stdin:
    """Standard input with these bytes, or a terminal when there are none."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self.buffer = self

    def isatty(self) -> bool:
        return self.data is None

    def read(self) -> bytes:
        assert self.data is not None
        return self.data


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes | None], None]:
    return lambda data: monkeypatch.setattr(sys, "stdin", Stdin(data))
