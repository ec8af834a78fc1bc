"""Runs every comparison with transformers on the reference kernels and on each instruction set of the native ones.

For tests only. Invariant: `-m "not slow"` keeps one of them for each test, chosen by its name and most often the best
instruction set; a run of all tests has them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from longfill.kernels.cpu import isa_names
from longfill.kernels.cpu.extension import ISA_VARIABLE, selected_isa
from tests.oracle import harness

KERNELS = ("reference", *isa_names())
BEST = KERNELS[1] if len(KERNELS) > 1 else "reference"
MODULES = ("test_parity", "test_dsa_faults", "test_draft_layer")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in MODULES:
        metafunc.parametrize("kernels", KERNELS, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usual = [BEST] * len(KERNELS) + list(KERNELS)
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "kernels" not in given:
            continue
        others = "-".join(f"{name}={value}" for name, value in sorted(given.items()) if name != "kernels")
        kept = usual[zlib.crc32(f"{item.originalname}{others}".encode()) % len(usual)]
        if given["kernels"] != kept:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels that engines of this test run with: "reference" or an instruction set's name."""
    name = getattr(request, "param", None)
    if name is None:
        yield
        return
    selected_isa.cache_clear()
    if name == "reference":
        monkeypatch.setitem(harness.DEFAULTS, "kernel_backend", "reference")
    else:
        monkeypatch.setenv(ISA_VARIABLE, name)
    yield
    selected_isa.cache_clear()
