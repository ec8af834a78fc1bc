"""Expert outputs that other ranks computed, folded to the very bits of one rank's sum; and products left unrounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.caches import random
from tests.kernels.conftest import MakeBackend
from tests.kernels.test_native_experts import choices
from tests.kernels.test_native_linear import exact, make_mlp, make_weight
from torch import Tensor

from longfill.kernels.cpu import available
from longfill.kernels.cpu.experts import fold_experts
from longfill.kernels.interface import ExpertChoice, StoredLinear

HIDDEN, INNER, EXPERTS = 40, 33, 6
BF16, FP32 = torch.bfloat16, torch.float32
kinds = pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", FP32), ("bfloat16", BF16), ("fp8", FP32), ("fp8", BF16)]
)
# The fixture holds no state that an example could change.
examples = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@kinds
@given(
    rows=st.integers(0, 70), k=st.integers(1, EXPERTS), with_shared=st.booleans(), unrounded=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@examples
def test_folded_outputs_have_the_bits_of_the_whole_sum(
    backend_of: MakeBackend, stored: str, dtype: torch.dtype, rows: int, k: int, with_shared: bool, unrounded: bool,
    seed: int,
) -> None:  # fmt: skip
    """Slots hold (row, expert) pairs in any order, as they come back from the ranks, and some that nobody asks for."""
    backend = backend_of(dtype)
    experts = [backend.pack_mlp(make_mlp(stored, HIDDEN, INNER, seed=10 * e)) for e in range(EXPERTS)]
    shared = backend.pack_mlp(make_mlp(stored, HIDDEN, 2 * INNER, seed=99)) if with_shared else None
    x_TC, (ids_TK, weights_TK) = random(rows, HIDDEN, seed=seed).to(dtype), choices(rows, EXPERTS, k, seed)
    out_dtype = FP32 if unrounded else dtype
    whole_TC = backend.experts(x_TC, ids_TK, weights_TK, experts, shared, dtype=out_dtype)
    assert (whole_TC.dtype, whole_TC.shape) == (out_dtype, x_TC.shape)

    slot_of = torch.randperm(rows * k, generator=torch.Generator().manual_seed(seed))
    pair_of = slot_of.argsort()
    sent_SC, ids_S1 = x_TC[pair_of // k], ids_TK.flatten()[pair_of][:, None].contiguous()
    y_SC = backend.experts(sent_SC, ids_S1, torch.ones(rows * k, 1), experts, None, dtype=FP32)
    y_SC = torch.cat([y_SC, torch.full((3, HIDDEN), float("nan"))])
    shared_TC = None if shared is None else backend.mlp(x_TC, shared, dtype=FP32)
    folded_TC = backend.fold_experts(y_SC, slot_of.view(rows, k), weights_TK, shared_TC, dtype=out_dtype)
    assert (folded_TC.dtype, folded_TC.shape) == (out_dtype, x_TC.shape)
    assert torch.equal(folded_TC, whole_TC)


def test_a_row_folds_to_the_same_bits_alone(backend_of: MakeBackend) -> None:
    y_SC, shared_TC = random(90, HIDDEN), random(30, HIDDEN, seed=1)
    slots_TK, weights_TK = torch.arange(90).view(30, 3), random(30, 3, seed=2)
    backend = backend_of(BF16)
    whole_TC = backend.fold_experts(y_SC, slots_TK, weights_TK, shared_TC, dtype=BF16)
    for row in range(30):
        at = slice(row, row + 1)
        alone_TC = backend.fold_experts(y_SC, slots_TK[at], weights_TK[at], shared_TC[at], dtype=BF16)
        assert torch.equal(alone_TC, whole_TC[at])


@kinds
def test_fp32_results_are_the_unrounded_sums(backend_of: MakeBackend, stored: str, dtype: torch.dtype) -> None:
    backend, x_TC = backend_of(dtype), random(20, 150).to(dtype)
    weight, mlp = make_weight(stored, 140, 150, bias=True), make_mlp(stored, 150, INNER, bias=True)
    packed, packed_mlp = backend.pack(weight), backend.pack_mlp(mlp)
    close = {"rtol": 1e-5, "atol": 1e-4}
    product_TO = backend.linear(x_TC, packed, dtype=FP32)
    assert product_TO.dtype == FP32
    torch.testing.assert_close(product_TO.double(), exact(x_TC, weight), **close)
    assert torch.equal(backend.linear(x_TC, packed, out=torch.empty_like(product_TO)), product_TO)
    wide_TC, narrow_TC = backend.mlp(x_TC, packed_mlp, dtype=FP32), backend.mlp(x_TC, packed_mlp)
    torch.testing.assert_close(wide_TC.to(dtype), narrow_TC, rtol=1e-2, atol=2**-7)
    assert dtype == FP32 or not torch.equal(wide_TC.to(dtype).float(), wide_TC)


@pytest.mark.parametrize("groups", [(1, None), (3, "top2"), (3, "max")])
def test_routes_are_those_of_the_reference(backend_of: MakeBackend, groups: tuple[int, str | None]) -> None:
    num_groups, value = groups
    choice = ExpertChoice("sigmoid", 2, num_groups, min(2, num_groups), value, normalise=True, scale=2.5)
    backend, router = backend_of(BF16), StoredLinear(random(EXPERTS, HIDDEN, seed=1))
    for rows in (0, 1, 40):
        x_TC = random(rows, HIDDEN).to(BF16)
        ids_TK, weights_TK = backend.route(x_TC, backend.pack(router), None, choice)
        assert (ids_TK.dtype, weights_TK.dtype) == (torch.int64, FP32)
        assert ids_TK.shape == weights_TK.shape == (rows, 2)
        assert (ids_TK[:, 1] > ids_TK[:, 0]).all()
        torch.testing.assert_close(weights_TK.sum(-1), torch.full((rows,), 2.5))


@pytest.mark.skipif(not available(), reason="native checks")
def test_bad_slots_are_refused() -> None:
    y_SC, slots_TK, weights_TK = random(4, HIDDEN), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2)

    def run(
        y: Tensor = y_SC, slots: Tensor = slots_TK, weights: Tensor = weights_TK, shared: Tensor | None = None
    ) -> None:
        fold_experts(y, slots, weights, shared, dtype=BF16, num_threads=1)

    run(shared=random(2, HIDDEN))
    for slot in (-1, 4):
        with pytest.raises(ValueError, match="no output in that slot"):
            run(slots=torch.tensor([[0, 3], [1, slot]]))
    with pytest.raises(ValueError, match="no output in that slot"):
        run(y=y_SC[:0])
    for bad_slots, bad_weights in [(slots_TK.T, weights_TK), (slots_TK, weights_TK[:1]), (slots_TK, weights_TK[:, :1])]:
        with pytest.raises(ValueError, match="contiguous"):
            run(slots=bad_slots, weights=bad_weights)
    for bad in (random(1, HIDDEN), random(2, HIDDEN + 1), random(HIDDEN, 2).T):
        with pytest.raises(ValueError, match="shared expert"):
            run(shared=bad)
