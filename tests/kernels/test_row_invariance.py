"""A row's bits are the same in a call of any number of rows, and at any place in it: every reference operation.

Torch's own operations keep this only in part (measured on x86 with MKL): `sigmoid`, `silu` and `logaddexp` round
differently in the scalar tail behind the last full vector; matrix products sum in other orders below 4 rows or about 16
columns. The operations here avoid the former and pad for the latter. `exp`, `log1p`, `cos`, `softmax`, `logsumexp`,
`layer_norm` and batched products of one matrix a row were found to keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.kernels.caches import INDEX_DIM, RANK, ROPE, make_caches, random
from tests.kernels.test_linear import fp8_weight, make_experts
from torch import Tensor

from longfill.kernels.interface import ExpertChoice, RequestRows, ScoredRows, StoredLinear
from longfill.kernels.reference import attention, indexer, linear
from longfill.kernels.reference.attention import dense_mla, sparse_mla
from longfill.kernels.reference.elementwise import logaddexp, sigmoid, silu
from longfill.kernels.reference.indexer import score_rows
from longfill.kernels.reference.linear import experts, mlp, rms_norm, route
from longfill.kernels.reference.linear import per_head as _per_head
from longfill.kernels.reference.quant import encode_latent, quantise_index_queries
from longfill.kernels.reference.store import rotate
from longfill.kernels.workspace import Workspace, WorkspaceSizes
from longfill.models.config import RopeConfig
from longfill.models.rope import rope_tables

ROWS = 83
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 40)
DTYPES = [torch.float32, torch.bfloat16]


def places(size: int, rows: int = ROWS) -> list[slice]:
    return [slice(first, first + size) for first in sorted({0, 1, 5, (rows - size) // 2, rows - size})]


def assert_rows_keep_their_bits(run: Callable[..., Tensor], *inputs: Tensor) -> None:
    """`run` maps row tensors to a row tensor; compare every part of the call with the whole."""
    whole = run(*inputs)
    assert not whole.isnan().any()
    for size in SIZES:
        for span in places(size):
            assert torch.equal(run(*(x[span] for x in inputs)), whole[span]), f"{size} rows at {span.start}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (33, 47), (512, 1000), (16, 1)])
def test_linear(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight = StoredLinear(random(outputs, inputs, seed=1).to(dtype), random(outputs).to(dtype))
    assert_rows_keep_their_bits(lambda x: linear.linear(x, weight), random(ROWS, inputs).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_linear(dtype: torch.dtype) -> None:
    weight, _ = fp8_weight(300, 70, (128, 32))
    assert_rows_keep_their_bits(lambda x: linear.linear(x, weight), random(ROWS, 70).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4])
def test_projections_per_head(dtype: torch.dtype, heads: int) -> None:
    weight = random(heads, 16, RANK, seed=1).to(dtype)
    assert_rows_keep_their_bits(lambda x: _per_head(x, weight), random(ROWS, heads, 16).to(dtype))
    turned = weight.transpose(1, 2)
    assert_rows_keep_their_bits(lambda x: _per_head(x, turned), random(ROWS, heads, RANK).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [37, 64, 6144])
def test_norm_and_activations(dtype: torch.dtype, width: int) -> None:
    x, weight = random(ROWS, width).to(dtype), random(width, seed=1).to(dtype)
    assert_rows_keep_their_bits(lambda x: rms_norm(x, weight, 1e-6), x)
    assert_rows_keep_their_bits(silu, x)
    assert_rows_keep_their_bits(sigmoid, x)
    assert_rows_keep_their_bits(lambda a, b: logaddexp(a.float(), b.float()), x, random(ROWS, width, seed=2))


@pytest.mark.parametrize("kind", ["default", "yarn"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(kind: str, interleaved: bool) -> None:
    rope = RopeConfig(type="default", theta=10000.0, dim=ROPE)
    if kind == "yarn":
        rope = RopeConfig(
            type="yarn", theta=10000.0, dim=ROPE, factor=4.0, original_max_position_embeddings=64,
            beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        )  # fmt: skip
    for first in (0, 1_000_000):

        def turn(x: Tensor, positions: Tensor) -> Tensor:
            return rotate(x, *rope_tables(rope, positions), interleaved)

        assert_rows_keep_their_bits(turn, random(ROWS, 3, ROPE), torch.arange(first, first + ROWS))


@pytest.mark.parametrize("cache_format", ["float32", "bfloat16", "fp8", "fp8_ds_mla"])
def test_cache_rows_and_quantised_queries(cache_format: str) -> None:
    rows = random(ROWS, RANK), random(ROWS, ROPE, seed=1)
    assert_rows_keep_their_bits(lambda a, b: encode_latent(a, b, cache_format, 0.125, 0.5), *rows)
    q, w = random(ROWS, 4, INDEX_DIM), random(ROWS, 4, seed=1)
    for part in (0, 1):
        assert_rows_keep_their_bits(lambda a, b, part=part: quantise_index_queries(a, b)[part], q, w)


def test_index_keys() -> None:
    norm = random(INDEX_DIM), random(INDEX_DIM, seed=1)
    run = torch.nn.functional.layer_norm
    assert_rows_keep_their_bits(lambda x: run(x, (INDEX_DIM,), *norm, eps=1e-6), random(ROWS, INDEX_DIM))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_routing_and_experts(scoring: str) -> None:
    choice = ExpertChoice(scoring, 2, 3, 2, "top2", normalise=True, scale=2.5)
    router, bias, weights = random(6, 24, seed=1), 0.1 * random(6), make_experts(6)
    for part in (0, 1):
        assert_rows_keep_their_bits(lambda x, part=part: route(x, router, bias, choice)[part], random(ROWS, 24))
    assert_rows_keep_their_bits(lambda x: mlp(x, weights[0]), random(ROWS, 24))
    assert_rows_keep_their_bits(
        lambda x: experts(x, *route(x, router, bias, choice), weights), random(ROWS, 24)
    )  # fmt: skip


def part_of(request: RequestRows, span: slice) -> RequestRows:
    """The request as it stands when only the rows `span` of its last ROWS are in the step."""
    return RequestRows(0, span.stop - span.start, request.start + span.start, request.pages)


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("length", [ROWS, 300])
def test_dense_attention(monkeypatch: pytest.MonkeyPatch, heads: int, length: int) -> None:
    monkeypatch.setattr(attention, "CONTEXT_TILE", 128)
    cache, _, request = make_caches(length, query_len=ROWS)
    q = random(ROWS, heads, RANK + ROPE, seed=3)
    whole = dense_mla(q, cache, request, request.visible(0, ROWS), 0.2)
    for size in SIZES:
        for span in places(size):
            got = dense_mla(q[span], cache, part_of(request, span), request.visible(span.start, span.stop), 0.2)
            for mine, theirs in zip(got, whole, strict=True):
                assert torch.equal(mine, theirs[span]), f"{size} rows at {span.start}"


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("k", [16, 33])
def test_sparse_attention(heads: int, k: int) -> None:
    cache, _, request = make_caches(300, query_len=ROWS)
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(200, generator=generator)[:k].sort().values for _ in range(ROWS)]
    selection = torch.stack(chosen).to(torch.int32)
    selection[::3, k // 2 :] = -1
    queries = random(ROWS, heads, RANK + ROPE, seed=3)
    for part in (0, 1):
        assert_rows_keep_their_bits(
            lambda q, s, part=part: sparse_mla(q, cache, request, s, 0.2)[part], queries, selection
        )


def scores(request: RequestRows, index: object, q: Tensor, w: Tensor, span: slice) -> Tensor:
    """Scores of the rows `span` in a q-chunk of their own."""
    rows = ScoredRows(part_of(request, span), span.start, span.stop - span.start, request.start + span.start)
    sizes = WorkspaceSizes(logits_bytes=2**20, context_rows=0, context_row_bytes=0, selection_rows=0, topk=16)
    return score_rows(q, w, index, rows, Workspace(sizes)).clone()  # type: ignore[arg-type]


@pytest.mark.parametrize("index_format", ["float32", "fp8"])
@pytest.mark.parametrize("length", [ROWS, 300, 600])
def test_index_scores(monkeypatch: pytest.MonkeyPatch, index_format: str, length: int) -> None:
    """Also whatever the number of keys in the last tile: a row's score of a key does not depend on its chunk's end."""
    monkeypatch.setattr(indexer, "KEY_TILE", 256)
    _, index, request = make_caches(length, index_format=index_format, query_len=ROWS)
    q, w = random(ROWS, 5, INDEX_DIM, seed=3), random(ROWS, 5, seed=4)
    whole = scores(request, index, q, w, slice(0, ROWS))
    for size in SIZES:
        for span in places(size):
            keys = request.start + span.stop
            assert torch.equal(scores(request, index, q, w, span), whole[span, :keys]), f"{size} rows at {span.start}"


@pytest.mark.parametrize(
    ("module", "name"), [(linear, "MIN_ROWS"), (indexer, "KEY_STEP")], ids=["few rows", "few keys"]
)
def test_the_padding_is_what_keeps_them(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
    """Gate: without the padding these checks fail."""
    monkeypatch.setattr(module, name, 1)
    checks: Sequence[Callable[[], None]] = (
        lambda: test_linear(torch.float32, 512, 1000),
        lambda: test_dense_attention(monkeypatch, 1, ROWS),
        lambda: test_index_scores(monkeypatch, "float32", 300),
    )
    failed = 0
    for check in checks:
        try:
            check()
        except AssertionError:
            failed += 1
    assert failed, f"{name} = 1 changes nothing here; the padding may no longer be needed"
