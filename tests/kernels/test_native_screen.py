"""The int8 screen of the native indexer: the same bits as without it, and a bound that no exact score exceeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.test_native_index_topk import Case, paged
from tests.native import needs_native
from torch import Tensor

from longfill.errors import ConfigError
from longfill.kernels.cpu import index_topk, isa_names, scratch_bytes
from longfill.kernels.cpu.indexer import SCREENED_ISAS
from longfill.kernels.interface import RequestRows, ScoredRows, ScreenCounts
from longfill.kernels.reference.quant import quantise_index_keys, quantise_index_queries

screened_isa = pytest.mark.parametrize("isa", [isa for isa in isa_names() if isa in SCREENED_ISAS])
pytestmark = needs_native


@dataclass(frozen=True)
class Inputs:
    """Queries [T, I, D] as the kernel takes them, head weights [T, I], e4m3 keys [L, D] and their scales [L]."""

    q_TID: Tensor
    w_TI: Tensor
    values_LD: Tensor
    scales_L: Tensor

    def case(self, page_size: int = 64) -> Case:
        cache, table = paged(self.values_LD, self.scales_L, page_size)
        rows, length = self.q_TID.shape[0], self.values_LD.shape[0]
        return Case(self.q_TID, self.w_TI, cache, RequestRows(0, rows, length - rows, table))


@dataclass(frozen=True)
class Size:
    heads: int
    dim: int
    rows: int
    length: int


def gaussian(size: Size) -> Inputs:
    q_TID = torch.randn(size.rows, size.heads, size.dim)
    q_TID, w_TI = quantise_index_queries(q_TID, torch.randn(size.rows, size.heads))
    return Inputs(q_TID, w_TI, *quantise_index_keys(torch.randn(size.length, size.dim)))


def with_keys(size: Size, k_LD: Tensor) -> Inputs:
    values, scales = quantise_index_keys(k_LD)
    return replace(gaussian(size), values_LD=values, scales_L=scales)


def clustered(size: Size) -> Inputs:
    centres = torch.randn(30, size.dim)
    k_LD = centres[torch.randint(30, (size.length,))] + 0.02 * torch.randn(size.length, size.dim)
    inputs = with_keys(size, k_LD)
    q_TID = centres[torch.randint(30, (size.rows, size.heads))] + 0.2 * torch.randn_like(inputs.q_TID)
    q_TID, w_TI = quantise_index_queries(q_TID, torch.rand(size.rows, size.heads))
    return replace(inputs, q_TID=q_TID, w_TI=w_TI)


def exact_ties(size: Size) -> Inputs:
    k_LD = torch.randint(-1, 2, (size.length, size.dim)).float()
    k_LD[torch.rand(size.length) < 0.5] = k_LD[0].clone()
    inputs = with_keys(size, k_LD)
    return replace(inputs, q_TID=torch.randint(-2, 3, inputs.q_TID.shape).float())


def all_equal(size: Size) -> Inputs:
    return with_keys(size, torch.ones(size.length, size.dim))


def ascending(size: Size) -> Inputs:
    inputs = with_keys(size, torch.linspace(0.01, 1, size.length)[:, None].expand(-1, size.dim))
    return replace(inputs, q_TID=inputs.q_TID.abs(), w_TI=inputs.w_TI.abs())


def weights(change: Callable[[Tensor], Tensor]) -> Callable[[Size], Inputs]:
    def make(size: Size) -> Inputs:
        inputs = gaussian(size)
        return replace(inputs, w_TI=change(inputs.w_TI))

    return make


def sometimes(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(torch.rand(x.shape) < 0.2, value, x)


def outlier_dims(size: Size) -> Inputs:
    k_LD = torch.randn(size.length, size.dim)
    k_LD[:, 3] *= 40
    inputs = with_keys(size, k_LD)
    q_TID = torch.randn_like(inputs.q_TID)
    q_TID[..., 5] *= 40
    q_TID, w_TI = quantise_index_queries(q_TID, inputs.w_TI)
    return replace(inputs, q_TID=q_TID, w_TI=w_TI)


def dominating_key(size: Size) -> Inputs:
    k_LD = torch.randn(size.length, size.dim) * 1e-3
    k_LD[size.length // 3] = 300.0
    return with_keys(size, k_LD)


def poisoned_keys(size: Size) -> Inputs:
    inputs = gaussian(size)
    values = inputs.values_LD.clone()
    values[torch.rand(values.shape) < 0.2 / size.dim] = 0x7F
    values[torch.rand(values.shape) < 0.2 / size.dim] = 0xFF
    return replace(inputs, values_LD=values)


def any_bytes(size: Size) -> Inputs:
    return replace(gaussian(size), values_LD=torch.randint(0, 256, (size.length, size.dim), dtype=torch.uint8))


def odd_scales(size: Size) -> Inputs:
    inputs = gaussian(size)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0, 1e-40, 1e-30, 1e30, 3e38, 0.3])
    some = torch.rand(size.length) < 0.1
    return replace(inputs, scales_L=torch.where(some, odd[torch.randint(len(odd), (size.length,))], inputs.scales_L))


def odd_queries(size: Size) -> Inputs:
    inputs = gaussian(size)
    q_TID = inputs.q_TID.clone()
    odd = torch.tensor([float("nan"), float("inf"), 1e-30, 1e-40, 1e30, 0.1, 0.0])
    rows = torch.arange(size.rows) % 3 == 0
    q_TID[rows, 0, 1] = odd[torch.randint(len(odd), (int(rows.sum()),))]
    q_TID[torch.arange(size.rows) % 5 == 1, 0] = 0.0
    return replace(inputs, q_TID=q_TID)


def scaled(queries: float, keys: float) -> Callable[[Size], Inputs]:
    def make(size: Size) -> Inputs:
        inputs = gaussian(size)
        return replace(inputs, w_TI=inputs.w_TI * queries, scales_L=inputs.scales_L * keys)

    return make


FAMILIES: dict[str, Callable[[Size], Inputs]] = {
    "gaussian": gaussian,
    "clustered": clustered,
    "exact ties": exact_ties,
    "all equal": all_equal,
    "ascending": ascending,
    "no negative weight": weights(torch.abs),
    "negative weights": weights(lambda w: -w.abs()),
    "some zero weights": weights(sometimes(0.0)),
    "all zero weights": weights(torch.zeros_like),
    "tiny weights": weights(sometimes(1e-42)),
    "NaN weights": weights(sometimes(float("nan"))),
    "infinite weights": weights(sometimes(float("inf"))),
    "minus infinite weights": weights(sometimes(float("-inf"))),
    "outlier dims": outlier_dims,
    "one dominating key": dominating_key,
    "NaN keys": poisoned_keys,
    "any bytes": any_bytes,
    "odd scales": odd_scales,
    "odd queries": odd_queries,
    "tiny everything": scaled(2.0**-30, 2.0**-15),
    "huge everything": scaled(2.0**30, 2.0**25),
    "beyond the bound's range": scaled(2.0**-60, 2.0**-40),
}
SIZES = [(1, 16), (2, 64), (3, 48), (5, 16), (8, 32), (13, 64), (32, 128)]


def select(
    case: Case, topk: int, isa: str, screen: str, num_threads: int = 1, chunks: list[list[ScoredRows]] | None = None
) -> tuple[Tensor, Tensor, ScreenCounts]:
    selection_TK = torch.full((case.q_TID.shape[0], topk), -7, dtype=torch.int32)
    scores_TK = torch.full(selection_TK.shape, float("nan"))
    counts = index_topk(
        case.q_TID, case.w_TI, case.cache, chunks or [[case.rows]], selection_TK,
        num_threads=num_threads, scores_TK=scores_TK, isa=isa, screen=screen,
    )  # fmt: skip
    return selection_TK, scores_TK, counts


def assert_same(case: Case, topk: int, isa: str, screen: str = "on", num_threads: int = 1) -> ScreenCounts:
    expected = select(case, topk, isa, "off")
    got = select(case, topk, isa, screen, num_threads)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].view(torch.int32), expected[1].view(torch.int32))
    assert expected[2] == ScreenCounts(got[2].pairs, 0, 0)
    return got[2]


@screened_isa
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_screen_changes_no_bit(isa: str, family: str) -> None:
    for seed, (heads, dim) in enumerate(SIZES):
        torch.manual_seed(seed)
        size = Size(heads, dim, rows=37, length=1777 + seed)
        counts = assert_same(FAMILIES[family](size).case(), (1, 8, 64)[seed % 3], isa)
        assert counts.pairs == 37 * (1777 + seed - 37) + 37 * 38 // 2
        assert counts.pairs // 2 < counts.screened <= counts.pairs
        assert counts.survivors <= counts.screened
        assert (counts.survivors == 0) == (family == "all zero weights")  # zeros that tie with a threshold of zero


@screened_isa
@pytest.mark.parametrize("family", ["gaussian", "clustered", "exact ties", "ascending", "odd scales"])
def test_thresholds_from_the_latest_keys_change_no_bit(isa: str, family: str) -> None:
    # Long enough for them: 32 times the candidates that a row may hold.
    for topk in (8, 64):
        torch.manual_seed(topk)
        case = FAMILIES[family](Size(2, 64, rows=19, length=32 * 512 + 5)).case()
        for screen in ("on", "auto"):
            assert_same(case, topk, isa, screen)


@screened_isa
def test_the_screen_drops_most_of_a_long_context(isa: str) -> None:
    torch.manual_seed(0)
    counts = assert_same(clustered(Size(2, 64, rows=256, length=40_000)).case(), 64, isa, "auto")
    assert counts.screened > 0.9 * counts.pairs
    assert counts.survivors < 0.1 * counts.screened


@screened_isa
def test_auto_leaves_alone_what_the_screen_cannot_tell_apart(isa: str) -> None:
    torch.manual_seed(0)
    counts = assert_same(exact_ties(Size(2, 64, rows=256, length=8000)).case(), 64, isa, "auto")
    assert counts.screened < 0.2 * counts.pairs


@screened_isa
def test_same_bits_for_every_cut_of_the_work(isa: str) -> None:
    torch.manual_seed(1)
    case = gaussian(Size(4, 64, rows=300, length=9000)).case()
    expected = select(case, 64, isa, "off")
    for num_threads in (1, 2, 3, 7):
        for screen in ("on", "auto"):
            got = select(case, 64, isa, screen, num_threads)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])
    for step in (1, 3, 8, 64):
        chunks = [
            [ScoredRows(replace(case.request), first, min(step, 300 - first), case.request.start + first)]
            for first in range(0, 300, step)
        ]
        got = select(case, 64, isa, "on", chunks=chunks)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@screened_isa
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_family_and_cut(isa: str, data: st.DataObject) -> None:
    heads, dim = data.draw(st.integers(1, 20)), 16 * data.draw(st.integers(1, 9))
    rows, length = data.draw(st.integers(1, 40)), data.draw(st.integers(300, 1500))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    case = FAMILIES[data.draw(st.sampled_from(list(FAMILIES)))](Size(heads, dim, rows, length)).case(16)
    screen = data.draw(st.sampled_from(["on", "auto"]))
    assert_same(case, data.draw(st.integers(1, 80)), isa, screen, data.draw(st.integers(1, 3)))


@screened_isa
@pytest.mark.slow
def test_a_million_rows(isa: str) -> None:
    rows = 0
    for seed in range(100):
        for family in FAMILIES.values():
            torch.manual_seed(seed)
            heads, dim = SIZES[seed % len(SIZES)] if seed % 10 == 0 else (2, 64)
            size = Size(heads, dim, rows=480, length=2000)
            assert_same(family(size).case(), (16, 64)[seed % 2], isa, num_threads=2)
            rows += size.rows
    assert rows >= 10**6


# The bound by itself: at a threshold just below a key's exact score, the key must pass.


def passed(inputs: Inputs, thresholds_T: Tensor, isa: str, bound_factor: float = 1.0) -> Tensor:
    from longfill.kernels.cpu import _native

    passed_TL = torch.zeros(inputs.q_TID.shape[0], inputs.values_LD.shape[0], dtype=torch.uint8)
    _native.screen_check(
        isa, inputs.q_TID.contiguous(), inputs.w_TI.contiguous(), inputs.values_LD, inputs.scales_L, thresholds_T,
        bound_factor, passed_TL,
    )  # fmt: skip
    return passed_TL.bool()


def exact_scores(inputs: Inputs, isa: str) -> Tensor:
    """fp32 [T, L] as the exact kernel rounds them, NaN where it never chooses."""
    rows, length = inputs.q_TID.shape[0], inputs.values_LD.shape[0]
    cache, table = paged(inputs.values_LD, inputs.scales_L, 16)
    requests = [RequestRows(row, 1, length - 1, table) for row in range(rows)]
    case = Case(inputs.q_TID, inputs.w_TI, cache, requests[0])
    chunks = [[ScoredRows(request, request.first_row, 1, length - 1) for request in requests]]
    selection_TK, scores_TK, _ = select(case, length, isa, "off", chunks=chunks)
    scores_TL = torch.full((rows, length + 1), float("nan"))
    scores_TL.scatter_(1, selection_TK.long() % (length + 1), scores_TK)  # -1, the padding, goes to the last column
    return scores_TL[:, :length]


def missed(inputs: Inputs, isa: str, bound_factor: float = 1.0) -> int:
    """(row, key) pairs that the screen drops at a threshold just below their exact scores."""
    scores_TL = exact_scores(inputs, isa)
    thresholds_TL = torch.nextafter(scores_TL, torch.tensor(float("-inf")))
    found = 0
    for key in range(scores_TL.shape[1]):
        chosen = ~scores_TL[:, key].isnan()
        kept = passed(inputs, thresholds_TL[:, key].contiguous(), isa, bound_factor)[:, key]
        found += int((chosen & ~kept).sum())
    return found


@screened_isa
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_exact_score_exceeds_the_bound(isa: str, family: str) -> None:
    for seed, (heads, dim) in enumerate([(1, 16), (2, 64), (11, 48)]):
        torch.manual_seed(seed)
        assert missed(FAMILIES[family](Size(heads, dim, rows=23, length=65)), isa) == 0


def tight(dim: int) -> Inputs:
    """Keys whose every value rounds to the integer 0: the error points along the query and the bound is the score."""
    q_TID = torch.ones(1, 1, dim)
    return Inputs(q_TID, torch.ones(1, 1), torch.full((16, dim), 1.75).to(torch.float8_e4m3fn).view(torch.uint8),
                  torch.ones(16))  # fmt: skip


@screened_isa
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_a_bound_that_is_too_small_is_caught(isa: str, dim: int) -> None:
    assert missed(tight(dim), isa) == 0
    assert missed(tight(dim), isa, bound_factor=0.999) == 16
    # And by data that was not made for it.
    torch.manual_seed(0)
    inputs = gaussian(Size(2, 64, rows=50, length=65))
    assert missed(inputs, isa) == 0
    assert missed(inputs, isa, bound_factor=0.05) > 0


@screened_isa
def test_the_bound_is_worth_having(isa: str) -> None:
    """Near its approximation a key is dropped: the bound of a usual key is a few percent of the largest score."""
    torch.manual_seed(0)
    inputs = gaussian(Size(2, 64, rows=50, length=65))
    inputs = replace(inputs, w_TI=inputs.w_TI.abs())
    scores_TL = exact_scores(inputs, isa)
    largest_T = scores_TL.amax(1)
    dropped = 0
    for key in range(65):
        kept = passed(inputs, (scores_TL[:, key] + 0.1 * largest_T).contiguous(), isa)[:, key]
        dropped += int((~kept).sum())
    assert dropped > 0.9 * 65 * 50


def test_a_screen_that_is_not_there_is_refused() -> None:
    case = gaussian(Size(2, 64, rows=3, length=300)).case()
    for isa in isa_names():
        if isa not in SCREENED_ISAS:
            with pytest.raises(ConfigError, match=f"instruction set {isa} has no screen"):
                select(case, 8, isa, "on")
            assert select(case, 8, isa, "auto")[2].screened == 0
    with pytest.raises(ConfigError, match="auto, on or off"):
        select(case, 8, isa_names()[0], "maybe")


@screened_isa
def test_what_a_screen_takes_is_in_the_scratch_bytes(isa: str) -> None:
    def bytes_of(screen: str) -> int:
        return scratch_bytes(heads=2, dim=64, topk=64, num_threads=2, isa=isa, screen=screen)

    assert bytes_of("off") < bytes_of("auto") == bytes_of("on") < bytes_of("off") + 2**20


def test_counts_add_up() -> None:
    assert ScreenCounts(1, 2, 3) + ScreenCounts(10, 20, 30) == ScreenCounts(11, 22, 33)
