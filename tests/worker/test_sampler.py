"""What the sampler promises: who may be drawn, how often, and that nothing but the row decides."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longfill.errors import LongfillError, RequestError
from longfill.request import SamplingParams
from longfill.worker import sampler
from longfill.worker.sampler import (
    MAX_STOP_STRINGS,
    LogitsError,
    SampleInput,
    candidates,
    logprobs_of,
    request_seed,
    sample,
    uniform,
    validate,
)

INF = math.inf


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **kwargs})


def row(seed: int = 0, index: int = 0, request_id: str = "r", **kwargs) -> SampleInput:
    return SampleInput(request_id, params(**kwargs), seed, index)


def logits(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def allowed(values, **kwargs) -> list[int]:
    ids, weights = candidates(np.asarray(values, dtype=np.float64), params(**kwargs))
    assert (weights > 0).all()
    return ids.tolist()


def draws(values, count: int, seed: int = 7, **kwargs) -> list[int]:
    """Tokens of `count` consecutive output positions of one request, all from the same logits."""
    batch = torch.tensor(values, dtype=torch.float32).expand(count, -1)
    return [t.token_id for t in sample(batch, [row(seed, i, **kwargs) for i in range(count)])]


class TestGreedy:
    def test_takes_the_largest_logit(self):
        assert sample(logits([0, 3, 1], [5, -2, 4]), [row(temperature=0)] * 2)[0].token_id == 1
        assert sample(logits([0, 3, 1], [5, -2, 4]), [row(temperature=0)] * 2)[1].token_id == 0

    @pytest.mark.parametrize("width", [2, 7, 64, 1000, 4097])
    def test_ties_go_to_the_lower_id(self, width):
        for first in {0, 1, width // 2, width - 2} - {-1}:
            values = torch.zeros(1, width)
            values[0, first:] = 2.5
            assert sample(values, [row(temperature=0)])[0].token_id == first

    def test_negative_zero_ties_with_zero(self):
        assert sample(logits([-1.0, -0.0, 0.0]), [row(temperature=0)])[0].token_id == 1

    def test_top_k_one_is_greedy_even_on_ties_and_at_any_temperature(self):
        for temperature in (1e-300, 0.5, 1.0, 1e300):
            assert allowed([1, 3, 3, 2.999999], top_k=1, temperature=temperature) == [1]

    def test_does_not_touch_its_input(self):
        values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
        before = values.clone()
        sample(values, [row(top_p=0.5), row(logprobs=3), row(temperature=0, logprobs=0)])
        assert torch.equal(values, before)


class TestTemperature:
    def test_divides_the_logits(self):
        _, weights = candidates(np.array([0.0, 2.0]), params(temperature=4.0))
        assert weights == pytest.approx([math.exp(-0.5), 1.0])

    def test_tiny_temperature_is_the_greedy_token(self):
        for temperature in (5e-324, 1e-308, 1e-6):
            assert draws([0.1, 0.3, 0.2], 5, temperature=temperature) == [1] * 5

    def test_huge_temperature_is_uniform(self):
        _, weights = candidates(np.array([-50.0, 0.0, 50.0]), params(temperature=1e308))
        assert weights == pytest.approx([1, 1, 1])


class TestTopK:
    def test_minus_one_zero_and_large_k_keep_all(self):
        for k in (-1, 0, 3, 4, 10**9):
            assert allowed([1, 2, 3], top_k=k) == [0, 1, 2]

    def test_keeps_exactly_k_ties_to_the_lower_id(self):
        values = [2, 5, 2, 7, 2, 2]
        assert [allowed(values, top_k=k) for k in (1, 2, 3, 4, 5)] == [
            [3],
            [1, 3],
            [0, 1, 3],
            [0, 1, 2, 3],
            [0, 1, 2, 3, 4],
        ]


class TestTopP:
    def test_one_keeps_all_even_the_unlikely(self):
        assert allowed([0, -700, -30], top_p=1.0) == [0, 1, 2]

    def test_tiny_p_keeps_the_best_token_only(self):
        for p in (5e-324, 1e-9, 0.01):
            assert allowed([0, 1, 0.5], top_p=p) == [1]

    def test_exact_equality_stops(self):
        # Four equal tokens: two of them are exactly p = 0.5, and a third is needed one float above it.
        assert allowed([1, 1, 1, 1], top_p=0.5) == [0, 1]
        assert allowed([1, 1, 1, 1], top_p=float(np.nextafter(0.5, 1))) == [0, 1, 2]
        assert allowed([1, 1, 1, 1], top_p=float(np.nextafter(0.5, 0))) == [0, 1]
        assert allowed([1, 1, 1, 1], top_p=0.25) == [0]
        assert allowed([1, 1, 1, 1], top_p=float(np.nextafter(0.25, 1))) == [0, 1]

    def test_almost_one_keeps_all_equal_tokens(self):
        assert len(allowed([0.0] * 1000, top_p=float(np.nextafter(1, 0)))) == 1000

    def test_is_taken_of_what_top_k_left(self):
        # After top_k=2 both tokens have one half; of the whole distribution they would have one quarter.
        assert allowed([1, 1, 1, 1], top_k=2, top_p=0.5) == [0]

    @pytest.mark.parametrize("size", [1023, 1024, 1025, 8192, 8193, 20000])
    def test_a_flat_distribution_wider_than_the_first_candidates(self, size):
        assert allowed([0.0] * size, top_p=0.75) == list(range(math.ceil(0.75 * size)))


class TestMinP:
    def test_is_relative_to_the_best(self):
        values = np.log([0.5, 0.25, 0.05])
        assert allowed(values, min_p=0.1 + 1e-9) == [0, 1]
        assert allowed(values, min_p=0.1 - 1e-9) == [0, 1, 2]

    def test_one_keeps_the_best_and_its_equals(self):
        assert allowed([1, 4, 4, 3.9], min_p=1.0) == [1, 2]

    def test_is_applied_after_temperature(self):
        values = [0.0, 2.0]
        assert allowed(values, min_p=0.3) == [1]
        assert allowed(values, min_p=0.3, temperature=2.0) == [0, 1]

    def test_is_applied_before_top_p(self):
        # 0.4 0.3 0.2 0.1: top_p=0.65 alone needs two tokens; min_p first leaves 0.4 0.3, of which 0.4 is only 0.57.
        values = np.log([0.4, 0.3, 0.2, 0.1])
        assert allowed(values, top_p=0.65) == [0, 1]
        assert allowed(values, top_p=0.55) == [0, 1]
        assert allowed(values, top_p=0.55, min_p=0.7) == [0]


class TestFilterAgainstTheDefinition:
    @settings(max_examples=300, deadline=None)
    @given(
        values=st.lists(st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30), st.just(-INF)), min_size=1),
        temperature=st.sampled_from([0.25, 1.0, 3.0]),
        top_k=st.integers(-1, 12),
        top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
        min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    )
    def test_same_set_as_a_plain_loop(self, values, temperature, top_k, top_p, min_p):
        if max(values) == -INF:
            values[0] = 0.0
        best = max(values)
        with np.errstate(over="ignore"):
            weight = [float(np.exp((v - best) / temperature)) for v in values]
        kept = [i for i in range(len(values)) if weight[i] >= min_p and weight[i] > 0]
        kept.sort(key=lambda i: (-values[i], i))
        if top_k > 0:
            kept = kept[:top_k]
        if top_p < 1:
            total, cumulative, nucleus = math.fsum(weight[i] for i in kept), 0.0, []
            for i in kept:
                # Cumulative sums within rounding of p are decided by the order of additions; both are right.
                if abs(cumulative - top_p * total) < 1e-12 * total:
                    return
                if cumulative >= top_p * total:
                    break
                nucleus.append(i)
                cumulative += weight[i]
            kept = nucleus
        got = allowed(values, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert got == sorted(kept)


class TestDistribution:
    @pytest.mark.parametrize(
        ("kwargs", "probabilities"),
        [
            ({}, [0.4, 0.3, 0.2, 0.1]),
            ({"temperature": 0.5}, [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
            ({"top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
            ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
            ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ],
    )
    @pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
    def test_frequencies_follow_the_probabilities(self, kwargs, probabilities, seed):
        count = 4000
        seen = np.bincount(draws(np.log([0.4, 0.3, 0.2, 0.1]).tolist(), count, seed=seed, **kwargs), minlength=4)
        expected = np.array(probabilities) * count
        possible = expected > 0
        assert (seen[~possible] == 0).all()
        chi_square = float((((seen - expected) ** 2)[possible] / expected[possible]).sum())
        assert chi_square < 16.3  # 99.9% of chi-square with 3 degrees of freedom

    def test_different_seeds_are_independent_at_the_same_position(self):
        u = np.array([uniform(seed, 0) for seed in range(4000)])
        seen, _ = np.histogram(u, bins=16, range=(0, 1))
        assert float(((seen - 250.0) ** 2 / 250).sum()) < 37.7  # 99.9%, 15 degrees of freedom
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.06

    def test_consecutive_positions_are_uncorrelated(self):
        u = np.array([uniform(3, index) for index in range(4000)])
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.06
        assert len(set(u.tolist())) == 4000

    def test_each_token_owns_a_half_open_interval(self, monkeypatch):
        quarters = {0.0: 0, 0.2499: 0, 0.25: 1, 0.4999: 1, 0.5: 2, 0.75: 3, 1 - 2.0**-53: 3}
        for u, token in quarters.items():
            monkeypatch.setattr(sampler, "uniform", lambda *_, u=u: u)
            assert sample(logits([1, 1, -INF, 1, 1]), [row()])[0].token_id == (0, 1, 3, 4)[token]

    def test_uniform_is_in_the_half_open_interval_and_pinned(self):
        # Pinned: a seed that a user wrote down gives the same tokens in the next release.
        assert all(0 <= uniform(seed, index) < 1 for seed in (-(2**63), 0, 2**64 - 1) for index in (0, 1, 2**40))
        assert [uniform(42, i) for i in range(3)] == PINNED


PINNED = [0.8201981478608876, 0.36812845090913937, 0.8767979674463799]


class TestOnlyTheRowDecides:
    CHOICES = (
        {"temperature": 0},
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 1.5, "logprobs": 2},
    )

    def batch(self, rows: int, width: int = 997):
        values = torch.randn(rows, width, generator=torch.Generator().manual_seed(3)) * 2
        inputs = [row(100 + i, i % 5, request_id=f"r{i}", **self.CHOICES[i % 5]) for i in range(rows)]
        return values, inputs

    def test_same_token_alone_and_in_any_batch(self):
        values, inputs = self.batch(20)
        together = sample(values, inputs)
        assert [sample(values[i : i + 1], inputs[i : i + 1])[0] for i in range(20)] == together

    def test_same_token_in_any_order(self):
        values, inputs = self.batch(20)
        together = sample(values, inputs)
        order = torch.randperm(20, generator=torch.Generator().manual_seed(5)).tolist()
        shuffled = sample(values[order], [inputs[i] for i in order])
        assert shuffled == [together[i] for i in order]

    def test_same_token_from_any_memory_layout(self):
        values, inputs = self.batch(10)
        padded = torch.empty(10, 1001)
        padded[:, 3:1000] = values
        assert sample(padded[:, 3:1000], inputs) == sample(values, inputs)
        assert sample(values.t().contiguous().t(), inputs) == sample(values, inputs)

    def test_request_id_is_only_a_name(self):
        values, inputs = self.batch(5)
        renamed = [dataclasses.replace(i, request_id="other") for i in inputs]
        assert sample(values, renamed) == sample(values, inputs)

    def test_replay_after_preemption_gives_the_same_tokens(self):
        values = torch.randn(40, 50, generator=torch.Generator().manual_seed(9))
        whole = [sample(values[i : i + 1], [row(11, i)])[0].token_id for i in range(40)]
        for cut in range(40):
            resumed = [t.token_id for t in sample(values[cut:], [row(11, i) for i in range(cut, 40)])]
            assert resumed == whole[cut:]

    def test_seed_and_index_both_matter(self):
        values = [0.0] * 1000
        assert draws(values, 20, seed=1) != draws(values, 20, seed=2)
        assert len(set(draws(values, 20, seed=1))) > 10


class TestSeeds:
    def test_own_seed_wins_and_engine_seed_does_not_matter(self):
        assert request_seed(params(seed=5), engine_seed=0, ordinal=1) == 5
        assert request_seed(params(seed=5), engine_seed=9, ordinal=7) == 5

    def test_seeds_are_64_bit_and_negative_ones_wrap(self):
        assert request_seed(params(seed=-1), 0, 0) == 2**64 - 1
        assert request_seed(params(seed=2**64 - 1), 0, 0) == 2**64 - 1

    def test_unseeded_requests_differ_by_ordinal_and_by_engine_seed(self):
        seeds = {request_seed(params(), engine, ordinal) for engine in range(30) for ordinal in range(30)}
        assert len(seeds) == 900
        assert all(0 <= seed < 2**64 for seed in seeds)
        assert request_seed(params(), 1, 11) != request_seed(params(), 11, 1)

    def test_unseeded_requests_repeat_in_the_next_run(self):
        assert request_seed(params(), 0, 3) == request_seed(params(), 0, 3)


class TestExtremeLogits:
    def test_minus_inf_is_never_drawn(self):
        values = [-INF, 0.0, -INF, 0.0, -INF]
        assert set(draws(values, 300)) == {1, 3}
        assert set(draws(values, 50, temperature=1e300)) == {1, 3}
        assert set(draws(values, 50, top_k=4, top_p=0.999)) == {1, 3}

    def test_float32_extremes(self):
        big = float(np.finfo(np.float32).max)
        assert draws([-big, big, 0.0], 20) == [1] * 20
        assert set(draws([big, big, -big], 100)) == {0, 1}
        result = sample(logits([-big, big, 0.0]), [row(temperature=0, logprobs=2)])[0]
        assert result.logprobs is not None
        assert result.logprobs[1].logprob == 0.0

    @pytest.mark.parametrize("bad", [math.nan, INF, -INF])
    @pytest.mark.parametrize("kwargs", [{"temperature": 0}, {}, {"logprobs": 1}])
    def test_rows_without_a_token_are_named_and_the_others_stay_the_same(self, bad, kwargs):
        values, width = torch.randn(4, 33, generator=torch.Generator().manual_seed(2)), 33
        inputs = [row(i, 0, request_id=f"req-{i}", **kwargs) for i in range(4)]
        good = sample(values, inputs)
        broken = values.clone()
        broken[1] = bad if bad == -INF else broken[1]
        broken[1, width - 1] = bad
        with pytest.raises(LogitsError, match="req-1:") as caught:
            sample(broken, inputs)
        assert isinstance(caught.value, LongfillError)
        assert list(caught.value.reasons) == ["req-1"]
        rest = [0, 2, 3]
        assert sample(broken[rest], [inputs[i] for i in rest]) == [good[i] for i in rest]

    def test_every_bad_row_is_named(self):
        values = torch.full((3, 4), math.nan)
        values[1] = 0
        with pytest.raises(LogitsError) as caught:
            sample(values, [row(request_id=name) for name in "abc"])
        assert list(caught.value.reasons) == ["a", "c"]

    def test_one_token_vocabulary(self):
        assert draws([-3.0], 3, top_p=0.1, top_k=5) == [0, 0, 0]

    def test_no_rows(self):
        assert sample(torch.empty(0, 10), []) == []

    @pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
    def test_rows_and_inputs_must_match(self, shape):
        with pytest.raises(ValueError, match=r"want float32 logits \[1, V\]"):
            sample(torch.zeros(shape), [row()])

    def test_wants_float32(self):
        with pytest.raises(ValueError, match="float32"):
            sample(torch.zeros(1, 3, dtype=torch.bfloat16), [row()])


class TestLogprobs:
    def test_of_raw_logits_whatever_the_temperature(self):
        values = logits([1.0, 3.0, 2.0])
        want = torch.log_softmax(values.double(), dim=-1)[0].tolist()
        for kwargs in ({"temperature": 0}, {"temperature": 7.0}, {"top_k": 1, "min_p": 0.5}):
            result = sample(values, [row(logprobs=3, **kwargs)])[0]
            assert result.logprobs is not None
            assert {t: lp.logprob for t, lp in result.logprobs.items()} == pytest.approx(dict(enumerate(want)))

    def test_none_by_default_and_zero_gives_the_chosen_only(self):
        values = logits([1.0, 3.0, 2.0])
        assert sample(values, [row()])[0].logprobs is None
        result = sample(values, [row(temperature=0, logprobs=0)])[0]
        assert list(result.logprobs or ()) == [1]

    def test_chosen_first_then_the_best_with_ranks(self):
        values = logits([0.0, 5.0, 1.0, 4.0, -100.0])
        inputs = [row(seed=s, temperature=1e9, logprobs=2) for s in range(40)]
        for got in sample(values.expand(40, -1), inputs):
            assert got.logprobs is not None
            assert next(iter(got.logprobs)) == got.token_id
            assert set(got.logprobs) == {got.token_id, 1, 3}
            assert {t: lp.rank for t, lp in got.logprobs.items()} == {
                t: {1: 1, 3: 2, 2: 3, 0: 4, 4: 5}[t] for t in got.logprobs
            }

    def test_equal_logits_rank_by_id_and_no_rank_repeats(self):
        result = sample(logits([2.0, 2.0, 1.0, 2.0]), [row(temperature=0, logprobs=4)])[0]
        assert result.logprobs is not None
        assert {t: lp.rank for t, lp in result.logprobs.items()} == {0: 1, 1: 2, 3: 3, 2: 4}

    def test_more_than_the_vocabulary_is_all_of_it(self):
        result = sample(logits([2.0, -INF]), [row(logprobs=64)])[0]
        assert result.logprobs is not None
        assert result.logprobs[1].logprob == -INF
        assert sum(math.exp(lp.logprob) for lp in result.logprobs.values()) == pytest.approx(1)

    def test_given_tokens_have_what_sampled_ones_have(self):
        values = torch.randn(12, 997, generator=torch.Generator().manual_seed(5)) * 3
        values[4] = torch.nan
        rows = [i for i in range(12) if i != 4]
        got = sample(values[rows], [row(i, logprobs=i) for i in rows])
        tokens = dict(zip(rows, (each.token_id for each in got), strict=True))
        entries = logprobs_of(values, [(tokens.get(i, 0), i) for i in range(12)])
        assert entries.pop(4) is None
        assert entries == [each.logprobs for each in got]
        assert [list(entry or ()) for entry in entries] == [list(each.logprobs or ()) for each in got]

    def test_asking_for_logprobs_does_not_change_the_token(self):
        values = torch.randn(30, 100, generator=torch.Generator().manual_seed(4))
        plain = sample(values, [row(i) for i in range(30)])
        asked = sample(values, [row(i, logprobs=5) for i in range(30)])
        assert [t.token_id for t in plain] == [t.token_id for t in asked]


class TestValidate:
    def test_stop_token_ids_must_lie_in_the_vocabulary(self):
        validate(params(stop_token_ids=[0, 99]), vocab_size=100)
        with pytest.raises(RequestError, match="stop_token_ids: 100 is not below the vocabulary size 100"):
            validate(params(stop_token_ids=[3, 100]), vocab_size=100)

    def test_number_of_stop_strings_is_bounded(self):
        validate(params(stop=[str(i) for i in range(MAX_STOP_STRINGS)]), vocab_size=10)
        with pytest.raises(RequestError, match="at most"):
            validate(params(stop=[str(i) for i in range(MAX_STOP_STRINGS + 1)]), vocab_size=10)
