"""A row of the native row operations, whatever is around it: the same bits under every way to cut the work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.caches import random
from tests.kernels.row_cases import INF, NAN, index_cache, latent_cache, same, tables
from tests.native import needs_native
from torch import Tensor

from longfill.cache.formats import LATENT_FORMATS
from longfill.kernels.cpu import isa_names, rows

pytestmark = needs_native

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
both_layouts = pytest.mark.parametrize("interleaved", [True, False])


Operation = Callable[[slice, int, str], tuple[Tensor, ...]]
NUM_ROWS = 150
"""More than one task even of the narrow operations below, whose rows are blown up by heads or width."""


def operations(dtype: torch.dtype, interleaved: bool, poison: int | None = None) -> dict[str, Operation]:
    """Every operation as a function of (rows, threads, instruction set); `poison` makes one row NaN and infinite."""
    x = random(NUM_ROWS, 1040).to(dtype)
    kv, q, heads = x[:, :560], x[:, :1024], x[:, :1024].view(NUM_ROWS, 16, 64)
    if poison is not None:
        x[poison, 3::7] = NAN
        x[poison, 5::7] = INF
    weight, norm = random(1040, seed=1).to(dtype), (random(560, seed=2), random(560, seed=3))
    w = random(NUM_ROWS, 8, seed=5)
    cos, sin = tables(NUM_ROWS, 24)

    def latent(cache_format: str) -> Operation:
        def run(r: slice, threads: int, isa: str) -> tuple[Tensor, ...]:
            cache = latent_cache(cache_format, 512, 48, pages=40)
            at = torch.arange(NUM_ROWS)[r]
            rows.store_latent(
                kv[r], weight[:512], 1e-6, cos[r], sin[r], cache, at,
                interleaved=interleaved, num_threads=threads, isa=isa,
            )  # fmt: skip
            return (cache.rows_NBX.flatten(0, 1)[at],)

        return run

    def keys(r: slice, threads: int, isa: str) -> tuple[Tensor, ...]:
        cache = index_cache("fp8", 560, pages=40)
        at = torch.arange(NUM_ROWS)[r]
        rows.store_index_keys(
            kv[r], norm, cos[r], sin[r], cache, at, interleaved=interleaved, num_threads=threads, isa=isa
        )
        assert cache.scales_NB is not None
        return cache.values_NBX.flatten(0, 1)[at], cache.scales_NB.flatten()[at]

    def turned(r: slice, threads: int, isa: str) -> tuple[Tensor, ...]:
        out = torch.empty_like(heads[r][..., 16:])
        rows.rotate(heads[r][..., 16:], cos[r], sin[r], interleaved, out, num_threads=threads, isa=isa)
        return (out,)

    return {
        "rms_norm": lambda r, threads, isa: (rows.rms_norm(x[r], weight, 1e-6, num_threads=threads, isa=isa),),
        **{f"store_latent {cache_format}": latent(cache_format) for cache_format in LATENT_FORMATS},
        "store_index_keys": keys,
        "index_queries": lambda r, threads, isa: rows.index_queries(
            q[r], w[r], cos[r], sin[r],
            interleaved=interleaved, quantise=True, w_scale=0.1, num_threads=threads, isa=isa,
        ),
        "rotate": turned,
    }  # fmt: skip


@both_dtypes
@both_layouts
def test_a_row_has_the_same_bits_in_every_company_thread_count_and_instruction_set(
    dtype: torch.dtype, interleaved: bool
) -> None:
    for name, operation in operations(dtype, interleaved).items():
        whole = operation(slice(None), 1, isa_names()[0])
        for isa in isa_names():
            for threads in (1, 2, 3):
                assert all(map(same, operation(slice(None), threads, isa), whole)), (name, isa, threads)
            for cut in (slice(0, 1), slice(77, 78), slice(149, 150), slice(30, 97)):
                assert all(same(a, b[cut]) for a, b in zip(operation(cut, 2, isa), whole, strict=True)), (
                    name,
                    isa,
                    cut,
                )


@both_dtypes
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    clean, poisoned = operations(dtype, True), operations(dtype, True, poison=40)
    others = torch.arange(NUM_ROWS) != 40
    for isa in isa_names():
        for name in clean:
            pairs = zip(clean[name](slice(None), 2, isa), poisoned[name](slice(None), 2, isa), strict=True)
            assert all(same(a[others], b[others]) for a, b in pairs), (name, isa)
            got = poisoned[name](slice(40, 41), 1, isa)[0]
            if got.dtype == torch.uint8:
                assert not same(got, clean[name](slice(40, 41), 1, isa)[0]), (name, isa)
            else:
                assert got.isnan().any(), (name, isa)
