"""The native row operations against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.caches import random
from tests.kernels.row_cases import INF, NAN, index_cache, latent_cache, same, slots, strided, tables, unit_rows
from tests.native import needs_native
from torch import Tensor

from longfill.cache.formats import INDEX_FORMATS, LATENT_FORMATS
from longfill.kernels.cpu import isa_names, rows
from longfill.kernels.interface import IndexCache, LatentCache
from longfill.kernels.reference import linear, quant, store

pytestmark = needs_native

every_isa = pytest.mark.parametrize("isa", isa_names())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
both_layouts = pytest.mark.parametrize("interleaved", [True, False])

WIDTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 79, 100, 127, 128, 129, 257, 6144]
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}
"""What one rounding that falls the other way is worth, relative to a value."""


# --- norms


@every_isa
@both_dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_references(isa: str, dtype: torch.dtype, width: int) -> None:
    x = (random(7, width) * torch.exp2(4 * random(7, 1, seed=1))).to(dtype)
    weight = random(width, seed=2).to(dtype)
    got = rows.rms_norm(strided(x), weight, 1e-6, num_threads=2, isa=isa)
    torch.testing.assert_close(got, linear.rms_norm(x, weight, 1e-6), rtol=2 * STEP[dtype], atol=0)
    # With exact sums every bit is fixed.
    x = unit_rows(7, width, dtype)
    assert same(rows.rms_norm(x, weight, 1e-5, num_threads=1, isa=isa), linear.rms_norm(x, weight, 1e-5))


@both_dtypes
def test_the_norm_may_replace_its_input(dtype: torch.dtype) -> None:
    x, weight = random(5, 40).to(dtype), random(40, seed=1).to(dtype)
    expected = rows.rms_norm(x, weight, 1e-6, num_threads=1)
    assert rows.rms_norm(x, weight, 1e-6, num_threads=1, out=x) is x
    assert same(x, expected)


# --- rotary embedding


@every_isa
@both_dtypes
@both_layouts
@pytest.mark.parametrize("pairs", [1, 2, 7, 8, 15, 16, 17, 32])
def test_rotate_is_the_references_bit_for_bit(isa: str, dtype: torch.dtype, interleaved: bool, pairs: int) -> None:
    heads = torch.full((5, 3, 2 * pairs + 9), NAN, dtype=dtype)
    heads[..., 9:] = random(5, 3, 2 * pairs).to(dtype)
    out = torch.full((5, 3, 2 * pairs + 20), 7.0, dtype=dtype)
    cos, sin = tables(5, pairs)
    rows.rotate(heads[..., 9:], cos, sin, interleaved, out[..., 20:], num_threads=2, isa=isa)
    assert same(out[..., 20:], store.rotate(heads[..., 9:], cos, sin, interleaved))
    assert (out[..., :20] == 7).all()
    rows.rotate(heads[..., 9:], cos, sin, interleaved, heads[..., 9:], num_threads=1, isa=isa)
    assert same(out[..., 20:], heads[..., 9:])


# --- rounding to e4m3, through the rotary part of a latent row, which no norm touches


def as_e4m3(x: Tensor, scale: float, isa: str) -> Tensor:
    """e4m3 bytes [N] of finite fp32 values [N]: first of pairs with 1, which angle 0 leaves alone, even -0."""
    per_row = 16
    values = torch.cat([x, x.new_zeros(-len(x) % per_row)]).view(-1, per_row, 1)
    kv = torch.cat([values, torch.ones_like(values)], -1).flatten(1)
    num_rows = len(kv)
    cache = LatentCache(torch.zeros(num_rows, 1, 33, dtype=torch.uint8), "fp8", 1, 32, 1.0, scale)
    rows.store_latent(
        torch.cat([torch.ones(num_rows, 1), kv], 1), torch.ones(1), 0.0,
        torch.ones(num_rows, 16), torch.zeros(num_rows, 16), cache, torch.arange(num_rows),
        interleaved=True, num_threads=1, isa=isa,
    )  # fmt: skip
    return cache.rows_NBX[:, 0, 1::2].flatten()[: len(x)]


def edges() -> Tensor:
    """Every value, every midpoint of two neighbours, what lies beside either, and what no format likes."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, middles, torch.tensor([448.0, 456.0, 464.0, 480.0, 1e9, 3.4e38, 1e-30, 1e-40, 1e-45])])
    beside = [torch.nextafter(exact, torch.tensor(toward)) for toward in (INF, 0.0)]
    positive = torch.cat([exact, *beside, torch.tensor([INF])])
    return torch.cat([positive, -positive])


@every_isa
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**20])
def test_every_boundary_of_e4m3(isa: str, scale: float) -> None:
    # The rotation would make NaN of infinity: that has a test of its own.
    x = edges() * scale
    x = x[x.isfinite()]
    assert same(as_e4m3(x, scale, isa), quant.to_e4m3(x / scale))


