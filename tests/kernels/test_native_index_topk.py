"""The native indexer against a brute-force sort, the torch reference, and itself under every way to cut the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longfill.errors import ConfigError
from longfill.kernels.cpu import available, describe, index_topk, isa_names, scratch_bytes, selected_isa
from longfill.kernels.cpu.indexer import join_rows
from longfill.kernels.interface import IndexCache, RequestRows, ScoredRows
from longfill.kernels.reference import indexer as reference
from longfill.kernels.reference.quant import quantise_index_keys, quantise_index_queries
from longfill.kernels.reference.topk import select_topk

pytestmark = [
    pytest.mark.skipif(not available(), reason=describe()),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]

every_isa = pytest.mark.parametrize("isa", isa_names())

SHAPES = [  # heads, dim
    (1, 16),
    (2, 64),
    (3, 48),
    (4, 32),
    (5, 16),
    (7, 32),
    (8, 128),
    (13, 64),
    (32, 128),
]


@dataclass(frozen=True)
class Case:
    """One request's rows at the end of its context, keys scattered over the pages of a pool."""

    q_TID: Tensor
    w_TI: Tensor
    cache: IndexCache
    request: RequestRows

    @property
    def rows(self) -> ScoredRows:
        return ScoredRows(self.request, self.request.first_row, self.request.query_len, self.request.start)


