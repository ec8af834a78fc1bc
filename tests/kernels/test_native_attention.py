"""Native attention against the reference, and against itself under every way to cut the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.caches import random
from tests.native import needs_native
from torch import Tensor

from longfill.kernels import cpu
from longfill.kernels.cpu import attention as native
from longfill.kernels.interface import LatentCache, RequestRows
from longfill.kernels.reference import attention as reference
from longfill.kernels.reference.quant import encode_latent

pytestmark = needs_native

FORMATS = ["float32", "bfloat16", "fp8", "fp8_ds_mla"]
BLOCK = 64
SCALE = 0.11
NAN = float("nan")

every_isa = pytest.mark.parametrize("isa", cpu.isa_names())
every_format = pytest.mark.parametrize("cache_format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_cache(
    length: int,
    *,
    rank: int = 40,
    rope_dim: int = 12,
    cache_format: str = "bfloat16",
    page_size: int = 8,
    rows: int = 1,
) -> tuple[LatentCache, RequestRows]:
    """`length` random rows scattered over the pages of records that hold other things too; NaN everywhere else."""
    latent_LX = random(length, rank + rope_dim, seed=length)
    encoded_LX = encode_latent(latent_LX[:, :rank], latent_LX[:, rank:], cache_format, 2.0**-5, 2.0**-4)
    count, row_bytes = -(-length // page_size), encoded_LX.shape[1]
    records = torch.full((count + 3, 12 + page_size * row_bytes + 20), 0xFF, dtype=torch.uint8)
    rows_NBX = records[:, 12 : 12 + page_size * row_bytes].unflatten(1, (page_size, row_bytes))
    pages = torch.randperm(count + 3, generator=torch.Generator().manual_seed(length))[:count]
    positions = torch.arange(length)
    rows_NBX[pages[positions // page_size], positions % page_size] = encoded_LX
    cache = LatentCache(rows_NBX, cache_format, rank, rope_dim, 2.0**-5, 2.0**-4)
    return cache, RequestRows(0, rows, length - rows, pages)


def make_queries(rows: int, heads: int, cache: LatentCache, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(rows, heads, cache.rank + cache.rope_dim, seed=heads).to(dtype)


def make_selection(request: RequestRows, k: int, *, scattered: bool = False) -> Tensor:
    """Ascending random positions of each row's causal range; -1 behind them, or among them where `scattered`."""
    generator = torch.Generator().manual_seed(k)
    selection_TK = torch.full((request.query_len, k), -1, dtype=torch.int32)
    for row in range(request.query_len):
        positions = torch.randperm(request.start + row + 1, generator=generator)[:k].sort().values
        selection_TK[row, : positions.numel()] = positions.int()
    if scattered:
        selection_TK[torch.rand(selection_TK.shape, generator=generator) < 0.3] = -1
    return selection_TK


def select_all(request: RequestRows) -> Tensor:
    """Every row's whole causal range in ascending order, -1 behind it."""
    columns_K = torch.arange(request.seq_len)
    positions_T = torch.arange(request.start, request.seq_len)
    return torch.where(columns_K <= positions_T[:, None], columns_K, -1).int()


def sparse(
    q_THX: Tensor,
    cache: LatentCache,
    request: RequestRows,
    selection_TK: Tensor,
    *,
    isa: str | None = None,
    num_threads: int = 1,
    context_LX: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = SCALE,
    lse_TH: Tensor | None = None,
) -> Tensor:
    out_THR = torch.full((*q_THX.shape[:2], cache.rank), NAN, dtype=dtype)
    native.sparse_mla(
        q_THX, cache, request, selection_TK, scale, out_THR,
        context_LX=context_LX, lse_TH=lse_TH, num_threads=num_threads, isa=isa,
    )  # fmt: skip
    return out_THR


