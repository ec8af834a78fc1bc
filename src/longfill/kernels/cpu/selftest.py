"""Every native operation against the reference on inputs of a few kilobytes, before a model runs on it.

May import torch, the workspace and this folder's files. Invariant: an operation that is wrong on this machine stops the
start with its name; nothing runs on it and nothing falls back in silence.

Values are random but fixed. Index keys, queries and head weights are small integers, so that their scores are exact in
every instruction set, ties among them included, and the selections must be equal.

Suffixes as in `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longfill.errors import KernelError
from longfill.kernels.backend import Backend
from longfill.kernels.cpu.backend import NativeBackend
from longfill.kernels.cpu.extension import ISA_VARIABLE, isa_names, selected_isa
from longfill.kernels.interface import (
    ExpertChoice,
    IndexCache,
    LatentCache,
    RequestRows,
    ScoredRows,
    StoredLinear,
    StoredMlp,
)
from longfill.kernels.workspace import Workspace, WorkspaceSizes

CONTEXT, ROWS, PAGE = 70, 20, 8
"""Tokens: a context longer than a block of attention's keys, and the last of it as rows of the step."""
HIDDEN, INNER, RANK, ROPE, HEADS = 72, 40, 32, 8, 5
INDEX_HEADS, INDEX_DIM, TOPK = 4, 16, 12
BLOCK = (16, 48)
"""Outputs and inputs of an fp8 weight that share a scale."""
ROW_BYTES = {
    "float32": 4 * (RANK + ROPE),
    "bfloat16": 2 * (RANK + ROPE),
    "fp8": RANK + ROPE,
    "fp8_ds_mla": RANK + 4 + 2 * ROPE,
}
"""Of a latent row, by format."""
PAGES = torch.randperm(CONTEXT // PAGE + 3, generator=torch.Generator().manual_seed(1))[: -(-CONTEXT // PAGE)]
REQUEST = RequestRows(first_row=0, query_len=ROWS, start=CONTEXT - ROWS, pages=PAGES)

FLOAT32_ERROR, BFLOAT16_ERROR, FP8_ERROR = 1e-4, 2e-2, 0.13
"""Largest difference from the reference, as a share of its largest value: sums in another order, one rounding to
bfloat16 apart, one step of e4m3 apart."""

Operation = Callable[[Backend], Tensor]


@dataclass(frozen=True)
class Check:
    """One operation; `error` is the largest difference allowed, as a share of the reference's largest value."""

    kernel: str
    run: Operation
    error: float


def self_test(reference: Backend, dtype: torch.dtype) -> None:
    """Run every native operation in `dtype` where it is float32 or bfloat16, else the indexer's alone.

    Takes about 20 ms on one thread. Raises KernelError that names the first operation which fails or differs.
    """
    native = NativeBackend(dtype, num_threads=1)
    checks = _index_checks()
    if dtype in (torch.float32, torch.bfloat16):
        checks = [*_product_checks(dtype), *_row_checks(dtype), *_attention_checks(dtype), *checks]
    for check in checks:
        want = check.run(reference)
        try:
            got = check.run(native)
        except Exception as error:
            raise _broken(check.kernel, f"it fails: {error}") from error
        # Not `>`: a NaN is wrong.
        difference = (got.double() - want.double()).abs().max() / want.double().abs().max()
        if not difference <= check.error:
            raise _broken(
                check.kernel, f"it differs by {difference:.2g} of the largest value; {check.error:g} is allowed"
            )


def _broken(kernel: str, what: str) -> KernelError:
    isa = selected_isa()
    others = [name for name in isa_names() if name != isa]
    other = f"set {ISA_VARIABLE} to another instruction set ({', '.join(others)}), or " if others else ""
    return KernelError(
        f"native kernel {kernel} (instruction set {isa}) is wrong on this machine: compared with the reference at "
        f"start, {what}; {other}use --kernel-backend reference"
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def _error(dtype: torch.dtype) -> float:
    return FLOAT32_ERROR if dtype == torch.float32 else BFLOAT16_ERROR


def _product_checks(dtype: torch.dtype) -> list[Check]:
    x_TC = _random(ROWS, HIDDEN).to(dtype)
    experts = [_mlp(dtype) for _ in range(4)]
    router = StoredLinear(_random(4, HIDDEN))
    choice = ExpertChoice("sigmoid", 2, 2, 1, "top2", normalise=True, scale=1.0)
    heads_HAB = _random(HEADS, RANK, ROPE).to(dtype)

    def per_head(backend: Backend) -> Tensor:
        out_THB = torch.empty(ROWS, HEADS, ROPE, dtype=dtype)
        backend.per_head(_random(ROWS, HEADS, RANK).to(dtype), backend.pack_heads(heads_HAB), out_THB)
        return out_THB

    def mixed(backend: Backend) -> Tensor:
        packed = [backend.pack_mlp(expert) for expert in experts]
        ids_TK, weights_TK = backend.route(x_TC, backend.pack(router), None, choice)
        return backend.experts(x_TC, ids_TK, weights_TK, packed, packed[0])

    def folded(backend: Backend) -> Tensor:
        slots_TK = torch.arange(2 * ROWS).view(ROWS, 2)
        y_SC, weights_TK = _random(2 * ROWS, HIDDEN), _random(ROWS, 2)
        return backend.fold_experts(y_SC, slots_TK, weights_TK, _random(ROWS, HIDDEN), dtype=dtype)

    error = _error(dtype)
    return [
        Check("linear", lambda backend: backend.linear(x_TC, backend.pack(_weight(dtype))), error),
        Check("linear (fp8 weights)", lambda backend: backend.linear(x_TC, backend.pack(_fp8_weight())), error),
        Check("linear (one row)", lambda backend: backend.linear(x_TC[:1], backend.pack(_weight(dtype))), error),
        Check("per_head", per_head, error),
        Check("mlp", lambda backend: backend.mlp(x_TC, backend.pack_mlp(_mlp(dtype))), error),
        Check("route or experts", mixed, error),
        Check("fold_experts", folded, error),
    ]


def _weight(dtype: torch.dtype, out_size: int = 150, in_size: int = HIDDEN) -> StoredLinear:
    return StoredLinear((_random(out_size, in_size) * in_size**-0.5).to(dtype))


def _fp8_weight() -> StoredLinear:
    values = (_random(150, HIDDEN) * 50).to(torch.float8_e4m3fn)
    scale = 2.0 ** _integers(-(-150 // BLOCK[0]), -(-HIDDEN // BLOCK[1]))
    return StoredLinear(values, scale=scale, block=BLOCK)


def _mlp(dtype: torch.dtype) -> StoredMlp:
    wide = _weight(dtype, INNER)
    return StoredMlp(wide, wide, _weight(dtype, HIDDEN, INNER))


def _rotation() -> tuple[Tensor, Tensor]:
    angles_TF = 10 * _random(ROWS, ROPE // 2)
    return angles_TF.cos(), angles_TF.sin()


def _row_checks(dtype: torch.dtype) -> list[Check]:
    x_TC, x_THP = _random(ROWS, HIDDEN).to(dtype), _random(ROWS, HEADS, ROPE).to(dtype)

    def rotate(backend: Backend) -> Tensor:
        out_THP = torch.empty_like(x_THP)
        backend.rotate(x_THP, *_rotation(), out_THP, interleaved=True)
        return out_THP

    def store(backend: Backend, cache_format: str) -> Tensor:
        cache = _latent_cache(cache_format)
        kv_TX, norm_R = _random(ROWS, RANK + ROPE).to(dtype), torch.ones(RANK, dtype=dtype)
        slots_T = _slots(torch.arange(ROWS))
        backend.store_latent(kv_TX, norm_R, 1e-6, *_rotation(), cache, slots_T, interleaved=False)
        return _gather(backend, cache, RequestRows(0, ROWS, 0, PAGES))

    def put(backend: Backend) -> Tensor:
        cache_NBX = _latent_cache("bfloat16").rows_NBX
        rows_TX = torch.arange(ROWS * cache_NBX.shape[2]).to(torch.uint8).view(ROWS, -1)
        backend.put_rows(rows_TX, torch.arange(ROWS).flip(0), cache_NBX, _slots(torch.arange(ROWS)))
        return cache_NBX

    stores = [
        Check(
            f"store_latent or gather_rows ({name})",
            lambda backend, name=name: store(backend, name),  # type: ignore[misc]
            FP8_ERROR if name.startswith("fp8") else _error(torch.bfloat16 if name == "bfloat16" else dtype),
        )
        for name in ROW_BYTES
    ]
    norm = Check(
        "rms_norm", lambda backend: backend.rms_norm(x_TC, torch.ones(HIDDEN, dtype=dtype), 1e-6), _error(dtype)
    )
    return [norm, Check("rotate", rotate, _error(dtype)), Check("put_rows", put, 0.0), *stores]


def _gather(backend: Backend, cache: LatentCache, request: RequestRows) -> Tensor:
    out_LX = torch.empty(request.seq_len, RANK + ROPE)
    backend.gather_rows(cache, request, out_LX)
    return out_LX


def _slots(positions: Tensor) -> Tensor:
    return PAGES[positions // PAGE] * PAGE + positions % PAGE


def _latent_cache(cache_format: str) -> LatentCache:
    rows_NBX = torch.zeros(int(PAGES.max()) + 1, PAGE, ROW_BYTES[cache_format], dtype=torch.uint8)
    return LatentCache(rows_NBX, cache_format, RANK, ROPE, 2.0**-4, 2.0**-4)


def _filled_cache(cache_format: str) -> LatentCache:
    """A whole context of random rows, written without the kernels that are under test."""
    cache = _latent_cache(cache_format)
    rows_NBX = cache.rows_NBX
    if cache_format == "float32":
        rows_NBX.view(torch.float32).copy_(_random(*rows_NBX.shape[:2], RANK + ROPE))
    elif cache_format == "bfloat16":
        rows_NBX.view(torch.bfloat16).copy_(_random(*rows_NBX.shape[:2], RANK + ROPE))
    else:
        rows_NBX[..., :RANK] = _random(*rows_NBX.shape[:2], RANK).to(torch.float8_e4m3fn).view(torch.uint8)
        rope_NBP = _random(*rows_NBX.shape[:2], ROPE)
        if cache_format == "fp8":
            rows_NBX[..., RANK:] = rope_NBP.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            rows_NBX[..., RANK : RANK + 4].view(torch.float32).fill_(1.0)
            rows_NBX[..., RANK + 4 :] = rope_NBP.bfloat16().view(torch.uint8)
    return cache


def _attention_checks(dtype: torch.dtype) -> list[Check]:
    q_THX = _random(ROWS, HEADS, RANK + ROPE).to(dtype)
    positions_T = torch.arange(REQUEST.start, CONTEXT)[:, None]
    columns_K = torch.arange(CONTEXT)
    all_TK = torch.where(columns_K <= positions_T, columns_K, -1).int()

    def attend(backend: Backend, cache: LatentCache, *, dense: bool) -> Tensor:
        out_THR = torch.empty(ROWS, HEADS, RANK, dtype=dtype)
        if dense:
            backend.dense_mla(q_THX, cache, REQUEST, REQUEST.visible(0, ROWS), 0.2, out_THR)
        else:
            backend.sparse_mla(q_THX, cache, REQUEST, all_TK, 0.2, out_THR, None)
        return out_THR

    checks = []
    for name in ROW_BYTES:
        cache = _filled_cache(name)
        for kernel, dense in (("sparse_mla", False), ("dense_mla", True)):
            run = lambda backend, cache=cache, dense=dense: attend(backend, cache, dense=dense)  # noqa: E731
            checks.append(Check(f"{kernel} ({name})", run, _error(dtype)))
    return checks


def _index_checks() -> list[Check]:
    shape = (int(PAGES.max()) + 1, PAGE)
    keys_NBD = _integers(*shape, INDEX_DIM)
    caches = (
        IndexCache(keys_NBD.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones(shape), "fp8", INDEX_DIM),
        IndexCache(keys_NBD.view(torch.uint8), None, "float32", INDEX_DIM),
    )
    q_TID, w_TI = _integers(ROWS, INDEX_HEADS, INDEX_DIM), _integers(ROWS, INDEX_HEADS)
    workspace = Workspace(WorkspaceSizes(2**16, 0, 0, 0, TOPK))

    def select(backend: Backend, cache: IndexCache) -> Tensor:
        selection_TK = torch.full((ROWS, TOPK), -1, dtype=torch.int32)
        chunks = [[ScoredRows(REQUEST, 0, ROWS, REQUEST.start)]]
        backend.index_topk(q_TID, w_TI, cache, chunks, selection_TK, workspace)
        return selection_TK

    def merge(backend: Backend) -> Tensor:
        selection_TK = torch.full((ROWS, TOPK), -1, dtype=torch.int32)
        positions_TN = torch.arange(2 * CONTEXT, dtype=torch.int32).view(-1, 2).T.flatten().expand(ROWS, -1)
        backend.merge_topk(_integers(ROWS, 2 * CONTEXT), positions_TN, selection_TK)
        return selection_TK

    def queries(backend: Backend) -> Tensor:
        q_TJ = _random(ROWS, INDEX_HEADS * INDEX_DIM)
        flags = {"interleaved": True, "quantise": True, "w_scale": 0.5}
        return torch.cat([t.flatten() for t in backend.index_queries(q_TJ, w_TI, *_rotation(), **flags)])  # type: ignore[arg-type]

    def store(backend: Backend) -> Tensor:
        cache = IndexCache(torch.zeros(*shape, INDEX_DIM, dtype=torch.uint8), torch.zeros(shape), "fp8", INDEX_DIM)
        norm = torch.ones(INDEX_DIM), torch.zeros(INDEX_DIM)
        slots_T = _slots(torch.arange(ROWS))
        backend.store_index_keys(_random(ROWS, INDEX_DIM), norm, *_rotation(), cache, slots_T, interleaved=True)
        assert cache.scales_NB is not None
        return cache.values_NBX.view(torch.float8_e4m3fn).float() * cache.scales_NB[..., None]

    topk = [
        Check(f"index_topk ({cache.format} keys)", lambda backend, cache=cache: select(backend, cache), 0.0)  # type: ignore[misc]
        for cache in caches
    ]
    topk.append(Check("merge_topk", merge, 0.0))
    return [*topk, Check("index_queries", queries, FLOAT32_ERROR), Check("store_index_keys", store, FP8_ERROR)]