def paged(values_LD: Tensor, scales_L: Tensor, page_size: int) -> tuple[IndexCache, Tensor]:
    """The keys in shuffled pages of records that hold other things too; unused slots hold NaN."""
    length, dim = values_LD.shape
    num_pages = -(-length // page_size)
    table = torch.randperm(num_pages + 3, generator=torch.Generator().manual_seed(length))[:num_pages]
    plane = page_size * dim
    # 20 bytes of something else before and after: a page's stride is its record.
    records = torch.full((num_pages + 3, 20 + plane + 4 * page_size + 20), 0xFF, dtype=torch.uint8)
    values_NBX = records[:, 20 : 20 + plane].unflatten(1, (page_size, dim))
    scales_NB = records[:, 20 + plane : 20 + plane + 4 * page_size].view(torch.float32)
    positions = torch.arange(length)
    values_NBX[table[positions // page_size], positions % page_size] = values_LD
    scales_NB[table[positions // page_size], positions % page_size] = scales_L
    return IndexCache(values_NBX, scales_NB, "fp8", dim), table


def random_case(heads: int, dim: int, length: int, rows: int, page_size: int = 16, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    q_TID, w_TI = quantise_index_queries(torch.randn(rows, heads, dim), torch.randn(rows, heads))
    cache, table = paged(*quantise_index_keys(torch.randn(length, dim)), page_size)
    return Case(q_TID, w_TI, cache, RequestRows(0, rows, length - rows, table))


def integer_case(
    heads: int, dim: int, length: int, rows: int, page_size: int = 16, seed: int = 0
) -> tuple[Case, np.ndarray]:
    """Small integers, so that every order of summation gives the same bits, and the exact scores [T, L]."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-3, 4, (rows, heads, dim))
    w = rng.integers(-4, 5, (rows, heads))
    k = rng.integers(-2, 3, (length, dim))
    return case_of(q, w, k, page_size), np.einsum("th,thl->tl", w, np.maximum(np.einsum("thd,ld->thl", q, k), 0))


def case_of(q: np.ndarray, w: np.ndarray, k: np.ndarray, page_size: int = 16) -> Case:
    values = torch.from_numpy(k).float().to(torch.float8_e4m3fn).view(torch.uint8)
    cache, table = paged(values, torch.ones(k.shape[0]), page_size)
    request = RequestRows(0, q.shape[0], k.shape[0] - q.shape[0], table)
    return Case(torch.from_numpy(q).float(), torch.from_numpy(w).float(), cache, request)


def brute_force(scores_TL: np.ndarray, topk: int, start: int) -> Tensor:
    """Sort by score, then position; NaN and -inf never count."""
    out = torch.full((scores_TL.shape[0], topk), -1, dtype=torch.int32)
    for row, scores_L in enumerate(scores_TL):
        visible = scores_L[: start + row + 1].astype(np.float64)
        order = [p for p in np.argsort(-visible, kind="stable") if visible[p] > -np.inf]
        chosen = sorted(order[:topk])
        out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out


def select(
    case: Case, topk: int, isa: str, chunks: list[list[ScoredRows]] | None = None, num_threads: int = 1
) -> tuple[Tensor, Tensor]:
    selection_TK = torch.full((case.q_TID.shape[0], topk), -7, dtype=torch.int32)
    scores_TK = torch.full(selection_TK.shape, float("nan"))
    index_topk(
        case.q_TID,
        case.w_TI,
        case.cache,
        [[case.rows]] if chunks is None else chunks,
        selection_TK,
        num_threads=num_threads,
        scores_TK=scores_TK,
        isa=isa,
    )
    return selection_TK, scores_TK


def reference_scores(case: Case) -> Tensor:
    """fp32 [T, L] by the reference's decoding and formula, -inf beyond each row's own position."""
    length = case.request.seq_len
    keys_LD = reference.decode_index_keys(case.cache, case.request.pages, 0, length)
    total_TL = torch.zeros(case.q_TID.shape[0], length)
    for head in range(case.q_TID.shape[1]):
        total_TL += case.w_TI[:, head, None] * (case.q_TID[:, head] @ keys_LD.T).clamp(min=0)
    future_TL = torch.arange(length) > torch.arange(case.request.start, length)[:, None]
    return total_TL.masked_fill_(future_TL, float("-inf"))


def test_the_best_instruction_set_of_this_machine_is_among_the_tested() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = isa_names()
    assert names[-1] == "portable"
    if all(f" {name}" in flags for name in ("avx512_bf16", "avx512_vnni", "avx512vbmi", "avx512_vbmi2", "avx512bw")):
        assert names == ("avx512_bf16", "avx512", "avx2", "portable")
    elif " avx512bw" in flags:
        assert names == ("avx512", "avx2", "portable")


@every_isa
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_integer_scores_select_exactly_what_a_sort_selects(isa: str, heads: int, dim: int) -> None:
    case, scores_TL = integer_case(heads, dim, length=701, rows=19)
    for topk in (1, 16, 64):
        selection_TK, scores_TK = select(case, topk, isa)
        assert torch.equal(selection_TK, brute_force(scores_TL, topk, case.request.start))
        expected = torch.from_numpy(scores_TL).float().gather(1, selection_TK.long())
        assert torch.equal(scores_TK, expected)


@every_isa
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 64), (4, 32), (32, 128), (11, 48)])
def test_scores_and_selection_agree_with_the_reference(isa: str, heads: int, dim: int) -> None:
    case = random_case(heads, dim, length=1500, rows=33)
    expected_TL = reference_scores(case)
    topk = 64
    selection_TK, scores_TK = select(case, topk, isa)
    at_selected = expected_TL.gather(1, selection_TK.long())
    tolerance = 1e-5 * case.w_TI.abs().sum() * case.q_TID.abs().amax()
    assert (scores_TK - at_selected).abs().max() < tolerance
    chosen = select_topk(expected_TL.clone(), topk)
    for row in range(33):
        # Only scores closer to the k-th best than rounding may be chosen differently.
        differing = set(chosen[row].tolist()) ^ set(selection_TK[row].tolist())
        kth = expected_TL[row].topk(topk).values[-1]
        assert all(abs(expected_TL[row, p] - kth) < tolerance for p in differing)
        assert selection_TK[row].tolist() == sorted(selection_TK[row].tolist())


@every_isa
def test_every_e4m3_value_is_decoded_exactly(isa: str) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    exact = values.view(torch.float8_e4m3fn).float()
    keys = torch.zeros(256, 16, dtype=torch.uint8)
    for dim in (0, 1, 7, 15):
        keys.zero_()
        keys[:, dim] = values
        cache, table = paged(keys, torch.full((256,), 2.0), 16)
        for sign in (1.0, -1.0):
            q_TID = torch.zeros(1, 1, 16)
            q_TID[0, 0, dim] = sign
            case = Case(q_TID, torch.full((1, 1), 3.0), cache, RequestRows(0, 1, 255, table))
            selection_TK, scores_TK = select(case, 256, isa)
            assert selection_TK[0, :254].tolist() == [b for b in range(256) if b not in (0x7F, 0xFF)]
            expected = 6.0 * (sign * exact[selection_TK[0, :254].long()]).clamp(min=0)
            assert torch.equal(scores_TK[0, :254], expected)
            assert selection_TK[0, 254:].tolist() == [-1, -1]


def one_dim_case(scores: np.ndarray, rows: int = 3) -> Case:
    """Scores in [0, 448] that e4m3 holds become the scores of every row."""
    k = np.zeros((scores.shape[0], 16))
    k[:, 3] = scores
    q = np.zeros((rows, 1, 16))
    q[:, :, 3] = 1.0
    return case_of(q, np.ones((rows, 1)), k)


# In order of value; the 8-bit numbers in this range are exact.
E4M3_POSITIVE = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def patterns(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    ramp = np.sort(rng.choice(E4M3_POSITIVE, length))
    sparse = rng.choice(E4M3_POSITIVE, length)
    sparse[rng.random(length) < 0.9] = 0.0
    dominated = np.zeros(length)
    dominated[length // 3] = 448.0
    return {
        "ascending": ramp,
        "descending": ramp[::-1].copy(),
        "90% zeros": sparse,
        "all equal": np.full(length, 1.5),
        "all zero": np.zeros(length),
        "one dominating key": dominated,
        "late winners": np.concatenate([np.full(length - 40, 1.0), np.full(40, 2.0)]),
        "narrow band": rng.choice([1.0, 1.125], length),
    }


@every_isa
@pytest.mark.parametrize("name", list(patterns(100)))
def test_selection_is_exact_on_adversarial_scores(isa: str, name: str) -> None:
    # Long enough that candidates are cut back several times.
    scores = patterns(5000)[name]
    case = one_dim_case(scores)
    expanded = np.tile(scores, (3, 1))
    for topk in (1, 64, 700):
        selection_TK, _ = select(case, topk, isa)
        assert torch.equal(selection_TK, brute_force(expanded, topk, case.request.start))


@every_isa
def test_nan_and_minus_infinity_are_never_chosen(isa: str) -> None:
    case, scores_TL = integer_case(2, 32, length=400, rows=4)
    scores_TL = scores_TL.astype(np.float64)
    # Whole keys of NaN, among them the first and the last position.
    poisoned = [0, 17, 250, 399]
    table, page_size = case.request.pages, case.cache.values_NBX.shape[1]
    for position in poisoned:
        case.cache.values_NBX[table[position // page_size], position % page_size] = 0x7F
    scores_TL[:, poisoned] = np.nan
    selection_TK, _ = select(case, 64, isa)
    assert torch.equal(selection_TK, brute_force(scores_TL, 64, case.request.start))
    # A row whose scores are all -inf or NaN, beside one whose scores may be +inf.
    w_TI = case.w_TI.clone()
    w_TI[0] = float("-inf")
    w_TI[1] = float("inf")
    w_TI[2] = float("nan")
    selection_TK, scores_TK = select(replace(case, w_TI=w_TI), 64, isa)
    assert (selection_TK[[0, 2]] == -1).all()
    assert (scores_TK[[0, 2]] == float("-inf")).all()
    infinite = reference_scores(replace(case, w_TI=w_TI))[1] == float("inf")
    assert selection_TK[1].tolist() == infinite.nonzero().flatten()[:64].tolist()
    assert torch.equal(selection_TK[3], brute_force(scores_TL, 64, case.request.start)[3])


@every_isa
def test_negative_weights_can_make_every_score_negative(isa: str) -> None:
    case, _ = integer_case(3, 32, length=900, rows=5)
    case = replace(case, w_TI=-case.w_TI.abs() - 1)
    scores_TL = reference_scores(case).numpy()
    selection_TK, _ = select(case, 50, isa)
    assert torch.equal(selection_TK, brute_force(scores_TL, 50, case.request.start))


@every_isa
def test_minus_zero_ties_with_zero(isa: str) -> None:
    # Head 0 scores 0 with weight -1: the sum is -0 times a positive scale where head 1 adds nothing.
    case, _ = integer_case(2, 16, length=300, rows=2)
    case = replace(case, q_TID=torch.zeros_like(case.q_TID), w_TI=torch.tensor([[-1.0, -1.0], [1.0, -1.0]]))
    selection_TK, _ = select(case, 20, isa)
    assert selection_TK.tolist() == [list(range(20))] * 2


@every_isa
@pytest.mark.parametrize("topk", [8, 64, 2048])
def test_dsa_05_any_k_around_the_length(isa: str, topk: int) -> None:
    for length in (1, 2, topk - 1, topk, topk + 1):
        rows = min(length, 3)
        case, scores_TL = integer_case(2, 16, length=length, rows=rows, seed=length)
        selection_TK, scores_TK = select(case, topk, isa)
        assert torch.equal(selection_TK, brute_force(scores_TL, topk, length - rows))
        assert ((selection_TK == -1) == (scores_TK == float("-inf"))).all()


@every_isa
@pytest.mark.parametrize("page_size", [1, 3, 4, 64, 1000])
def test_every_page_size_gives_the_same_bits(isa: str, page_size: int) -> None:
    expected = select(random_case(2, 64, length=777, rows=20, page_size=16), 64, isa)
    got = select(random_case(2, 64, length=777, rows=20, page_size=page_size), 64, isa)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@every_isa
def test_dsa_06_every_length_around_a_boundary(isa: str) -> None:
    for boundary in (16, 32, 64, 128, 256):
        for length in (boundary - 1, boundary, boundary + 1):
            case, scores_TL = integer_case(2, 64, length=length, rows=5, seed=length)
            selection_TK, _ = select(case, 8, isa)
            assert torch.equal(selection_TK, brute_force(scores_TL, 8, case.request.start))


@every_isa
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (4, 32), (3, 16), (9, 32), (32, 128)])
def test_det_01_same_bits_for_every_chunk_size(isa: str, heads: int, dim: int) -> None:
    case = random_case(heads, dim, length=1100, rows=90)
    expected = select(case, 32, isa)
    for step in (1, 2, 3, 7, 8, 64):
        # Chunks of several requests' rows, never joined: each names its own request object.
        chunks = [
            [ScoredRows(replace(case.request), first, min(step, 90 - first), case.request.start + first)]
            for first in range(0, 90, step)
        ]
        got = select(case, 32, isa, chunks)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@every_isa
def test_det_01_same_bits_for_every_number_of_threads(isa: str) -> None:
    for rows in (1, 5, 300):
        case = random_case(4, 64, length=9000, rows=rows, page_size=64)
        expected = select(case, 64, isa, num_threads=1)
        for num_threads in (2, 3, 7):
            got = select(case, 64, isa, num_threads=num_threads)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


@every_isa
def test_det_01_same_bits_beside_other_requests(isa: str) -> None:
    alone = [
        random_case(2, 64, length=length, rows=rows, seed=length) for length, rows in ((500, 9), (90, 90), (70, 1))
    ]
    # One pool for all, in another order and with rows that nobody scores in between.
    order = [2, 0, 1]
    offset, pages, values, scales = 4, 0, [], []
    q_TID, w_TI = [torch.full((4, 2, 64), float("nan"))], [torch.full((4, 2), float("nan"))]
    chunk = []
    for i in order:
        case = alone[i]
        request = RequestRows(offset, case.request.query_len, case.request.start, case.request.pages + pages)
        chunk.append(ScoredRows(request, offset, request.query_len, request.start))
        offset += request.query_len
        pages += case.cache.values_NBX.shape[0]
        values.append(case.cache.values_NBX)
        assert case.cache.scales_NB is not None
        scales.append(case.cache.scales_NB)
        q_TID.append(case.q_TID)
        w_TI.append(case.w_TI)
    cache = IndexCache(torch.cat(values), torch.cat(scales), "fp8", 64)
    together = Case(torch.cat(q_TID), torch.cat(w_TI), cache, chunk[0].request)
    selection_TK, scores_TK = select(together, 48, isa, [chunk[:2], chunk[2:]])
    assert (selection_TK[:4] == -7).all()
    for rows, i in zip(chunk, order, strict=True):
        expected = select(alone[i], 48, isa)
        span = slice(rows.first_row, rows.first_row + rows.num_rows)
        assert torch.equal(selection_TK[span], expected[0])
        assert torch.equal(scores_TK[span], expected[1])


@every_isa
def test_ties_across_a_split_of_the_keys_go_to_the_lower_position(isa: str) -> None:
    scores = np.full(50_000, 1.0)
    scores[49_990:] = 2.0
    case = one_dim_case(scores, rows=8)
    case = replace(case, q_TID=case.q_TID.repeat(1, 16, 1), w_TI=case.w_TI.repeat(1, 16))
    expected = brute_force(np.tile(16 * scores, (8, 1)), 64, case.request.start)
    for num_threads in (1, 2, 5):
        selection_TK, _ = select(case, 64, isa, num_threads=num_threads)
        assert torch.equal(selection_TK, expected)


def test_neighbouring_chunks_of_a_request_become_one() -> None:
    request, other = RequestRows(0, 6, 10, torch.arange(2)), RequestRows(6, 2, 0, torch.arange(2))
    pieces = [ScoredRows(request, 0, 2, 10), ScoredRows(request, 2, 4, 12), ScoredRows(other, 6, 2, 0)]
    assert join_rows(pieces) == [ScoredRows(request, 0, 6, 10), ScoredRows(other, 6, 2, 0)]
    apart = [ScoredRows(request, 0, 2, 10), ScoredRows(request, 3, 3, 13)]
    assert join_rows(apart) == apart


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_mem_01_transient_memory_does_not_grow_with_the_context() -> None:
    def peak_growth(length: int) -> int:
        keys = torch.randint(0, 0x7F, (length // 64, 64, 16), dtype=torch.uint8)
        cache = IndexCache(keys, torch.ones(length // 64, 64), "fp8", 16)
        request = RequestRows(0, 64, length - 64, torch.arange(length // 64))
        case = Case(torch.ones(64, 1, 16), torch.ones(64, 1), cache, request)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        select(case, 64, isa_names()[0], num_threads=2)
        return memory("VmHWM") - before

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    bound = scratch_bytes(heads=1, dim=16, topk=64, num_threads=2) + 2**20
    assert peak_growth(2**14) < bound
    assert peak_growth(2**20) < bound
    # The scores alone would take 256 MB.
    assert bound < 64 * 2**20


def test_scratch_grows_with_k_and_threads_only_as_far_as_needed() -> None:
    glm = scratch_bytes(heads=32, dim=128, topk=2048, num_threads=1)
    assert glm < 8 * 2**20
    assert scratch_bytes(heads=32, dim=128, topk=2048, num_threads=2) > glm


def test_bad_input_is_refused_before_anything_is_read() -> None:
    case = random_case(2, 64, length=100, rows=4)
    good = case.request.pages

    def with_pages(pages: Tensor) -> None:
        select(replace(case, request=replace(case.request, pages=pages)), 8, isa_names()[0])

    with pytest.raises(ValueError, match="outside the pool"):
        with_pages(torch.full_like(good, 10_000))
    with pytest.raises(ValueError, match="outside the pool"):
        with_pages(torch.full_like(good, -1))
    with pytest.raises(ValueError, match="shorter than its context"):
        with_pages(good[:-1])
    with pytest.raises(ValueError, match="multiple of 16"):
        select(random_case(2, 24, length=100, rows=4), 8, isa_names()[0])
    with pytest.raises(ValueError, match="rows outside the step"):
        select(case, 8, isa_names()[0], [[ScoredRows(case.request, 1, 4, 96)]])
    with pytest.raises(ValueError, match="not available here"):
        select(case, 8, "abacus")
    with pytest.raises(ValueError, match="bytes of dim values"):
        select(replace(case, cache=replace(case.cache, scales_NB=None, format="float32")), 8, isa_names()[0])


def with_float_keys(case: Case) -> Case:
    """The same keys, which fp32 holds exactly, in a cache of format float32; unused slots hold NaN."""
    assert case.cache.scales_NB is not None
    values_NBD = case.cache.values_NBX.view(torch.float8_e4m3fn).float() * case.cache.scales_NB[..., None]
    pages, page_size, dim = values_NBD.shape
    records = torch.full((pages, 3 + page_size * dim + 5), float("nan"))
    records[:, 3:-5] = values_NBD.flatten(1)
    plane = records[:, 3:-5].unflatten(1, (page_size, dim)).view(torch.uint8)
    return replace(case, cache=IndexCache(plane, None, "float32", dim))


@every_isa
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 48), (4, 32), (32, 128)])
def test_float32_keys_are_scored_and_ranked_exactly(isa: str, heads: int, dim: int) -> None:
    case, scores_TL = integer_case(heads, dim, length=600, rows=70)
    case = with_float_keys(case)
    for topk in (1, 8, 33):
        selected_TK, got_TK = select(case, topk, isa)
        want_TK = brute_force(scores_TL, topk, case.request.start)
        assert torch.equal(selected_TK, want_TK)
        kept = want_TK >= 0
        rows = torch.arange(70)[:, None].expand_as(want_TK)[kept]
        assert got_TK[kept].tolist() == [scores_TL[r, p] for r, p in zip(rows, want_TK[kept], strict=True)]


@every_isa
def test_float32_keys_give_a_row_the_same_bits_however_it_is_called(isa: str) -> None:
    torch.manual_seed(0)
    case = with_float_keys(random_case(5, 32, length=5000, rows=90))
    whole = select(case, 16, isa)
    for threads in (2, 3):
        assert all(map(torch.equal, select(case, 16, isa, num_threads=threads), whole))
    start = case.request.start
    for first, last in ((0, 1), (17, 24), (89, 90)):
        part = [[ScoredRows(case.request, first, last - first, start + first)]]
        selected_TK, scores_TK = select(case, 16, isa, part)
        assert torch.equal(selected_TK[first:last], whole[0][first:last])
        assert torch.equal(scores_TK[first:last], whole[1][first:last])


def test_cpu_01_longfill_isa_forces_one_path_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = selected_isa.__wrapped__  # a process decides once; tests/oracle has processes of their own
    monkeypatch.delenv("LONGFILL_ISA", raising=False)
    assert decide() == isa_names()[0]
    for wanted in isa_names():
        monkeypatch.setenv("LONGFILL_ISA", wanted)
        assert decide() == wanted
    monkeypatch.setenv("LONGFILL_ISA", "abacus")
    with pytest.raises(ConfigError, match="LONGFILL_ISA=abacus: not available here; choose one of"):
        decide()


def test_an_output_of_another_dtype_is_refused_not_filled_in_a_copy() -> None:
    from longfill.kernels.cpu import _native

    queries, weights = torch.zeros(1, 2, 16), torch.zeros(1, 2)
    values, scales = torch.zeros(2, 4, 16, dtype=torch.uint8), torch.ones(2, 4)
    rows = [(0, 1, 0, None, torch.ones(1, dtype=torch.int64))]
    selection = torch.full((1, 4), -7, dtype=torch.int32)
    _native.index_topk(isa_names()[0], queries, weights, values, scales, rows, selection, None, "auto", 1)
    assert selection[0, 0] == 0
    for wrong in (selection.long(), selection.float()):
        with pytest.raises(TypeError):
            _native.index_topk(isa_names()[0], queries, weights, values, scales, rows, wrong, None, "auto", 1)
    with pytest.raises(TypeError):
        _native.index_topk(isa_names()[0], queries.double(), weights, values, scales, rows, selection, None, "auto", 1)