@every_isa
def test_e4m3_of_what_is_not_finite(isa: str) -> None:
    """In a query behind its rotary part: infinity saturates, NaN stays, and numbers beside them are rounded."""
    q = torch.zeros(3, 32)
    q[0, 16:19] = torch.tensor([1.0, INF, -INF])
    q[1, 16:19] = torch.tensor([-3.0, NAN, 5e8])
    q[2, 16:19] = torch.tensor([1e-7, -1e-8, 0.0])
    cos, sin, w = torch.ones(3, 8), torch.zeros(3, 8), random(3, 1)
    got = rows.index_queries(q, w, cos, sin, interleaved=True, quantise=True, w_scale=1.0, num_threads=1, isa=isa)
    expected = quant.quantise_index_queries(q.view(3, 1, 32), w)
    assert torch.equal(got[0].nan_to_num(nan=-7.0), expected[0].nan_to_num(nan=-7.0))
    assert same(got[1], expected[1])
    assert got[0][0, 0, 17:19].tolist() == [448.0, -448.0]
    assert got[0][1, 0].isnan().sum() == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_e4m3_of_any_floats(values: list[float]) -> None:
    x = torch.tensor(values)
    for isa in isa_names():
        assert same(as_e4m3(x, 1.0, isa), quant.to_e4m3(x))


# --- latent rows


LATENT_SHAPES = [(512, 64), (128, 32), (132, 4), (16, 8), (252, 20), (128, 128), (260, 60)]


