"""What the native row operations refuse, and what they allocate."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.caches import random
from tests.kernels.row_cases import INF, NAN, index_cache, latent_cache, tables
from tests.native import needs_native
from torch import Tensor

from longfill.kernels.cpu import rows
from longfill.kernels.interface import LatentCache

pytestmark = needs_native


def store_with(at: list[int], **changed: Tensor) -> None:
    cache = latent_cache("fp8", 16, 8)
    given = {"kv": random(2, 24), "norm": torch.ones(16), "cos": torch.ones(2, 4), "sin": torch.zeros(2, 4), **changed}
    rows.store_latent(
        given["kv"], given["norm"], 1e-6, given["cos"], given["sin"], cache, torch.tensor(at, dtype=torch.int64),
        interleaved=True, num_threads=1,
    )  # fmt: skip


def test_slots_outside_the_pool_are_refused() -> None:
    store_with([19, 0])
    for at in ([20, 0], [-1, 0], [2**40, 0]):
        with pytest.raises(ValueError, match="slot"):
            store_with(at)
        with pytest.raises(ValueError, match="slot"):
            rows.store_index_keys(
                random(2, 64), (torch.ones(64), torch.zeros(64)), *tables(2, 8), index_cache("fp8", 64),
                torch.tensor(at), interleaved=True, num_threads=1,
            )  # fmt: skip
    with pytest.raises(ValueError, match="slot"):
        store_with([1])


@pytest.mark.parametrize(
    "changed",
    [
        {"kv": torch.zeros(2, 23)},
        {"kv": torch.zeros(2, 48)[:, ::2]},
        {"kv": torch.zeros(2, 24, dtype=torch.bfloat16)},
        {"kv": torch.zeros(2, 24, dtype=torch.float16)},
        {"norm": torch.ones(15)},
        {"norm": torch.ones(32)[::2]},
        {"cos": torch.ones(1, 4)},
        {"sin": torch.ones(2, 3)},
    ],
    ids=str,
)
def test_latent_rows_that_do_not_fit_together_are_refused(changed: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must|row"):
        store_with([0, 1], **changed)


def test_caches_that_are_not_what_they_say_are_refused() -> None:
    cos, sin = tables(2, 4)
    sized = torch.zeros(4, 5, 24, dtype=torch.uint8)

    def write(cache: LatentCache) -> None:
        rows.store_latent(
            random(2, 24), torch.ones(16), 1e-6, cos, sin, cache, torch.tensor([0, 1]), interleaved=True, num_threads=1
        )

    for cache_format in ("float32", "bfloat16", "fp8_ds_mla"):
        with pytest.raises(ValueError, match="size"):
            write(LatentCache(sized, cache_format, 16, 8, 1.0, 1.0))
    with pytest.raises(ValueError, match="fp4"):
        write(LatentCache(sized, "fp4", 16, 8, 1.0, 1.0))
    for scale in (0.0, 3.0, -1.0, NAN, INF, 1e-45):
        for scales in ((scale, 1.0), (1.0, scale)):
            with pytest.raises(ValueError, match="powers of two"):
                write(LatentCache(sized, "fp8", 16, 8, *scales))


def test_results_that_do_not_fit_are_refused() -> None:
    x, weight = random(3, 16), torch.ones(16)
    for out in (torch.empty(3, 15), torch.empty(2, 16), torch.empty(1, 16).expand(3, 16), torch.empty(16, 3).T):
        with pytest.raises(ValueError, match=r"result|overlap|contiguous"):
            rows.rms_norm(x, weight, 1e-6, num_threads=1, out=out)
    with pytest.raises(ValueError, match="num_threads"):
        rows.rms_norm(x, weight, 1e-6, num_threads=0)
    with pytest.raises(ValueError, match="all heads"):
        rows.index_queries(
            random(3, 17), torch.ones(3, 2), *tables(3, 2), interleaved=True, quantise=True, w_scale=1.0, num_threads=1
        )
    with pytest.raises(ValueError, match="rotary part"):
        rows.index_queries(
            random(3, 16), torch.ones(3, 2), *tables(3, 5), interleaved=True, quantise=True, w_scale=1.0, num_threads=1
        )


def test_no_rows_are_no_work() -> None:
    store_with([], kv=random(0, 24), cos=torch.ones(0, 4), sin=torch.ones(0, 4))
    assert rows.rms_norm(random(0, 8), torch.ones(8), 1e-6, num_threads=2).shape == (0, 8)


def test_scratch_grows_with_width_and_threads_alone() -> None:
    assert rows.row_scratch_bytes(576, num_threads=1) == -(-4 * (576 + 16) // 64) * 64
    assert rows.row_scratch_bytes(576, num_threads=3) == 3 * rows.row_scratch_bytes(576, num_threads=1)
