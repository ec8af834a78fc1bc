"""Attention over parts of a row's keys, merged by log-sum-exp: the whole, whoever holds which part (CP-01)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.caches import RANK, ROPE, make_caches, random
from tests.kernels.conftest import MakeBackend
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import LatentCache, RequestRows
from longfill.kernels.reference.attention import merge, read_rows

SCALE = 0.2
HEADS = 3
PARALLEL = (1, 2, 3, 4, 8)
LENGTHS = [*sorted({n for world in PARALLEL for n in (world - 1, world, world + 1) if n}), 129, 1000]
# The fixture holds no state that an example could change.
examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attend(
    backend: Backend, q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor,
    context_LX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fp32 outputs and LSE, both filled with what no kernel may leave."""
    out_THR = torch.full((*q_THX.shape[:2], RANK), float("nan"))
    lse_TH = torch.full(q_THX.shape[:2], float("nan"))
    backend.sparse_mla(q_THX, cache, request, selection_TK, SCALE, out_THR, context_LX, lse_TH)
    return out_THR, lse_TH


def exact(q_THX: Tensor, cache: LatentCache, request: RequestRows, selection_TK: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64 over every row's selected keys; a row without any has output 0 and LSE -inf."""
    keys_TKX = read_rows(cache, request.pages, selection_TK.clamp(min=0).long()).double()
    scores_THK = torch.einsum("thx,tkx->thk", q_THX.double(), keys_TKX) * SCALE
    scores_THK = scores_THK.masked_fill((selection_TK < 0)[:, None], float("-inf"))
    out_THR = scores_THK.softmax(-1).nan_to_num(0.0) @ keys_TKX[..., :RANK]
    return out_THR, scores_THK.logsumexp(-1)


def whole_range(request: RequestRows) -> Tensor:
    columns_K = torch.arange(request.seq_len)
    positions_T = torch.arange(request.start, request.seq_len)
    return torch.where(columns_K <= positions_T[:, None], columns_K, -1).int()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world", PARALLEL)
def test_cp_01_shards_of_the_keys_merge_to_the_whole(backend_of: MakeBackend, world: int, length: int) -> None:
    """Key p lies on rank p mod W; -1 stands where another rank holds the key, and short contexts leave ranks empty."""
    rows = min(length, 5)
    cache, _, request = make_caches(length, query_len=rows)
    q_THX, selection_TK = random(rows, HEADS, RANK + ROPE, seed=9), whole_range(request)
    backend = backend_of(torch.float32)
    out_THR, lse_TH = torch.zeros(rows, HEADS, RANK), torch.full((rows, HEADS), float("-inf"))
    for rank in range(world):
        mine_TK = torch.where(selection_TK % world == rank, selection_TK, -1)
        part_THR, part_TH = attend(backend, q_THX, cache, request, mine_TK)
        empty_T = (mine_TK < 0).all(-1)
        assert part_THR[empty_T].eq(0).all()
        assert part_TH[empty_T].eq(float("-inf")).all()
        merge(out_THR, lse_TH, part_THR, part_TH)
    want_THR, want_TH = exact(q_THX, cache, request, selection_TK)
    torch.testing.assert_close(out_THR.double(), want_THR, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_TH.double(), want_TH, rtol=1e-5, atol=1e-5)
    if world == 1:
        whole_THR, whole_TH = attend(backend, q_THX, cache, request, selection_TK)
        assert torch.equal(out_THR, whole_THR)
        assert torch.equal(lse_TH, whole_TH)


@pytest.mark.parametrize("gathered", [False, True])
@given(length=st.integers(1, 200), rows=st.integers(1, 6), k=st.integers(1, 150), share=st.floats(0, 1), data=st.data())
@examples
def test_cp_01_any_two_parts_of_a_selection_merge_to_the_whole(
    backend_of: MakeBackend, gathered: bool, length: int, rows: int, k: int, share: float, data: st.DataObject
) -> None:
    """Also where the keys come from a gathered context, and where the queries are bfloat16 and the outputs are not."""
    rows = min(rows, length)
    cache, _, request = make_caches(length, query_len=rows)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    backend, q_THX = backend_of(dtype), random(rows, HEADS, RANK + ROPE, seed=9).to(dtype)
    context_LX = torch.empty(length, RANK + ROPE) if gathered else None
    if context_LX is not None:
        backend.gather_rows(cache, request, context_LX)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    selection_TK = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        chosen = torch.randperm(request.start + row + 1, generator=generator)[:k].sort().values
        selection_TK[row, : chosen.numel()] = chosen.int()
    first_TK = torch.rand(rows, k, generator=generator) < share
    out_THR, lse_TH = attend(
        backend, q_THX, cache, request, torch.where(first_TK, selection_TK, -1), context_LX
    )  # fmt: skip
    other = attend(backend, q_THX, cache, request, torch.where(first_TK, -1, selection_TK), context_LX)
    merge(out_THR, lse_TH, *other)
    want_THR, want_TH = exact(q_THX, cache, request, selection_TK)
    # A float32 cache is multiplied in fp32 whatever the queries are.
    torch.testing.assert_close(out_THR.double(), want_THR, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_TH.double(), want_TH, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_format", ["bfloat16", "fp8", "fp8_ds_mla"])
def test_cp_01_parts_in_bfloat16_merge_as_exactly_as_the_whole_is(backend_of: MakeBackend, cache_format: str) -> None:
    """Weights rounded to bfloat16 are off by 2^-9, in the parts as in the whole, and no more by merging."""
    cache, _, request = make_caches(300, latent_format=cache_format, query_len=4, scale=2.0**-5, rope_scale=2.0**-5)
    backend, q_THX = backend_of(torch.bfloat16), random(4, HEADS, RANK + ROPE, seed=9).bfloat16()
    selection_TK = whole_range(request)
    want_THR, want_TH = exact(q_THX, cache, request, selection_TK)
    out_THR, lse_TH = torch.zeros(4, HEADS, RANK), torch.full((4, HEADS), float("-inf"))
    for rank in range(3):
        merge(
            out_THR,
            lse_TH,
            *attend(backend, q_THX, cache, request, torch.where(selection_TK % 3 == rank, selection_TK, -1)),
        )
    for got_THR, got_TH in ((out_THR, lse_TH), attend(backend, q_THX, cache, request, selection_TK)):
        torch.testing.assert_close(got_THR.double(), want_THR, rtol=8e-3, atol=8e-3)
        torch.testing.assert_close(got_TH.double(), want_TH, rtol=8e-3, atol=8e-3)