@every_isa
@both_dtypes
@both_layouts
@pytest.mark.parametrize("cache_format", LATENT_FORMATS)
@pytest.mark.parametrize(("rank", "rope_dim"), LATENT_SHAPES)
def test_store_latent_writes_the_references_bytes(
    isa: str, dtype: torch.dtype, interleaved: bool, cache_format: str, rank: int, rope_dim: int
) -> None:
    # An exact norm, so that the bytes are fixed; the weights give values of all sizes.
    kv = torch.cat([unit_rows(7, rank, dtype), random(7, rope_dim).to(dtype)], 1)
    norm = (random(rank, seed=1) * torch.exp2(3 * random(rank, seed=2))).to(dtype)
    cos, sin = tables(7, rope_dim // 2)
    got, expected = latent_cache(cache_format, rank, rope_dim), latent_cache(cache_format, rank, rope_dim)
    rows.store_latent(strided(kv), norm, 1e-5, cos, sin, got, slots(7), interleaved=interleaved, num_threads=2, isa=isa)
    store.store_latent(kv, norm, 1e-5, cos, sin, expected, slots(7), interleaved=interleaved)
    # Nothing beside the rows either: 13 slots and the records' other bytes are still 0xFF.
    assert same(got.rows_NBX, expected.rows_NBX)
    assert (got.rows_NBX.flatten(0, 1) == 0xFF).all(1).sum() == 20 - 7


@every_isa
@both_dtypes
@pytest.mark.parametrize("cache_format", LATENT_FORMATS)
@pytest.mark.parametrize(("rank", "rope_dim"), LATENT_SHAPES)
def test_store_latent_normalises_as_the_reference(
    isa: str, dtype: torch.dtype, cache_format: str, rank: int, rope_dim: int
) -> None:
    kv, norm = random(20, rank + rope_dim).to(dtype), (1 + 0.1 * random(rank, seed=1)).to(dtype)
    cos, sin = tables(20, rope_dim // 2)
    caches = [latent_cache(cache_format, rank, rope_dim) for _ in range(2)]
    rows.store_latent(kv, norm, 1e-6, cos, sin, caches[0], slots(20), interleaved=True, num_threads=1, isa=isa)
    store.store_latent(kv, norm, 1e-6, cos, sin, caches[1], slots(20), interleaved=True)
    got, expected = (
        quant.decode_latent(c.rows_NBX.flatten(0, 1).contiguous(), cache_format, rank, rope_dim, c.scale, c.rope_scale)
        for c in caches
    )
    step = {"float32": STEP[dtype], "bfloat16": STEP[torch.bfloat16]}.get(cache_format, 2.0**-3)
    torch.testing.assert_close(got, expected, rtol=2 * step, atol=2.0**-9 if step == 2.0**-3 else 0)
    # A sum in another order moves a value over a boundary rarely.
    if cache_format != "float32":
        assert (got != expected).float().mean() < 0.01
    assert same(got[:, rank:], expected[:, rank:])


# --- the indexer's keys and queries


def index_keys(cache: IndexCache) -> Tensor:
    if cache.scales_NB is None:
        return cache.values_NBX.flatten(0, 1).contiguous().view(torch.float32)
    return cache.values_NBX.view(torch.float8_e4m3fn).float().flatten(0, 1) * cache.scales_NB.flatten()[:, None]


@every_isa
@both_dtypes
@both_layouts
@pytest.mark.parametrize("cache_format", INDEX_FORMATS)
@pytest.mark.parametrize(("dim", "rope_dim"), [(128, 64), (64, 32), (16, 2), (36, 36), (68, 6), (20, 10)])
def test_store_index_keys_is_the_references(
    isa: str, dtype: torch.dtype, interleaved: bool, cache_format: str, dim: int, rope_dim: int
) -> None:
    k = (3 + random(20, dim) * torch.exp2(3 * random(20, 1, seed=1))).to(dtype)
    norm = (1 + 0.2 * random(dim, seed=2), random(dim, seed=3))
    cos, sin = tables(20, rope_dim // 2)
    got, expected = index_cache(cache_format, dim), index_cache(cache_format, dim)
    rows.store_index_keys(strided(k), norm, cos, sin, got, slots(20), interleaved=interleaved, num_threads=2, isa=isa)
    store.store_index_keys(k, norm, cos, sin, expected, slots(20), interleaved=interleaved)
    if got.scales_NB is None:
        torch.testing.assert_close(index_keys(got), index_keys(expected), rtol=1e-4, atol=1e-5)
        return
    assert expected.scales_NB is not None
    assert same(got.scales_NB, expected.scales_NB)
    difference = (index_keys(got) - index_keys(expected)).abs()
    assert (difference <= (index_keys(expected).abs() / 8).maximum(2.0**-9 * got.scales_NB.flatten()[:, None])).all()
    assert (difference > 0).float().mean() < 0.01


@every_isa
@both_layouts
def test_index_keys_with_an_exact_norm_have_the_references_bytes(isa: str, interleaved: bool) -> None:
    # Mean 0 and variance 4 - 1e-6: (x - mean) / sqrt(variance + eps) is +-1 in fp32 whatever the order of the sums.
    k = 2 * torch.cat([torch.ones(7, 32), -torch.ones(7, 32)], 1)[:, torch.randperm(64)]
    norm = (random(64, seed=2) * torch.exp2(4 * random(64, seed=4)), random(64, seed=3))
    cos, sin = tables(7, 16)
    got, expected = index_cache("fp8", 64), index_cache("fp8", 64)
    rows.store_index_keys(k, norm, cos, sin, got, slots(7), interleaved=interleaved, num_threads=1, isa=isa)
    store.store_index_keys(k, norm, cos, sin, expected, slots(7), interleaved=interleaved)
    assert same(got.values_NBX, expected.values_NBX)
    assert got.scales_NB is not None
    assert expected.scales_NB is not None
    assert same(got.scales_NB, expected.scales_NB)


@every_isa
@both_dtypes
@both_layouts
@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize(
    ("heads", "dim", "rope_dim"), [(32, 128, 64), (2, 64, 32), (1, 17, 6), (3, 16, 16), (5, 33, 2)]
)
def test_index_queries_are_the_references_bit_for_bit(
    isa: str, dtype: torch.dtype, interleaved: bool, quantise: bool, heads: int, dim: int, rope_dim: int
) -> None:
    q = (random(9, heads * dim) * torch.exp2(8 * random(9, 1, seed=1))).to(dtype)
    q[3] = 0
    w, (cos, sin) = random(9, heads, seed=2), tables(9, rope_dim // 2)
    factor = dim**-0.5 * heads**-0.5
    got = rows.index_queries(
        strided(q), strided(w), cos, sin,
        interleaved=interleaved, quantise=quantise, w_scale=factor, num_threads=2, isa=isa,
    )  # fmt: skip
    q_TID = q.view(9, heads, dim).float()
    turned = store.rotate(q_TID[..., :rope_dim], cos, sin, interleaved)
    expected = (torch.cat([turned, q_TID[..., rope_dim:]], -1), w * factor)
    if quantise:
        expected = quant.quantise_index_queries(*expected)
    assert same(got[0], expected[0])
    assert same(got[1], expected[1])


@every_isa
def test_the_scale_of_a_query_is_exact_at_powers_of_two_and_beside_them(isa: str) -> None:
    exponents = torch.arange(-60, 100)
    exact = 448 * torch.exp2(exponents.double()).float()
    amax = torch.cat([exact, *(torch.nextafter(exact, torch.tensor(toward)) for toward in (INF, 0.0))])
    q, nothing = torch.zeros(len(amax), 16), torch.empty(len(amax), 0)
    q[:, 11] = -amax
    ones = torch.ones(len(amax), 1)
    _, scales = rows.index_queries(
        q, ones, nothing, nothing, interleaved=True, quantise=True, w_scale=1.0, num_threads=1, isa=isa
    )
    assert same(scales[:, 0], quant.pow2_scale(amax, 1e-10))


@every_isa
@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF, 0x7FC00000])
def test_every_nan_stays_one_in_bf16(isa: str, pattern: int) -> None:
    """Rounding up the last bits of such a NaN would carry into its exponent or its sign."""
    kv = torch.ones(2, 12)
    kv[0, 4:] = torch.tensor([pattern], dtype=torch.uint32).view(torch.float32)
    cache = latent_cache("bfloat16", 4, 8)
    cos, sin = torch.ones(2, 4), torch.zeros(2, 4)
    rows.store_latent(
        kv, torch.ones(4), 0.0, cos, sin, cache, torch.tensor([6, 3]), interleaved=True, num_threads=1, isa=isa
    )
    stored = cache.rows_NBX.flatten(0, 1)[[6, 3]].contiguous().view(torch.bfloat16)
    assert stored[0, 4:].isnan().all()
    assert (stored[1] == 1).all()
