"""Every backend that this machine runs, for tests of what all of them promise.

For tests only. Invariant: a native backend runs on the instruction set of its name in every operation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longfill.kernels.backend import Backend
from longfill.kernels.cpu import NativeBackend, attention, experts, indexer, isa_names, linear, packing, rows
from longfill.kernels.reference.backend import ReferenceBackend

MakeBackend = Callable[[torch.dtype], Backend]
"""From the model's dtype."""


@pytest.fixture(params=["reference", *isa_names()])
def backend_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    """The reference, then native kernels of each instruction set, on two threads."""
    isa: str = request.param
    if isa == "reference":
        return lambda _: ReferenceBackend()
    for module in (attention, experts, indexer, linear, packing, rows):
        monkeypatch.setattr(module, "selected_isa", lambda: isa)
    return lambda dtype: NativeBackend(dtype, num_threads=2)
