"""Shards of stored weights: the stored values, outputs of the whole along rows, its sum along columns (LOAD-03)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.caches import random
from tests.kernels.conftest import MakeBackend
from tests.kernels.test_native_linear import exact, kinds, make_weight
from torch import Tensor

from longfill.errors import ModelError
from longfill.kernels.backend import Backend
from longfill.kernels.interface import StoredLinear
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.kernels.shards import shard_columns, shard_rows

FP32, BF16 = torch.float32, torch.bfloat16
# The fixture holds no state that an example could change.
examples = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same_outputs(backend: Backend, got_TO: Tensor, want_TO: Tensor) -> None:
    """Outputs of a part are those of the whole, to the bit with native kernels; torch's go by shape and machine."""
    if isinstance(backend, ReferenceBackend):
        torch.testing.assert_close(got_TO, want_TO, rtol=1e-2 if got_TO.dtype == BF16 else 1e-5, atol=1e-4)
    else:
        assert torch.equal(got_TO, want_TO)


def values(weight: StoredLinear) -> Tensor:
    return weight.rows(0, weight.out_size)


@given(
    outputs=st.integers(1, 300), inputs=st.integers(1, 300), data=st.data(),
    block=st.sampled_from([(128, 128), (16, 48), (1, 1), (7, 5), (64, 1), (500, 500)]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_shard_has_the_values_of_its_part(
    outputs: int, inputs: int, block: tuple[int, int], data: st.DataObject
) -> None:
    weight = make_weight(data.draw(st.sampled_from(["float32", "bfloat16", "fp8"])), outputs, inputs, block, bias=True)
    whole = values(weight)
    for shard_of, size in ((shard_rows, outputs), (shard_columns, inputs)):
        first = data.draw(st.integers(0, size - 1))
        last = data.draw(st.integers(first + 1, size))
        shard = shard_of(weight, first, last)
        rows, columns = (
            (slice(first, last), slice(None)) if shard_of is shard_rows else (slice(None), slice(first, last))
        )
        assert torch.equal(values(shard), whole[rows, columns])
        assert shard.weight.data_ptr() == weight.weight[rows, columns].data_ptr()
        assert weight.bias is not None
        if shard_of is shard_rows:
            assert shard.bias is not None
            assert torch.equal(shard.bias, weight.bias[rows])
        else:
            assert (shard.bias is None) == (first > 0)
        # A shard of a shard is one too.
        again = shard_rows(shard_columns(shard, 0, shard.in_size), 0, shard.out_size)
        assert torch.equal(values(again), values(shard))


def test_load_03_eight_ranks_share_blocks_of_128_in_shards_of_80() -> None:
    weight = make_weight("fp8", 640, 640)
    rows = [shard_rows(weight, 80 * rank, 80 * (rank + 1)) for rank in range(8)]
    columns = [shard_columns(weight, 80 * rank, 80 * (rank + 1)) for rank in range(8)]
    blocks = [128, 16, 32, 16, 64, 16, 32, 16]
    assert [shard.block for shard in rows] == [(block, 128) for block in blocks]
    assert [shard.block for shard in columns] == [(128, block) for block in blocks]
    assert torch.equal(torch.cat([values(shard) for shard in rows]), values(weight))
    assert torch.equal(torch.cat([values(shard) for shard in columns], 1), values(weight))
    # Where cuts fall between blocks, the scales are views.
    even = shard_rows(weight, 256, 512)
    assert even.block == weight.block
    assert even.scale is not None
    assert weight.scale is not None
    assert even.scale.data_ptr() == weight.scale[2:].data_ptr()


def test_load_03_every_backend_multiplies_with_shards_of_80(backend_of: MakeBackend) -> None:
    for dtype in (FP32, BF16):
        backend, weight, x_TC = backend_of(dtype), make_weight("fp8", 640, 640, bias=True), random(9, 640).to(dtype)
        whole_TO = backend.linear(x_TC, backend.pack(weight))
        total_TO = torch.zeros(9, 640)
        for first in range(0, 640, 80):
            span = slice(first, first + 80)
            rows_TO = backend.linear(x_TC, backend.pack(shard_rows(weight, first, first + 80)))
            same_outputs(backend, rows_TO, whole_TO[:, span])
            columns = backend.pack(shard_columns(weight, first, first + 80))
            total_TO += backend.linear(x_TC[:, span], columns, dtype=FP32)
        torch.testing.assert_close(total_TO.double(), exact(x_TC, weight), rtol=1e-5, atol=1e-4)


@kinds
@given(rows=st.integers(1, 40), inputs=st.integers(1, 300), cuts=st.sets(st.integers(1, 299), max_size=4))
@examples
def test_shards_along_outputs_have_the_bits_of_the_whole(
    backend_of: MakeBackend, stored: str, dtype: torch.dtype, rows: int, inputs: int, cuts: set[int]
) -> None:
    backend, weight = backend_of(dtype), make_weight(stored, 300, inputs, (48, 48), bias=True)
    x_TC = random(rows, inputs).to(dtype)
    whole_TO = backend.linear(x_TC, backend.pack(weight))
    for first, last in pairwise([0, *sorted(cuts), 300]):
        shard = backend.pack(shard_rows(weight, first, last))
        same_outputs(backend, backend.linear(x_TC, shard), whole_TO[:, first:last])


@kinds
@given(rows=st.integers(1, 40), inputs=st.integers(2, 300), data=st.data())
@examples
def test_shards_along_inputs_add_up_to_the_whole(
    backend_of: MakeBackend, stored: str, dtype: torch.dtype, rows: int, inputs: int, data: st.DataObject
) -> None:
    backend, weight = backend_of(dtype), make_weight(stored, 70, inputs, (48, 48), bias=True)
    x_TC, cuts = random(rows, inputs).to(dtype), data.draw(st.sets(st.integers(1, inputs - 1), max_size=4))
    total_TO = torch.zeros(rows, 70)
    for first, last in pairwise([0, *sorted(cuts), inputs]):
        shard = backend.pack(shard_columns(weight, first, last))
        total_TO += backend.linear(x_TC[:, first:last], shard, dtype=FP32)
    torch.testing.assert_close(total_TO.double(), exact(x_TC, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("first", "last"), [(0, 641), (-1, 80), (80, 80), (81, 80), (640, 720)])
def test_a_shard_that_is_not_there_is_refused(first: int, last: int) -> None:
    weight = make_weight("bfloat16", 640, 640)
    with pytest.raises(ModelError, match=rf"640 outputs has no shard \[{first}, {last}\)"):
        shard_rows(weight, first, last)
    with pytest.raises(ModelError, match=rf"640 inputs has no shard \[{first}, {last}\)"):
        shard_columns(weight, first, last)
