"""The native mixture of experts and its router against the reference, and against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.caches import random
from tests.kernels.test_linear import naive_route
from tests.kernels.test_native_linear import BF16, FP32, exact_mlp, make_mlp, make_weight
from tests.native import needs_native
from torch import Tensor

from longfill.kernels.cpu import isa_names
from longfill.kernels.cpu.experts import experts, experts_scratch_bytes, route, route_scratch_bytes
from longfill.kernels.cpu.linear import mlp
from longfill.kernels.cpu.packing import PackedLinear, PackedMlp, pack_linear, pack_mlp
from longfill.kernels.interface import ExpertChoice, StoredLinear, StoredMlp
from longfill.kernels.reference import linear as reference

pytestmark = needs_native

every_isa = pytest.mark.parametrize("isa", isa_names())
HIDDEN, INNER = 40, 33


def make_experts(stored: str, count: int) -> list[StoredMlp]:
    return [make_mlp(stored, HIDDEN, INNER, seed=10 * e) for e in range(count)]


def pack_all(weights: list[StoredMlp], dtype: torch.dtype, isa: str) -> list[PackedMlp]:
    return [pack_mlp(w, compute_dtype=dtype, isa=isa, num_threads=1) for w in weights]


def choices(rows: int, count: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, count, generator=generator).argsort(-1)[:, :k].sort(-1).values
    return ids.contiguous(), torch.rand(rows, k, generator=generator)


def exact_experts(
    x: Tensor, ids: Tensor, factors: Tensor, weights: list[StoredMlp], shared: StoredMlp | None
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64) if shared is None else exact_mlp(x, shared)
    for expert, w in enumerate(weights):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            total[rows] += exact_mlp(x[rows], w) * factors[rows, places].double()[:, None]
    return total


@every_isa
@pytest.mark.parametrize(("stored", "dtype"), [("float32", FP32), ("bfloat16", BF16), ("fp8", BF16), ("fp8", FP32)])
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 60])
def test_experts_equal_the_exact_sum(stored: str, dtype: torch.dtype, with_shared: bool, rows: int, isa: str) -> None:
    weights = make_experts(stored, 5)
    # The shared expert is wider than the others, as where it stands for several.
    shared = make_mlp(stored, HIDDEN, 3 * INNER, seed=99) if with_shared else None
    x = random(rows, HIDDEN).to(dtype)
    ids, factors = choices(rows, 4, 3)  # nobody chooses the last one
    packed_shared = None if shared is None else pack_all([shared], dtype, isa)[0]
    got = experts(x, ids, factors, pack_all(weights, dtype, isa), packed_shared, num_threads=2)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    tolerance = 2e-2 if dtype == BF16 else 2e-5
    want = exact_experts(x, ids, factors, weights, shared)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_experts_agree_with_the_reference(dtype: torch.dtype, isa: str) -> None:
    weights, x = make_experts("float32" if dtype == FP32 else "bfloat16", 6), random(50, HIDDEN).to(dtype)
    ids, factors = choices(50, 6, 2)
    got = experts(x, ids, factors, pack_all(weights, dtype, isa), None, num_threads=1)
    tolerance = 2e-2 if dtype == BF16 else 1e-5
    want = reference.experts(x, ids, factors, tuple(weights))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@every_isa
def test_one_expert_may_take_every_row(isa: str) -> None:
    """More rows than are packed at once, all to one expert; the others are empty."""
    weights, x = make_experts("bfloat16", 3), random(1200, HIDDEN).to(BF16)
    packed = pack_all(weights, BF16, isa)
    ids, factors = torch.full((1200, 1), 1), torch.rand(1200, 1)
    got = experts(x, ids, factors, packed, packed[2], num_threads=2)
    want = exact_experts(x, ids, factors, weights, weights[2])
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    assert torch.equal(experts(x[-1:], ids[-1:], factors[-1:], packed, packed[2], num_threads=1), got[-1:])


@every_isa
@pytest.mark.parametrize(("stored", "dtype"), [("float32", FP32), ("bfloat16", BF16), ("fp8", BF16)])
def test_a_row_keeps_its_bits(stored: str, dtype: torch.dtype, isa: str) -> None:
    packed = pack_all(make_experts(stored, 6), dtype, isa)
    x = random(260, HIDDEN).to(dtype)
    ids, factors = choices(260, 6, 3)

    def run(rows: Tensor | slice, threads: int) -> Tensor:
        return experts(
            x[rows], ids[rows].contiguous(), factors[rows].contiguous(), packed, packed[0], num_threads=threads
        )

    whole = run(slice(None), 1)
    assert not whole.isnan().any()
    for threads in (2, 3):
        assert torch.equal(run(slice(None), threads), whole)
    for count in (1, 2, 5, 6, 7, 191, 192, 193):
        for first in (0, 1, 260 - count):
            rows = slice(first, first + count)
            assert torch.equal(run(rows, 1 + count % 3), whole[rows]), f"{count} rows at {first}"
    order = torch.randperm(260, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(order, 2), whole[order])


@every_isa
def test_what_is_in_a_row_stays_there(isa: str) -> None:
    packed = pack_all(make_experts("bfloat16", 4), BF16, isa)
    x = random(30, HIDDEN).to(BF16)
    ids, factors = choices(30, 4, 2)
    want = experts(x, ids, factors, packed, None, num_threads=1)
    x[11] = float("nan")
    factors[20, 0] = float("nan")
    got = experts(x, ids, factors, packed, None, num_threads=1)
    assert got[[11, 20]].isnan().all()
    others = [row for row in range(30) if row not in (11, 20)]
    assert torch.equal(got[others], want[others])


@every_isa
def test_experts_are_added_in_the_order_of_their_ids(isa: str) -> None:
    """1 and then -1e8 and 1e8 leave 0; any order with 1 last leaves 1. The shared expert comes last."""
    size = 8

    def constant(value: float) -> PackedMlp:
        # silu(30) is 30 to the last bit in fp32, so that the middle is 30 and the output `value`.
        gate = StoredLinear(torch.zeros(1, size), torch.tensor([30.0]))
        up = StoredLinear(torch.zeros(1, size), torch.tensor([1.0]))
        down = StoredLinear(torch.zeros(size, 1), torch.full((size,), value))
        return pack_mlp(StoredMlp(gate, up, down), compute_dtype=FP32, isa=isa, num_threads=1)

    one, low, high = constant(1.0), constant(-1e8), constant(1e8)
    x, ids, factors = torch.zeros(1, size), torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    assert experts(x, ids, factors, [one, low, high], None, num_threads=1).eq(0).all()
    assert experts(x, ids, factors, [low, high, one], None, num_threads=1).eq(1).all()
    assert experts(x, ids[:, :2], factors[:, :2].contiguous(), [low, high], one, num_threads=1).eq(1).all()
    assert experts(x, ids[:, :2], factors[:, :2].contiguous(), [one, low], high, num_threads=1).eq(0).all()


def test_bad_routes_are_refused() -> None:
    packed = pack_all(make_experts("float32", 3), FP32, isa_names()[0])
    x = random(2, HIDDEN)
    good, factors = torch.tensor([[0, 2], [1, 2]]), torch.ones(2, 2)

    def run(ids: Tensor, factors: Tensor = factors, x: Tensor = x) -> None:
        experts(x, ids, factors, packed, None, num_threads=1)

    run(good)
    for outside in (-1, 3):
        with pytest.raises(ValueError, match="no expert"):
            run(torch.tensor([[0, 1], [min(outside, 1), max(outside, 1)]]))
    for unordered in ([2, 1], [1, 1]):
        with pytest.raises(ValueError, match="ascend"):
            run(torch.tensor([[0, 1], unordered]))
    for bad_ids, bad_factors in [(good[:1], factors), (good, factors[:, :1]), (good.T, factors), (good, factors[:1])]:
        with pytest.raises(ValueError, match="contiguous"):
            run(bad_ids, bad_factors)
    with pytest.raises(ValueError, match="width"):
        run(good, x=random(2, HIDDEN + 1))
    with pytest.raises(ValueError, match="there must be an expert"):
        experts(x, good, factors, [], None, num_threads=1)
    one = packed[0]
    with pytest.raises(ValueError, match="inner width"):
        experts(x, good, factors, [replace(one, up=make_wider(one)), *packed[1:]], None, num_threads=1)
    if len(isa_names()) > 1:
        other = pack_all(make_experts("float32", 1), FP32, isa_names()[1])
        with pytest.raises(ValueError, match="instruction set"):
            experts(x, good, factors, [*packed[:2], *other], None, num_threads=1)


def make_wider(mlp: PackedMlp) -> PackedLinear:
    weight = make_weight("float32", mlp.up.out_size + 1, mlp.up.in_size)
    return pack_linear(weight, compute_dtype=FP32, isa=mlp.up.isa, num_threads=1)


def test_scratch_of_experts_and_router() -> None:
    def glm(rows: int, shared: int = 2048, threads: int = 1) -> int:
        return experts_scratch_bytes(
            hidden_size=6144,
            inner_size=2048,
            shared_inner_size=shared,
            num_experts=256,
            experts_per_token=8,
            num_rows=rows,
            compute_dtype=BF16,
            num_threads=threads,
        )

    # Beyond a block of rows only the sums and the routes grow: far less than the middle of all chosen experts.
    assert glm(4096) - glm(2048) == 2048 * (6144 * 4 + 8 * 12)
    assert glm(2048) < 2048 * 8 * 2048 * 2
    assert glm(2048, shared=0) <= glm(2048) < glm(2048, shared=12288)
    assert glm(2048) < glm(2048, threads=2)
    assert route_scratch_bytes(hidden_size=6144, num_experts=256, num_rows=10**6, num_threads=1) < 2**24


def pack_router(router_EC: Tensor, isa: str | None = None) -> PackedLinear:
    return pack_linear(StoredLinear(router_EC), compute_dtype=FP32, isa=isa, num_threads=1)


@every_isa
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [(1, 1, None), (4, 2, "top2"), (4, 2, "max"), (4, 4, "top2"), (4, 1, "max")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_routing_rule(scoring: str, groups: tuple[int, int, str | None], tied: bool, isa: str) -> None:
    num_groups, topk_groups, value = groups
    choice = ExpertChoice(scoring, 2, num_groups, topk_groups, value, normalise=True, scale=2.5)
    x, router = random(60, 8), random(12, 8, seed=1)
    bias = 0.2 * random(12, seed=2)
    if tied:
        router[[1, 4, 5, 9]] = router[0].clone()
        bias[[1, 4, 5, 9]] = bias[0].clone()
    ids, weights = route(x, pack_router(router, isa), bias, choice, num_threads=2)
    logits = (x.double() @ router.double().T).float()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    if tied:
        scores[:, [1, 4, 5, 9]] = scores[:, :1].clone()
    for row in range(60):
        assert ids[row].tolist() == naive_route(scores[row].tolist(), bias.tolist(), choice)
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


@every_isa
@given(
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    group_value=st.sampled_from(["top2", "max", None]),
    num_groups=st.integers(1, 4),
    group_size=st.integers(2, 7),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_routes_equal_the_references_on_exact_logits(
    isa: str, scoring: str, group_value: str | None, num_groups: int, group_size: int, data: st.DataObject
) -> None:
    """Small integer logits have many ties, and are the same in every order of summation; some are not finite."""
    count = num_groups * group_size
    choice = ExpertChoice(
        scoring,
        data.draw(st.integers(1, count)),
        num_groups,
        data.draw(st.integers(1, num_groups)),
        group_value,
        normalise=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1.0, 2.5])),
    )
    values = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 1.0, 2.0, float("nan"), float("inf"), float("-inf")])
    if scoring == "softmax":
        # Rounding of exp differs, so ties of sums might; the reference's NaN rows are tested with sigmoid.
        values = st.sampled_from([-3.0, -1.0, 0.0, 1.0, 2.0])
    # One input of 1: the router's column is the logits.
    router = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)))[:, None]
    x = torch.ones(3, 1)
    got_ids, got_weights = route(x, pack_router(router, isa), None, choice, num_threads=1)
    want_ids, want_weights = reference.route(x, router, None, choice)
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(got_weights, want_weights, rtol=2e-6, atol=1e-7, equal_nan=True)


@every_isa
def test_a_nan_row_is_routed_somewhere(isa: str) -> None:
    choice = ExpertChoice("softmax", 3, 2, 1, "top2", normalise=True, scale=1.0)
    router, x = random(8, 5, seed=1), random(4, 5)
    want_ids, want_weights = route(x, pack_router(router, isa), None, choice, num_threads=1)
    x[2, 1] = float("nan")
    ids, weights = route(x, pack_router(router, isa), None, choice, num_threads=1)
    assert ids[2].tolist() == [0, 1, 2]
    assert weights[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(ids[others], want_ids[others])
    assert torch.equal(weights[others], want_weights[others])


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_keeps_its_route(dtype: torch.dtype, isa: str) -> None:
    choice = ExpertChoice("sigmoid", 4, 4, 2, "top2", normalise=True, scale=2.5)
    router, bias = pack_router(random(36, 150, seed=1), isa), 0.1 * random(36, seed=2)
    x = random(530, 150).to(dtype)
    ids, weights = route(x, router, bias, choice, num_threads=1)
    for count in (1, 2, 31, 33, 511, 512, 513):
        for first in (0, 1, 530 - count):
            rows = slice(first, first + count)
            got_ids, got_weights = route(x[rows], router, bias, choice, num_threads=1 + count % 3)
            assert torch.equal(got_ids, ids[rows])
            assert torch.equal(got_weights, weights[rows])


def test_weights_that_are_not_normalised_are_the_scores_times_the_scale() -> None:
    choice = ExpertChoice("softmax", 3, 1, 1, None, normalise=False, scale=16.0)
    x, router = random(9, 8), random(12, 8, seed=1)
    ids, weights = route(x, pack_router(router), None, choice, num_threads=1)
    torch.testing.assert_close(weights, 16 * (x @ router.T).softmax(-1).gather(1, ids))


def test_bad_choices_are_refused() -> None:
    choice = ExpertChoice("softmax", 3, 4, 2, "max", normalise=False, scale=1.0)
    x, router = random(2, 8), pack_router(random(12, 8, seed=1))

    def refuses(match: str, bias: Tensor | None = None, router: PackedLinear = router, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            route(x, router, bias, replace(choice, **changes), num_threads=1)

    refuses("divide", num_groups=5)
    refuses("kept", topk_groups=5)
    refuses("kept", topk_groups=0)
    refuses("two experts", num_groups=12, group_value="top2")
    refuses("1 to all", experts_per_token=13)
    refuses("scoring", scoring="tanh")
    refuses("value", group_value="median")
    refuses("bias", bias=torch.zeros(11))
    if isa_names()[0] == "avx512_bf16":
        bf16 = pack_linear(StoredLinear(random(12, 8).to(BF16)), compute_dtype=BF16, num_threads=1)
        refuses("products in float32", router=bf16)


@every_isa
def test_the_exponential_is_within_two_units_in_the_last_place(isa: str) -> None:
    """Softmax over the logits 0 and -t: the two weights are 1 / (1 + e) and e / (1 + e), with e = exp(-t)."""
    router = pack_linear(StoredLinear(torch.tensor([[0.0], [-1.0]])), compute_dtype=FP32, isa=isa, num_threads=1)
    choice = ExpertChoice("softmax", 2, 1, 1, None, normalise=False, scale=1.0)
    t = torch.cat([torch.linspace(0, 110, 9001), torch.arange(1, 150) * 0.5 * torch.tensor(2.0).log()])
    _, weights = route(t[:, None], router, None, choice, num_threads=2)
    got, want = weights[:, 1].double() / weights[:, 0].double(), (-t.double()).exp()
    # Beside the exponential's, three roundings of half a unit; the smallest subnormal number is 1.4e-45.
    torch.testing.assert_close(got, want, rtol=3.5 * 2**-23, atol=3e-45)


@every_isa
def test_the_exponential_of_a_gate_is_the_same_one(isa: str) -> None:
    """silu(-t) / -t is 1 / (1 + exp(t)), to which 1 adds nothing for large t."""
    one = StoredLinear(torch.ones(1, 1))
    up = StoredLinear(torch.zeros(1, 1), torch.ones(1))
    packed = pack_mlp(StoredMlp(one, up, one), compute_dtype=FP32, isa=isa, num_threads=1)
    t = torch.linspace(18, 87, 5001)
    got = mlp(-t[:, None], packed, num_threads=1)[:, 0].double()
    torch.testing.assert_close(got, -t.double() / (1 + t.double().exp()), rtol=3.5 * 2**-23, atol=1e-44)
