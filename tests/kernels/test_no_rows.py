"""A rank without rows in a step: every operation takes none of them, and writes nothing."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.caches import INDEX_DIM, RANK, ROPE, make_caches, random
from tests.kernels.conftest import MakeBackend
from tests.kernels.test_native_linear import make_mlp, make_weight

from longfill.kernels.interface import ExpertChoice, RequestRows, ScoredRows, ScreenCounts, StoredLinear
from longfill.kernels.workspace import Workspace, WorkspaceSizes

HIDDEN, INNER, HEADS, TOPK = 24, 40, 3, 8
BF16, FP32 = torch.bfloat16, torch.float32
both_dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NONE = torch.empty(0, dtype=torch.int64)


@both_dtypes
@pytest.mark.parametrize("stored", ["as the model", "fp8"])
def test_products_of_no_rows(backend_of: MakeBackend, dtype: torch.dtype, stored: str) -> None:
    backend, x_TC = backend_of(dtype), torch.empty(0, HIDDEN, dtype=dtype)
    name = {FP32: "float32", BF16: "bfloat16"}[dtype] if stored != "fp8" else "fp8"
    weight, mlp = (
        backend.pack(make_weight(name, INNER, HIDDEN, bias=True)),
        backend.pack_mlp(make_mlp(name, HIDDEN, INNER)),
    )
    for out_dtype in (None, FP32):
        given = out_dtype or dtype
        product_TO, mlp_TC = backend.linear(x_TC, weight, dtype=out_dtype), backend.mlp(x_TC, mlp, dtype=out_dtype)
        assert (product_TO.shape, product_TO.dtype) == ((0, INNER), given)
        assert (mlp_TC.shape, mlp_TC.dtype) == ((0, HIDDEN), given)
        for shared in (None, mlp):
            mixed_TC = backend.experts(
                x_TC, NONE.view(0, 2), torch.empty(0, 2), [mlp, mlp], shared, dtype=out_dtype
            )  # fmt: skip
            assert (mixed_TC.shape, mixed_TC.dtype) == ((0, HIDDEN), given)
    backend.linear(x_TC, weight, out=torch.empty(0, INNER, dtype=dtype))
    assert backend.rms_norm(x_TC, torch.ones(HIDDEN, dtype=dtype), 1e-6).shape == (0, HIDDEN)
    heads = backend.pack_heads(random(HEADS, RANK, ROPE).to(dtype))
    backend.per_head(torch.empty(0, HEADS, RANK, dtype=dtype), heads, torch.empty(0, HEADS, ROPE, dtype=dtype))


@pytest.mark.parametrize("groups", [(1, None), (2, "top2")])
def test_routes_of_no_rows(backend_of: MakeBackend, groups: tuple[int, str | None]) -> None:
    backend, (num_groups, value) = backend_of(BF16), groups
    choice = ExpertChoice("sigmoid", 2, num_groups, 1, value, normalise=True, scale=1.0)
    router = backend.pack(StoredLinear(random(4, HIDDEN)))
    ids_TK, weights_TK = backend.route(torch.empty(0, HIDDEN, dtype=BF16), router, random(4), choice)
    assert ids_TK.shape == weights_TK.shape == (0, 2)
    assert ids_TK.dtype == torch.int64


@both_dtypes
@pytest.mark.parametrize("outputs", [0, 5])
def test_no_rows_fold(backend_of: MakeBackend, dtype: torch.dtype, outputs: int) -> None:
    for shared_TC in (None, torch.empty(0, HIDDEN)):
        folded_TC = backend_of(dtype).fold_experts(
            random(outputs, HIDDEN), NONE.view(0, 2), torch.empty(0, 2), shared_TC, dtype=dtype
        )  # fmt: skip
        assert (folded_TC.shape, folded_TC.dtype) == ((0, HIDDEN), dtype)


@both_dtypes
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotations_and_stores_of_no_rows(backend_of: MakeBackend, dtype: torch.dtype, interleaved: bool) -> None:
    backend, cos_TF = backend_of(dtype), torch.empty(0, ROPE // 2)
    backend.rotate(
        torch.empty(0, HEADS, ROPE, dtype=dtype), cos_TF, cos_TF, torch.empty(0, HEADS, ROPE, dtype=dtype),
        interleaved=interleaved,
    )  # fmt: skip
    for quantise in (False, True):
        q_TID, w_TI = backend.index_queries(
            torch.empty(0, HEADS * INDEX_DIM, dtype=dtype), torch.empty(0, HEADS), cos_TF, cos_TF,
            interleaved=interleaved, quantise=quantise, w_scale=0.5,
        )  # fmt: skip
        assert (q_TID.shape, w_TI.shape) == ((0, HEADS, INDEX_DIM), (0, HEADS))
    for latent_format, index_format in (
        ("float32", "float32"),
        ("bfloat16", "fp8"),
        ("fp8", "fp8"),
        ("fp8_ds_mla", "fp8"),
    ):
        latent, index, _ = make_caches(20, latent_format=latent_format, index_format=index_format)
        before = latent.rows_NBX.clone(), index.values_NBX.clone()
        backend.store_latent(
            torch.empty(0, RANK + ROPE, dtype=dtype), torch.ones(RANK, dtype=dtype), 1e-6, cos_TF, cos_TF, latent, NONE,
            interleaved=interleaved,
        )  # fmt: skip
        backend.store_index_keys(
            torch.empty(0, INDEX_DIM, dtype=dtype), (torch.ones(INDEX_DIM), torch.zeros(INDEX_DIM)), cos_TF, cos_TF,
            index, NONE, interleaved=interleaved,
        )  # fmt: skip
        assert torch.equal(latent.rows_NBX, before[0])
        assert torch.equal(index.values_NBX, before[1])


@both_dtypes
@pytest.mark.parametrize("query_len", [0, 4])
def test_attention_of_no_rows(backend_of: MakeBackend, dtype: torch.dtype, query_len: int) -> None:
    """The request may have rows elsewhere, or none at all: then its page table may be empty too."""
    cache, _, request = make_caches(20, query_len=4)
    if query_len == 0:
        request = RequestRows(0, 0, 0, NONE, NONE)
        assert request.seq_len == 0
    backend, q_THX = backend_of(dtype), torch.empty(0, HEADS, RANK + ROPE, dtype=dtype)
    out_THR, lse_TH = torch.empty(0, HEADS, RANK, dtype=dtype), torch.empty(0, HEADS)
    backend.sparse_mla(q_THX, cache, request, torch.empty(0, TOPK, dtype=torch.int32), 0.2, out_THR, None, lse_TH)
    backend.dense_mla(q_THX, cache, request, NONE, 0.2, out_THR, lse_TH)
    if query_len == 0:
        backend.gather_rows(cache, request, torch.empty(0, RANK + ROPE))


@pytest.mark.parametrize("index_format", ["float32", "fp8"])
def test_no_rows_select(backend_of: MakeBackend, index_format: str) -> None:
    _, cache, request = make_caches(20, index_format=index_format)
    backend, workspace = backend_of(FP32), Workspace(WorkspaceSizes(2**12, 0, 0, 0, TOPK))
    q_TID, w_TI = torch.empty(0, HEADS, INDEX_DIM), torch.empty(0, HEADS)
    selection_TK, scores_TK = torch.empty(0, TOPK, dtype=torch.int32), torch.empty(0, TOPK)
    for chunks in ([], [[]], [[ScoredRows(request, 0, 0, 19)]], [[ScoredRows(request, 0, 0, 0, NONE)]]):
        counted = backend.index_topk(q_TID, w_TI, cache, chunks, selection_TK, workspace, scores_TK=scores_TK)
        assert counted == ScreenCounts()
