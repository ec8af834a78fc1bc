"""Native products with packed weights against the reference, and against themselves however the rows are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.caches import random
from tests.native import needs_native
from tests.tiny import quantise
from torch import Tensor

from longfill.errors import ConfigError
from longfill.kernels.cpu import isa_names
from longfill.kernels.cpu.linear import (
    linear,
    linear_scratch_bytes,
    mlp,
    mlp_scratch_bytes,
    per_head,
    per_head_scratch_bytes,
)
from longfill.kernels.cpu.packing import (
    PackedLinear,
    pack_heads,
    pack_linear,
    pack_mlp,
    packed_bytes,
    packed_heads_bytes,
)
from longfill.kernels.interface import StoredLinear, StoredMlp
from longfill.kernels.reference import linear as reference

pytestmark = needs_native

every_isa = pytest.mark.parametrize("isa", isa_names())
FP32, BF16 = torch.float32, torch.bfloat16
# (stored format, model dtype)
KINDS = [("float32", FP32), ("bfloat16", FP32), ("bfloat16", BF16), ("fp8", FP32), ("fp8", BF16)]
kinds = pytest.mark.parametrize(("stored", "dtype"), KINDS)
# Inputs and outputs about a vector, a panel, a slice of 128 steps of one or two inputs.
SIZES = [(1, 1), (2, 15), (3, 16), (15, 17), (127, 63), (128, 64), (129, 65), (255, 129), (256, 4), (257, 5), (513, 40)]


def make_weight(
    stored: str, outputs: int, inputs: int, block: tuple[int, int] = (128, 128), bias: bool = False, seed: int = 1
) -> StoredLinear:
    values = random(outputs, inputs, seed=seed) * inputs**-0.5
    bias_O = random(outputs, seed=seed + 1) if bias else None
    if stored == "fp8":
        return StoredLinear(*_fp8(values, block), block) if bias_O is None else _with_bias(values, block, bias_O)
    return StoredLinear(values.to(getattr(torch, stored)), bias_O)


def _fp8(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, None, Tensor]:
    # Blocks differ in size, so that a wrong scale shows.
    stored, scale = quantise(values, block)
    return stored, None, scale * 2.0 ** random(*scale.shape, seed=9).round()


def _with_bias(values: Tensor, block: tuple[int, int], bias_O: Tensor) -> StoredLinear:
    stored, _, scale = _fp8(values, block)
    return StoredLinear(stored, bias_O, scale, block)


def plain_values(weight: StoredLinear, dtype: torch.dtype) -> Tensor:
    """The weight as the reference multiplies with it, in fp64."""
    if weight.scale is None:
        return weight.weight.double()
    return weight.rows(0, weight.out_size).to(dtype).double()


def exact(x_TC: Tensor, weight: StoredLinear) -> Tensor:
    out_TO = x_TC.double() @ plain_values(weight, x_TC.dtype).T
    return out_TO if weight.bias is None else out_TO + weight.bias.double()


def assert_rounded(got: Tensor, want: Tensor, magnitude: float = 1.0) -> None:
    """`got` is `want` (fp64) up to fp32 sums and one rounding to its dtype."""
    tolerance = 5e-3 if got.dtype == BF16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2e-5 * magnitude)


@every_isa
@kinds
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_equal_the_exact_ones(stored: str, dtype: torch.dtype, inputs: int, outputs: int, isa: str) -> None:
    for bias in (False, True):
        weight = make_weight(stored, outputs, inputs, bias=bias)
        packed = pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=1)
        for rows in (0, 1, 7):
            x = random(rows, inputs).to(dtype)
            got = linear(x, packed, num_threads=1)
            assert (got.dtype, got.shape) == (dtype, (rows, outputs))
            assert_rounded(got, exact(x, weight), 4.0)


@every_isa
@kinds
def test_products_agree_with_the_reference(stored: str, dtype: torch.dtype, isa: str) -> None:
    weight, x = make_weight(stored, 150, 300), random(70, 300).to(dtype)
    got = linear(x, pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=2), num_threads=2)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}
    # The reference has no product of two dtypes; widening a bf16 weight is exact.
    held = replace(weight, weight=weight.weight.float()) if (stored, dtype) == ("bfloat16", FP32) else weight
    torch.testing.assert_close(got, reference.linear(x, held), **tolerance)


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
@given(
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 300),
    block=st.sampled_from([(128, 128), (16, 48), (1, 1), (7, 5), (64, 1), (1, 64), (500, 500), (32, 33)]),
)
@settings(max_examples=12, deadline=None)
def test_fp8_is_scaled_as_the_reference_does(
    isa: str, dtype: torch.dtype, outputs: int, inputs: int, block: tuple[int, int]
) -> None:
    weight = make_weight("fp8", outputs, inputs, block)
    packed = pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=1)
    values = plain_values(weight, dtype)
    assert torch.equal(packed.rows(0, outputs).double(), values)
    # Rows of the unit matrix read the weights as the products see them.
    assert torch.equal(linear(torch.eye(inputs, dtype=dtype), packed, num_threads=1).double(), values.T)


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("block", [(128, 128), (5, 128)])
def test_every_fp8_value_is_decoded(isa: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    # One input, so that a NaN stays in its output.
    for scale in (1.0, 0.3, -1.7, 3e5):
        weight = StoredLinear(values[:, None], None, torch.full((-(-256 // block[0]), 1), scale), block)
        packed = pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=1)
        want = weight.rows(0, 256).to(dtype).T
        got = linear(torch.ones(1, 1, dtype=dtype), packed, num_threads=1)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(packed.rows(0, 256).T, want.float(), rtol=0, atol=0, equal_nan=True)


@every_isa
@kinds
def test_rows_and_sizes_of_a_packed_weight(stored: str, dtype: torch.dtype, isa: str) -> None:
    weight = make_weight(stored, 150, 77, bias=True)
    packed = pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=2)
    for first, last in [(0, 150), (0, 0), (63, 65), (149, 150)]:
        assert torch.equal(packed.rows(first, last).double(), plain_values(weight, dtype)[first:last])
    assert packed.data.nbytes == packed_bytes(150, 77, weight.weight.dtype, compute_dtype=dtype, isa=isa)
    assert packed.data.data_ptr() % 64 == 0
    assert packed.num_bytes == sum(t.nbytes for t in (packed.data, packed.scale, packed.bias) if t is not None)
    # Little more than the values: a last vector and a last pair.
    assert packed.data.nbytes <= 160 * 78 * weight.weight.itemsize


@every_isa
@kinds
def test_strides_of_the_source_do_not_matter(stored: str, dtype: torch.dtype, isa: str) -> None:
    weight = make_weight(stored, 70, 50)
    values = weight.weight.view(torch.uint8 if stored == "fp8" else weight.weight.dtype)
    spread = torch.zeros(140, 150, dtype=values.dtype)[::2, ::3]
    spread.copy_(values)
    want = pack_linear(weight, compute_dtype=dtype, isa=isa, num_threads=1).data
    for source in (values.T.contiguous().T, spread):
        other = StoredLinear(source.view(weight.weight.dtype), None, weight.scale, weight.block)
        assert torch.equal(pack_linear(other, compute_dtype=dtype, isa=isa, num_threads=3).data, want)


def rows_at(whole: Tensor, first: int, count: int, gap: int) -> Tensor:
    """Those rows in memory of their own, `gap` values apart, among NaN."""
    room = torch.full((count, whole.shape[1] + gap), float("nan"), dtype=whole.dtype)
    room[:, : whole.shape[1]] = whole[first : first + count]
    return room[:, : whole.shape[1]]


@every_isa
@kinds
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 33), (300, 200), (515, 1), (260, 270)])
def test_a_row_keeps_its_bits(stored: str, dtype: torch.dtype, inputs: int, outputs: int, isa: str) -> None:
    packed = pack_linear(make_weight(stored, outputs, inputs), compute_dtype=dtype, isa=isa, num_threads=1)
    x = random(520, inputs).to(dtype)
    whole = linear(x, packed, num_threads=1)
    assert not whole.isnan().any()
    for threads in (2, 3):
        assert torch.equal(linear(x, packed, num_threads=threads), whole)
    for count in (1, 2, 5, 6, 7, 16, 17, 23, 24, 25, 47, 48, 49, 95, 96, 97, 191, 192, 193, 511, 512, 513):
        for first in (0, 1, 5, 520 - count):
            if first + count > 520:
                continue
            got = linear(rows_at(x, first, count, gap=3), packed, num_threads=1 + count % 3)
            assert torch.equal(got, whole[first : first + count]), f"{count} rows at {first}"


@every_isa
@kinds
def test_an_output_keeps_its_bits_beside_fewer_others(stored: str, dtype: torch.dtype, isa: str) -> None:
    """Narrow weights take another way through rows and inputs than wide ones."""
    wide, x = make_weight(stored, 270, 390, block=(128, 64), bias=True), random(130, 390).to(dtype)
    assert wide.bias is not None
    whole = linear(x, pack_linear(wide, compute_dtype=dtype, isa=isa, num_threads=1), num_threads=2)
    for count in (1, 16, 65, 256, 257):
        narrow = StoredLinear(wide.weight[:count], wide.bias[:count], wide.scale, wide.block)
        packed = pack_linear(narrow, compute_dtype=dtype, isa=isa, num_threads=1)
        assert torch.equal(linear(x, packed, num_threads=2), whole[:, :count])


@every_isa
@pytest.mark.parametrize("outputs", [7, 270])
def test_bfloat16_rows_are_widened_for_products_in_float32(outputs: int, isa: str) -> None:
    packed = pack_linear(make_weight("float32", outputs, 300), compute_dtype=FP32, isa=isa, num_threads=1)
    x = random(70, 300).to(BF16)
    got = linear(x, packed, num_threads=2, out=torch.empty(70, outputs))
    assert torch.equal(got, linear(x.float(), packed, num_threads=1))


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_bits_do_depend_on_the_order_of_a_sum(dtype: torch.dtype, isa: str) -> None:
    """The comparison of bits above can fail: the same products added in another order give other bits."""
    x, weight = random(64, 300), make_weight("float32", 40, 300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))

    def product(inputs: Tensor) -> Tensor:
        columns = weight.weight[:, inputs].to(dtype)
        packed = pack_linear(StoredLinear(columns), compute_dtype=dtype, isa=isa, num_threads=1)
        return linear(x[:, inputs].to(dtype), packed, num_threads=1, out=torch.empty(64, 40))

    assert not torch.equal(product(order), product(torch.arange(300)))


@every_isa
def test_long_sums_keep_their_bits_in_smaller_blocks_of_rows(isa: str) -> None:
    """Rows so long that fewer than 512 of them are packed together."""
    packed = pack_linear(make_weight("bfloat16", 3, 20_000), compute_dtype=BF16, isa=isa, num_threads=1)
    x = random(200, 20_000).to(BF16)
    whole = linear(x, packed, num_threads=2)
    for first, count in [(0, 1), (70, 100), (199, 1)]:
        assert torch.equal(linear(x[first : first + count], packed, num_threads=1), whole[first : first + count])


@every_isa
@kinds
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_in_a_row_stays_there(stored: str, dtype: torch.dtype, poison: float, isa: str) -> None:
    packed = pack_linear(make_weight(stored, 70, 33), compute_dtype=dtype, isa=isa, num_threads=1)
    x = random(20, 33).to(dtype)
    want = linear(x, packed, num_threads=1)
    x[[0, 7, 19], 5] = poison
    got = linear(x, packed, num_threads=1)
    assert not got[[0, 7, 19]].isfinite().any()
    untouched = [row for row in range(20) if row not in (0, 7, 19)]
    assert torch.equal(got[untouched], want[untouched])


@every_isa
def test_results_may_go_to_a_strided_place_in_another_dtype(isa: str) -> None:
    packed = pack_linear(make_weight("bfloat16", 70, 33, bias=True), compute_dtype=BF16, isa=isa, num_threads=1)
    x = random(9, 33).to(BF16)
    room = torch.full((9, 100), float("nan"))
    out = linear(x, packed, num_threads=1, out=room[:, 10:80])
    assert out.data_ptr() == room[:, 10:].data_ptr()
    assert torch.equal(room[:, 10:80].to(BF16), linear(x, packed, num_threads=1))
    assert room[:, :10].isnan().all()
    assert room[:, 80:].isnan().all()


@every_isa
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_per_head_products(stored: str, x_dtype: torch.dtype, out_dtype: torch.dtype, isa: str) -> None:
    compute = getattr(torch, stored)
    weight_HAB = random(3, 70, 40, seed=1).to(compute) * 0.1
    heads = pack_heads(weight_HAB, compute_dtype=compute, isa=isa, num_threads=2)
    assert heads.num_bytes == packed_heads_bytes(3, 70, 40, compute, compute_dtype=compute, isa=isa)
    # Both sides lie strided in larger rows: what the projections and the attention hand over.
    x = random(400, 3, 90).to(x_dtype)[:, :, 20:]
    room = torch.full((400, 3, 50), float("nan"), dtype=out_dtype)
    per_head(x, heads, room[:, :, 5:45], num_threads=1)
    used = x.to(BF16) if compute == BF16 and isa == "avx512_bf16" else x
    assert_rounded(room[:, :, 5:45], torch.einsum("tha,hab->thb", used.double(), weight_HAB.double()), 4.0)
    assert room[:, :, :5].isnan().all()
    assert room[:, :, 45:].isnan().all()
    for first, count in [(0, 1), (3, 7), (5, 191), (6, 192), (7, 193), (399, 1)]:
        part = torch.empty(count, 3, 40, dtype=out_dtype)
        per_head(x[first : first + count], heads, part, num_threads=1 + count % 3)
        assert torch.equal(part, room[first : first + count, :, 5:45]), f"{count} rows at {first}"


@every_isa
def test_heads_may_be_packed_from_any_view(isa: str) -> None:
    weight_HBA = random(4, 24, 10, seed=1)
    x, out = random(5, 4, 10), torch.empty(5, 4, 24)
    per_head(
        x,
        pack_heads(weight_HBA.transpose(1, 2), compute_dtype=FP32, isa=isa, num_threads=1),
        out,
        num_threads=2,
    )
    assert_rounded(out, torch.einsum("tha,hba->thb", x.double(), weight_HBA.double()), 4.0)


def make_mlp(stored: str, hidden: int, inner: int, seed: int = 0, bias: bool = False) -> StoredMlp:
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    return StoredMlp(*(make_weight(stored, *shape, seed=seed + 2 * i, bias=bias) for i, shape in enumerate(shapes, 1)))


def exact_mlp(x: Tensor, weights: StoredMlp) -> Tensor:
    """In fp64 but for the middle, which is rounded to the dtype of x."""
    gate, up = exact(x, weights.gate), exact(x, weights.up)
    return exact((gate / (1 + (-gate).exp()) * up).to(x.dtype), weights.down)


@every_isa
@kinds
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (24, 17), (65, 129), (300, 257)])
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(stored: str, dtype: torch.dtype, hidden: int, inner: int, bias: bool, isa: str) -> None:
    weights = make_mlp(stored, hidden, inner, bias=bias)
    packed = pack_mlp(weights, compute_dtype=dtype, isa=isa, num_threads=1)
    x = random(50, hidden).to(dtype)
    got = mlp(x, packed, num_threads=2)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    want = exact_mlp(x, weights)
    tolerance = 2e-2 if dtype == BF16 else 2e-5  # a middle value may round the other way
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for first, count in [(0, 1), (1, 2), (5, 7), (0, 49), (49, 1)]:
        part = mlp(rows_at(x, first, count, gap=5), packed, num_threads=1 + count % 3)
        assert torch.equal(part, got[first : first + count])


@every_isa
def test_swiglu_of_extreme_gates(isa: str) -> None:
    """silu(-big) is -0 and not NaN; silu(big) is big; NaN stays."""
    eye = StoredLinear(torch.eye(8))
    packed = pack_mlp(StoredMlp(eye, eye, eye), compute_dtype=FP32, isa=isa, num_threads=1)
    x = torch.diag(torch.tensor([-200.0, 200.0, -88.0, 88.0, 1e-3, -104.0, float("nan"), 0.0]))
    got = mlp(x[:6], packed, num_threads=1).diag()
    wide = x.diag()[:6].double()
    torch.testing.assert_close(got.double(), wide * wide / (1 + (-wide).exp()), rtol=1e-6, atol=1e-34)
    assert mlp(x[6:7], packed, num_threads=1).isnan().all()


def test_scratch_is_bounded_by_blocks_of_rows() -> None:
    def bytes_of(rows: int, threads: int = 1) -> tuple[int, int, int]:
        common = {"num_rows": rows, "compute_dtype": BF16, "num_threads": threads}
        return (
            linear_scratch_bytes(out_size=4096, in_size=6144, **common),
            per_head_scratch_bytes(out_size=512, in_size=192, **common),
            mlp_scratch_bytes(hidden_size=6144, inner_size=2048, **common),
        )

    assert bytes_of(1000) == bytes_of(1_000_000)
    assert max(bytes_of(1_000_000)) < 32 * 2**20
    assert all(few < many for few, many in zip(bytes_of(1), bytes_of(500), strict=True))
    assert all(one < two for one, two in zip(bytes_of(500), bytes_of(500, threads=2), strict=True))


def test_scratch_is_what_is_allocated() -> None:
    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    packed = pack_linear(make_weight("bfloat16", 64, 30_000), compute_dtype=BF16, num_threads=1)
    x = torch.ones(1, 30_000, dtype=BF16).expand(20_000, -1)
    out = torch.zeros(20_000, 64, dtype=BF16)
    linear(x[:48], packed, num_threads=1, out=out[:48])
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    linear(x, packed, num_threads=1, out=out)
    bound = linear_scratch_bytes(out_size=64, in_size=30_000, num_rows=20_000, compute_dtype=BF16, num_threads=1)
    assert status("VmHWM") - before < bound + 2**20
    assert bound < 2**24


def pack(weight: StoredLinear, dtype: torch.dtype = FP32) -> PackedLinear:
    return pack_linear(weight, compute_dtype=dtype, num_threads=1)


def test_what_does_not_fit_is_refused() -> None:
    packed, x = pack(make_weight("float32", 40, 24)), random(5, 24)
    for bad in (random(5, 25), random(24, 5).T, x.double()):
        with pytest.raises(ValueError, match="x must be"):
            linear(bad, packed, num_threads=1)
    for bad in (torch.empty(4, 40), torch.empty(5, 41), torch.empty(40, 5).T, torch.empty(5, 40).half()):
        with pytest.raises(ValueError, match="out must"):
            linear(x, packed, num_threads=1, out=bad)
    with pytest.raises(ValueError, match="num_threads"):
        linear(x, packed, num_threads=0)
    for first, last in [(-1, 3), (0, 41), (3, 2)]:
        with pytest.raises(ValueError, match="rows outside"):
            packed.rows(first, last)
    heads = pack_heads(random(3, 24, 8), compute_dtype=FP32, num_threads=1)
    with pytest.raises(ValueError, match="x must be"):
        per_head(random(5, 2, 24), heads, torch.empty(5, 3, 8), num_threads=1)
    with pytest.raises(ValueError, match="out must be"):
        per_head(random(5, 3, 24), heads, torch.empty(4, 3, 8), num_threads=1)
    with pytest.raises(ValueError, match="width"):
        mlp(x, pack_mlp(make_mlp("float32", 25, 8), compute_dtype=FP32, num_threads=1), num_threads=1)


def test_weights_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        pack(StoredLinear(random(4, 4).half()))
    with pytest.raises(ConfigError, match="compute in"):
        pack(StoredLinear(random(4, 4)), torch.float16)
    with pytest.raises(ConfigError, match="needs products in float32"):
        pack(StoredLinear(random(4, 4)), BF16)
    fp8 = random(130, 130).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale"):
        pack(StoredLinear(fp8))
    with pytest.raises(ValueError, match="scale a block"):
        pack(StoredLinear(fp8, None, torch.ones(2, 1), (128, 128)))
    with pytest.raises(ValueError, match="bias"):
        pack(StoredLinear(random(4, 4), random(3)))
    with pytest.raises(ValueError, match="at least one input"):
        pack(StoredLinear(random(4, 0)))
    with pytest.raises(ConfigError, match="heads"):
        pack_heads(fp8[None], compute_dtype=FP32, num_threads=1)
