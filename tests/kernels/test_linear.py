"""Matrix products with stored weights, and the mixture of experts, against their plain formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.caches import random
from tests.tiny import expand_scale, quantise
from torch import Tensor

from longfill.kernels.interface import ExpertChoice, StoredLinear, StoredMlp
from longfill.kernels.reference import linear as module
from longfill.kernels.reference.linear import experts, linear, mlp, route


def fp8_weight(rows: int, columns: int, block: tuple[int, int], bias: bool = False) -> tuple[StoredLinear, Tensor]:
    """A block-scaled weight and its dequantised values; blocks differ in size by powers of ten."""
    values = random(rows, columns) * 10 ** random(rows, columns, seed=1).round()
    stored, scale = quantise(values, block)
    plain = stored.float() * expand_scale(scale, values.shape, block)
    return StoredLinear(stored, random(rows, seed=2) if bias else None, scale, block), plain


@pytest.mark.parametrize(("rows", "columns"), [(1000, 300), (128, 128), (129, 127), (1, 1), (1024, 64), (1025, 64)])
@pytest.mark.parametrize("block", [(128, 128), (16, 48)])
def test_fp8_blocks_that_do_not_divide_the_weight(rows: int, columns: int, block: tuple[int, int]) -> None:
    weight, plain = fp8_weight(rows, columns, block, bias=True)
    x = random(5, columns, seed=3)
    torch.testing.assert_close(linear(x, weight), F.linear(x, plain, weight.bias), rtol=1e-4, atol=1e-3)
    assert torch.equal(weight.rows(0, rows), plain)


@pytest.mark.parametrize("slice_rows", [1, 7, 100, 127, 128, 129, 999, 1000, 1001])
def test_slices_of_a_dequantised_weight_fit_together(monkeypatch: pytest.MonkeyPatch, slice_rows: int) -> None:
    weight, plain = fp8_weight(1000, 300, (128, 128))
    monkeypatch.setattr(module, "DEQUANT_ROWS", slice_rows)
    x = random(3, 300, seed=3)
    torch.testing.assert_close(linear(x, weight), x @ plain.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_product_in_the_inputs_dtype(rows: int, dtype: torch.dtype) -> None:
    weight = StoredLinear(random(40, 24).to(dtype), random(40, seed=1).to(dtype))
    x = random(rows, 24, seed=2).to(dtype)
    got = linear(x, weight)
    assert (got.dtype, got.shape) == (dtype, (rows, 40))
    assert weight.bias is not None
    want = x.double() @ weight.weight.double().T + weight.bias.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)


def make_experts(count: int, width: int = 24, inner: int = 12) -> tuple[StoredMlp, ...]:
    def weight(seed: int, *shape: int) -> StoredLinear:
        return StoredLinear(random(*shape, seed=seed) * shape[-1] ** -0.5)

    return tuple(
        StoredMlp(weight(3 * e, inner, width), weight(3 * e + 1, inner, width), weight(3 * e + 2, width, inner))
        for e in range(count)
    )


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_experts_equal_a_loop_over_rows(rows: int) -> None:
    weights, x = make_experts(6), random(rows, 24, seed=99)
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3].sort().values for _ in range(rows)])  # 5: unused
    factors = torch.rand(rows, 3, generator=generator)
    want = torch.zeros_like(x)
    for row in range(rows):
        for expert, factor in zip(ids[row].tolist(), factors[row], strict=True):
            w, one = weights[expert], x[row : row + 1]
            inner = F.silu(F.linear(one, w.gate.weight)) * F.linear(one, w.up.weight)
            want[row] += factor * F.linear(inner, w.down.weight)[0]
    torch.testing.assert_close(experts(x, ids, factors, weights), want)
    torch.testing.assert_close(mlp(x, weights[0])[:1], mlp(x[:1], weights[0]), rtol=0, atol=0)


def naive_route(scores: list[float], bias: list[float], choice: ExpertChoice) -> list[int]:
    """The routing rule for one row, spelled out: groups, then experts, ties to the lower index."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // choice.num_groups
    allowed = range(len(scores))
    if choice.num_groups > 1 and choice.group_value is not None:
        groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(choice.num_groups)]
        value = [sum(group[:2]) if choice.group_value == "top2" else group[0] for group in groups]
        kept = sorted(range(choice.num_groups), key=lambda g: (-value[g], g))[: choice.topk_groups]
        allowed = [e for e in range(len(scores)) if e // size in kept]
    return sorted(sorted(allowed, key=lambda e: (-biased[e], e))[: choice.experts_per_token])


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [(1, 1, None), (4, 2, "top2"), (4, 2, "max"), (4, 4, "top2"), (4, 1, "max")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_routing_rule(scoring: str, groups: tuple[int, int, str | None], tied: bool) -> None:
    num_groups, topk_groups, value = groups
    choice = ExpertChoice(scoring, 2, num_groups, topk_groups, value, normalise=True, scale=2.5)
    x, router = random(60, 8), random(12, 8, seed=1)
    bias = 0.2 * random(12, seed=2)
    if tied:
        # Equal experts in one group and across groups: every row has ties.
        router[[1, 4, 5, 9]] = router[0].clone()
        bias[[1, 4, 5, 9]] = bias[0].clone()
    ids, weights = route(x, router, bias, choice)
    logits = x @ router.T
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    if tied:
        scores[:, [1, 4, 5, 9]] = scores[:, :1].clone()
    for row in range(60):
        assert ids[row].tolist() == naive_route(scores[row].tolist(), bias.tolist(), choice)
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_weights_that_are_not_normalised_are_the_scores_times_the_scale() -> None:
    choice = ExpertChoice("softmax", 3, 1, 1, None, normalise=False, scale=16.0)
    x, router = random(9, 8), random(12, 8, seed=1)
    ids, weights = route(x, router, None, choice)
    torch.testing.assert_close(weights, 16 * (x @ router.T).softmax(-1).gather(1, ids))