def dense(
    q_THX: Tensor,
    cache: LatentCache,
    request: RequestRows,
    first_position: int,
    *,
    isa: str | None = None,
    num_threads: int = 1,
    scale: float = SCALE,
) -> tuple[Tensor, Tensor]:
    out_THR = torch.full((*q_THX.shape[:2], cache.rank), NAN)
    lse_TH = torch.full(q_THX.shape[:2], NAN)
    visible_T = torch.arange(first_position + 1, first_position + q_THX.shape[0] + 1)
    native.dense_mla(q_THX, cache, request, visible_T, scale, out_THR, lse_TH=lse_TH, num_threads=num_threads, isa=isa)
    return out_THR, lse_TH


def assert_close(got: Tensor, want: Tensor, *, in_bf16: bool) -> None:
    """bf16 weights are off by up to 2^-9 each, of values up to about 4."""
    tolerance = 8e-3 if in_bf16 else 2e-5
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def computes_in_bf16(isa: str, cache_format: str, dtype: torch.dtype) -> bool:
    return isa == "avx512_bf16" and dtype == torch.bfloat16 and cache_format != "float32"


@every_isa
@every_format
@every_dtype
def test_both_equal_the_reference(isa: str, cache_format: str, dtype: torch.dtype) -> None:
    rows, length = 3, 2 * BLOCK + 5
    cache, request = make_cache(length, cache_format=cache_format, rows=rows)
    in_bf16 = computes_in_bf16(isa, cache_format, dtype)
    selection_TK = make_selection(request, BLOCK + 9, scattered=True)
    for heads in (1, 2, 3, 4, 16, 17, 64, 65):
        q_THX = make_queries(rows, heads, cache, dtype)
        want = reference.sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
        assert_close(sparse(q_THX, cache, request, selection_TK, isa=isa), want, in_bf16=in_bf16)
        out, lse = dense(q_THX, cache, request, request.start, isa=isa)
        want, want_lse = reference.dense_mla(q_THX, cache, request, request.visible(0, request.query_len), SCALE)
        assert_close(out, want, in_bf16=in_bf16)
        assert_close(lse, want_lse, in_bf16=in_bf16)


@every_isa
@every_format
@pytest.mark.parametrize(
    ("rank", "rope_dim"), [(4, 4), (16, 16), (20, 12), (64, 4), (68, 64), (128, 32), (132, 8), (512, 64)]
)
def test_every_width_equals_the_reference(isa: str, cache_format: str, rank: int, rope_dim: int) -> None:
    cache, request = make_cache(BLOCK + 20, rank=rank, rope_dim=rope_dim, cache_format=cache_format, rows=2)
    selection_TK = make_selection(request, BLOCK + 3)
    for dtype in (torch.float32, torch.bfloat16):
        q_THX = make_queries(2, 5, cache, dtype)
        want = reference.sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
        got = sparse(q_THX, cache, request, selection_TK, isa=isa)
        assert_close(got, want, in_bf16=computes_in_bf16(isa, cache_format, dtype))


@every_isa
def test_a_float32_cache_of_odd_width_equals_the_reference(isa: str) -> None:
    cache, request = make_cache(30, rank=5, rope_dim=2, cache_format="float32", rows=2)
    q_THX, selection_TK = make_queries(2, 3, cache, torch.bfloat16), make_selection(request, 7)
    want = reference.sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    assert_close(sparse(q_THX, cache, request, selection_TK, isa=isa), want, in_bf16=False)


