"""Timing and the machine's ceilings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.native import needs_native

from longfill.bench import timing
from longfill.bench.ceilings import Ceilings, Machine
from longfill.bench.timing import Timing, clock, measure
from longfill.kernels.cpu import isa_names

MIB = 2**20


class FakeCall:
    """Takes the seconds given, one after the other, on a clock of its own."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)
        self.now = 0.0

    def __call__(self) -> None:
        self.now += self.left.pop(0)


def test_the_first_call_is_not_counted_and_best_and_median_are():
    call = FakeCall(9.0, 1.0, 0.5, 0.75)
    assert measure(call, 3, lambda: call.now) == Timing(0.5, 0.75, 3)
    assert call.left == []


def test_a_long_call_is_not_repeated():
    call = FakeCall(0.1, timing.LONGEST_SECONDS * 0.6, 1.0)
    assert measure(call, 5, lambda: call.now).runs == 1
    call = FakeCall(0.1, 2 * timing.LONGEST_SECONDS, 1.0)
    assert measure(call, 5, lambda: call.now).runs == 1


def test_processor_time_is_a_share_of_each_thread():
    one, two = clock(1, processor_time=True), clock(2, processor_time=True)
    assert 0 < two() < one()


@needs_native
@pytest.mark.parametrize("lines", [0, 1, 3, 4, 5, 4 * MIB // 64 - 1, 4 * MIB // 64, 4 * MIB // 64 + 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_reading_touches_every_line_once(lines, threads):
    from longfill.kernels.cpu import _native

    data = torch.randint(0, 256, (64 * lines,), dtype=torch.uint8)
    words = data.numpy().view(np.uint64)[::8]
    assert _native.read_memory(data, threads) == int(words.sum(dtype=np.uint64))


@needs_native
@pytest.mark.parametrize("size", [0, 1, 1000, 3 * MIB + 5])
def test_copying_copies(size):
    from longfill.kernels.cpu import _native

    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    _native.copy_memory(target, source, 2)
    assert torch.equal(source, target)


@needs_native
def test_the_binding_refuses_what_is_not_whole_lines_or_overlaps():
    from longfill.kernels.cpu import _native

    data = torch.zeros(1024, dtype=torch.uint8)
    for wrong in (data[:65], data[1:65]):
        with pytest.raises(ValueError, match="lines of 64"):
            _native.read_memory(wrong, 1)
    with pytest.raises(ValueError, match="overlap"):
        _native.copy_memory(data[:512], data[256:768], 1)
    with pytest.raises(ValueError, match="sizes differ"):
        _native.copy_memory(data[:512], data[512:768], 1)
    for call in (lambda: _native.read_memory(data, 0), lambda: _native.copy_memory(data[:512], data[512:], 0)):
        with pytest.raises(ValueError, match="num_threads"):
            call()


@needs_native
def test_every_instruction_set_has_all_ceilings():
    for isa, threads in itertools.product(isa_names(), (1, 2)):
        machine = Machine(isa, threads, clock(threads, processor_time=False), repeats=1, buffer=MIB)
        ceilings = machine.all()
        assert ceilings.threads == threads
        assert all(ceilings.of(which) > 1e8 for which in ("bf16", "fp32", "read", "copy"))


def test_a_ceiling_is_found_by_its_name():
    ceilings = Ceilings(1, bf16=4.0, fp32=2.0, read=3.0, copy=1.0)
    assert [ceilings.of(which) for which in ("bf16", "fp32", "read", "copy")] == [4.0, 2.0, 3.0, 1.0]