@every_isa
@every_dtype
@pytest.mark.parametrize("k", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 1])
@pytest.mark.parametrize("selected", ["all", "padded", "scattered"])
def test_every_size_of_selection_equals_the_reference(isa: str, dtype: torch.dtype, k: int, selected: str) -> None:
    rows, length = 4, k + 10 if selected != "padded" else max(4, k // 2)
    cache, request = make_cache(length, rows=rows)
    q_THX = make_queries(rows, 3, cache, dtype)
    selection_TK = make_selection(request, k, scattered=selected == "scattered")
    want = reference.sparse_mla(q_THX, cache, request, selection_TK, SCALE)[0]
    got = sparse(q_THX, cache, request, selection_TK, isa=isa)
    assert_close(got, want, in_bf16=computes_in_bf16(isa, cache.format, dtype))


@every_isa
@every_dtype
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_a_dense_row_has_the_bits_of_a_sparse_one_over_its_whole_range(
    isa: str, dtype: torch.dtype, length: int
) -> None:
    for heads in (1, 4, 17, 64):
        cache, request = make_cache(length, rows=length)
        q_THX = make_queries(length, heads, cache, dtype)
        together, lse = dense(q_THX, cache, request, 0, isa=isa)
        got_lse = torch.full_like(lse, NAN)
        assert_same_bits(sparse(q_THX, cache, request, select_all(request), isa=isa, lse_TH=got_lse), together)
        assert_same_bits(got_lse, lse)


@every_isa
@every_dtype
@pytest.mark.parametrize("heads", [1, 4, 20, 64, 130])
def test_bits_do_not_depend_on_neighbours_or_threads(isa: str, dtype: torch.dtype, heads: int) -> None:
    rows = 35 if heads < 64 else 5
    cache, request = make_cache(BLOCK + rows, rank=20, rope_dim=4, rows=rows)
    q_THX = make_queries(rows, heads, cache, dtype)
    selection_TK = make_selection(request, BLOCK + 7)
    want = sparse(q_THX, cache, request, selection_TK, isa=isa)
    want_dense, want_lse = dense(q_THX, cache, request, request.start, isa=isa)
    for num_threads in (2, 3, 70):
        assert_same_bits(sparse(q_THX, cache, request, selection_TK, isa=isa, num_threads=num_threads), want)
        out, lse = dense(q_THX, cache, request, request.start, isa=isa, num_threads=num_threads)
        assert_same_bits(out, want_dense)
        assert_same_bits(lse, want_lse)
    for span in (slice(0, 1), slice(2, 3), slice(rows - 1, rows), slice(1, rows - 1)):
        for num_threads in (1, 3):
            part = sparse(q_THX[span], cache, request, selection_TK[span], isa=isa, num_threads=num_threads)
            assert_same_bits(part, want[span])
            out, lse = dense(q_THX[span], cache, request, request.start + span.start, isa=isa, num_threads=num_threads)
            assert_same_bits(out, want_dense[span])
            assert_same_bits(lse, want_lse[span])
    one_head = sparse(q_THX[:, heads // 2 : heads // 2 + 1], cache, request, selection_TK, isa=isa)
    assert_same_bits(one_head[:, 0], want[:, heads // 2])


@every_isa
@every_format
@pytest.mark.parametrize("page_size", [1, 8, 24, 64])
def test_pages_and_a_gathered_context_give_the_same_bits(isa: str, cache_format: str, page_size: int) -> None:
    length, rows = 100, 6
    cache, request = make_cache(length, cache_format=cache_format, page_size=page_size, rows=rows)
    other_cache, other_request = make_cache(length, cache_format=cache_format, page_size=5, rows=rows)
    selection_TK = make_selection(request, BLOCK + 4)
    for dtype in (torch.float32, torch.bfloat16):
        q_THX = make_queries(rows, 3, cache, dtype)
        paged = sparse(q_THX, cache, request, selection_TK, isa=isa)
        assert_same_bits(sparse(q_THX, other_cache, other_request, selection_TK, isa=isa), paged)
        for context_dtype in (torch.float32, torch.bfloat16):
            if cache_format == "float32" and context_dtype == torch.bfloat16:
                continue  # would round the keys
            room_LX = torch.full((length + 2, cache.rank + cache.rope_dim + 3), NAN, dtype=context_dtype)
            context_LX = room_LX[1:-1, 1:-2]
            native.gather_rows(cache, request, context_LX, num_threads=1, isa=isa)
            gathered = sparse(q_THX, cache, request, selection_TK, isa=isa, context_LX=context_LX)
            assert_same_bits(gathered, paged)


@every_isa
@every_format
@pytest.mark.parametrize("length", [1, 7, 8, 9, 255, 256, 257])
def test_gathered_rows_are_the_decoded_ones_and_nothing_else_is_written(
    isa: str, cache_format: str, length: int
) -> None:
    cache, request = make_cache(length, cache_format=cache_format, page_size=8)
    for dtype in (torch.float32, torch.bfloat16):
        room_LX = torch.full((length + 2, cache.rank + cache.rope_dim + 2), 7.0, dtype=dtype)
        want_LX = room_LX.clone()
        reference.gather_rows(cache, request, want_LX[1:-1, 1:-1])
        native.gather_rows(cache, request, room_LX[1:-1, 1:-1], num_threads=2, isa=isa)
        assert torch.equal(room_LX, want_LX)


@every_isa
def test_every_byte_of_e4m3_decodes_under_every_scale(isa: str) -> None:
    values_X = torch.arange(256).to(torch.uint8)
    request = RequestRows(0, 1, 0, torch.zeros(1, dtype=torch.int64))
    for scale in (1.0, 2.0**-22, 2.0**20, 0.3, 2.0**-120, 0.0, float("inf"), NAN, -2.0):
        cache = LatentCache(values_X.repeat(1, 1, 1), "fp8", 240, 16, scale, 1.0)
        for dtype in (torch.float32, torch.bfloat16):
            want_LX, got_LX = torch.empty(1, 256, dtype=dtype), torch.full((1, 256), 7.0, dtype=dtype)
            reference.gather_rows(cache, request, want_LX)
            native.gather_rows(cache, request, got_LX, num_threads=1, isa=isa)
            assert torch.equal(got_LX.nan_to_num(nan=7e7), want_LX.nan_to_num(nan=7e7)), scale


@every_isa
@every_dtype
def test_a_row_that_selects_nothing_gives_zero(isa: str, dtype: torch.dtype) -> None:
    cache, request = make_cache(80, rows=3)
    q_THX = make_queries(3, 4, cache, dtype)
    selection_TK = make_selection(request, 70)
    want = sparse(q_THX, cache, request, selection_TK, isa=isa)
    selection_TK[1] = -1
    lse_TH = torch.full((3, 4), NAN)
    got = sparse(q_THX, cache, request, selection_TK, isa=isa, lse_TH=lse_TH)
    want[1] = 0.0
    assert_same_bits(got, want)
    assert lse_TH[1].eq(-float("inf")).all()
    assert lse_TH[[0, 2]].isfinite().all()
    assert sparse(q_THX, cache, request, selection_TK[:, :0], isa=isa).eq(0.0).all()


@every_isa
@every_dtype
def test_a_block_that_selects_nothing_changes_nothing(isa: str, dtype: torch.dtype) -> None:
    cache, request = make_cache(200, rows=2)
    q_THX = make_queries(2, 4, cache, dtype)
    selection_TK = make_selection(request, 2 * BLOCK)
    holed = torch.cat([selection_TK[:, :BLOCK], torch.full((2, BLOCK), -1).int(), selection_TK[:, BLOCK:]], 1)
    got = sparse(q_THX, cache, request, holed, isa=isa)
    assert_same_bits(got, sparse(q_THX, cache, request, selection_TK, isa=isa))


def poison(cache: LatentCache, request: RequestRows, position: int, value: float, column: int) -> None:
    """Put `value` into a stored bfloat16 row."""
    page_size = cache.rows_NBX.shape[1]
    row = cache.rows_NBX[request.pages[position // page_size], position % page_size]
    row[2 * column : 2 * column + 2] = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8)


@every_isa
@every_dtype
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize(("column", "heads"), [(0, 3), (39, 40), (40, 3)])
def test_a_broken_key_reaches_no_row_before_it(
    isa: str, dtype: torch.dtype, value: float, column: int, heads: int
) -> None:
    length = 2 * BLOCK
    for position in (0, BLOCK - 1, BLOCK + 8):
        cache, request = make_cache(length, rank=40, rows=length)
        q_THX = make_queries(length, heads, cache, dtype)
        clean, clean_lse = dense(q_THX, cache, request, 0, isa=isa)
        poison(cache, request, position, value, column)
        together, lse = dense(q_THX, cache, request, 0, isa=isa)
        assert_same_bits(together[:position], clean[:position])
        assert_same_bits(lse[:position], clean_lse[:position])
        # Rows that do see it: NaN where it has a weight or its value is not finite, and the same as alone.
        want = reference.sparse_mla(q_THX, cache, request, select_all(request), SCALE)[0]
        assert torch.equal(together.isnan(), want.isnan())
        for row in (position, length - 1):
            alone, _ = dense(q_THX[row : row + 1], cache, request, row, isa=isa)
            assert torch.equal(together[row : row + 1].nan_to_num(nan=7e7), alone.nan_to_num(nan=7e7))


@every_isa
@every_dtype
def test_many_broken_keys_reach_only_rows_that_see_them(isa: str, dtype: torch.dtype) -> None:
    length = BLOCK + 30
    cache, request = make_cache(length, rows=length)
    q_THX = make_queries(length, 3, cache, dtype)
    clean, _ = dense(q_THX, cache, request, 0, isa=isa)
    for position in range(21, length, 3):
        poison(cache, request, position, NAN, position % cache.rank)
    got, lse = dense(q_THX, cache, request, 0, isa=isa)
    assert_same_bits(got[:21], clean[:21])
    assert got[21:].isnan().flatten(1).any(1).all()
    assert lse[21:].isnan().all()


@every_isa
@every_dtype
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4])
def test_scores_of_any_size_equal_the_reference(isa: str, dtype: torch.dtype, scale: float) -> None:
    """Nearly equal, and so far apart that one key takes all and every other weight is zero."""
    rows, length = 6, 2 * BLOCK + 6
    cache, request = make_cache(length, rows=rows)
    q_THX = make_queries(rows, 4, cache, dtype)
    got, lse = dense(q_THX, cache, request, request.start, isa=isa, scale=scale)
    want, want_lse = reference.dense_mla(q_THX, cache, request, request.visible(0, request.query_len), scale)
    assert_close(got, want, in_bf16=computes_in_bf16(isa, cache.format, dtype))
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-3)


@every_isa
@every_dtype
def test_equal_scores_average_the_values(isa: str, dtype: torch.dtype) -> None:
    cache, request = make_cache(BLOCK + 1)
    q_THX = torch.zeros(1, 3, cache.rank + cache.rope_dim, dtype=dtype)
    got, lse = dense(q_THX, cache, request, request.start, isa=isa)
    mean_R = reference.read_rows(cache, request.pages, torch.arange(BLOCK + 1)).mean(0)[: cache.rank]
    torch.testing.assert_close(got, mean_R.expand(1, 3, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.full((1, 3), BLOCK + 1.0).log())


@every_isa
@every_dtype
def test_scores_of_minus_infinity_have_no_weight(isa: str, dtype: torch.dtype) -> None:
    cache, request = make_cache(BLOCK + 3)
    q_THX = torch.ones(1, 2, cache.rank + cache.rope_dim, dtype=dtype)
    rope_column = cache.rank
    hidden = [*range(BLOCK), BLOCK + 1]  # the whole first block, and a key of the second
    for position in hidden:
        poison(cache, request, position, -float("inf"), rope_column)
    got, lse = dense(q_THX, cache, request, request.start, isa=isa)
    left = torch.tensor([[BLOCK, BLOCK + 2]], dtype=torch.int32)
    want = reference.sparse_mla(q_THX, cache, request, left, SCALE)[0]
    assert_close(got, want, in_bf16=computes_in_bf16(isa, cache.format, dtype))
    for position in (BLOCK, BLOCK + 2):
        poison(cache, request, position, -float("inf"), rope_column)
    got, lse = dense(q_THX, cache, request, request.start, isa=isa)
    assert got.isnan().all()
    assert lse.eq(-float("inf")).all()


@every_isa
def test_strides_and_dtypes_of_rows(isa: str) -> None:
    rows, heads = 5, 3
    cache, request = make_cache(90, rows=rows)
    selection_TK = torch.full((rows, 90), -1, dtype=torch.int32)
    selection_TK[:, :70] = make_selection(request, 70)
    width = cache.rank + cache.rope_dim
    q_HTX = torch.full((heads + 1, rows, width + 4), NAN).to(torch.bfloat16)
    q_THX = q_HTX[1:, :, 2 : width + 2].transpose(0, 1)
    q_THX.copy_(make_queries(rows, heads, cache))
    want = sparse(q_THX.contiguous(), cache, request, selection_TK[:, :70].contiguous(), isa=isa)
    out_HTR = torch.full((heads, rows + 1, cache.rank + 2), 7.0)
    out_THR = out_HTR[:, 1:, 1:-1].transpose(0, 1)
    native.sparse_mla(q_THX, cache, request, selection_TK[:, :70], SCALE, out_THR, num_threads=2, isa=isa)
    assert_same_bits(out_THR.contiguous(), want)
    out_THR.fill_(7.0)
    assert out_HTR.eq(7.0).all()
    in_bf16 = sparse(q_THX, cache, request, selection_TK, isa=isa, dtype=torch.bfloat16)
    assert torch.equal(in_bf16, want.to(torch.bfloat16))


def test_what_does_not_fit_together_is_refused() -> None:
    cache, request = make_cache(30, rows=2)
    q_THX, selection_TK = make_queries(2, 3, cache), make_selection(request, 5)
    out_THR = torch.empty(2, 3, cache.rank)

    def refused(match: str, **changed: object) -> None:
        arguments = {"q": q_THX, "cache": cache, "request": request, "selection": selection_TK, "scale": SCALE}
        arguments |= {"out": out_THR, "context": None, "threads": 1} | changed
        with pytest.raises(ValueError, match=match):
            native.sparse_mla(
                *(arguments[name] for name in ("q", "cache", "request", "selection", "scale", "out")),  # type: ignore[arg-type]
                context_LX=arguments["context"],  # type: ignore[arg-type]
                num_threads=arguments["threads"],  # type: ignore[arg-type]
            )

    refused("beyond the context", selection=torch.full((2, 5), 1000, dtype=torch.int32))
    refused("outside the pool", request=replace(request, pages=request.pages + 100))
    refused("outside the pool", request=replace(request, pages=request.pages - 100))
    refused("beyond the context", context=torch.zeros(1, cache.rank + cache.rope_dim))
    refused("the context must be", context=torch.zeros(30, cache.rank))
    refused("bfloat16 or float32", q=q_THX.double())
    refused("bfloat16 or float32", out=out_THR.half())
    refused("queries must be", q=q_THX[..., 1:])
    refused("outputs must be", out=out_THR[:1])
    refused("outputs must be", out=out_THR.transpose(0, 2).contiguous().transpose(0, 2))
    refused("the selection must be", selection=selection_TK[:1])
    refused("scale must be positive", scale=0.0)
    refused("scale must be positive", scale=NAN)
    refused("num_threads", threads=0)
    refused("pool must be", cache=replace(cache, rank=cache.rank + 4))
    refused("unknown latent cache format", cache=replace(cache, format="int4"))
    for match, counts in (
        ("shorter than the context", [3, 33]),
        ("ascend", [4, 3]),
        ("ascend", [-1, 3]),
        ("one a row", [3]),
    ):
        with pytest.raises(ValueError, match=match):
            native.dense_mla(q_THX, cache, request, torch.tensor(counts), SCALE, out_THR, num_threads=1)
    with pytest.raises(ValueError, match="no room"):
        native.gather_rows(cache, request, torch.empty(29, cache.rank + cache.rope_dim), num_threads=1)
    few_pages = replace(request, pages=request.pages[:2])
    with pytest.raises(ValueError, match="shorter than the context"):
        native.gather_rows(cache, few_pages, torch.empty(30, cache.rank + cache.rope_dim), num_threads=1)


@every_isa
def test_scratch_grows_with_threads_and_shapes_only(isa: str) -> None:
    one = cpu.attention_scratch_bytes(heads=64, rank=512, rope_dim=64, num_threads=1, isa=isa)
    assert cpu.attention_scratch_bytes(heads=64, rank=512, rope_dim=64, num_threads=3, isa=isa) == 3 * one
    assert cpu.attention_scratch_bytes(heads=4, rank=128, rope_dim=32, num_threads=1, isa=isa) < one < 2**20
