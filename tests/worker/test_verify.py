"""Drafts change no token: what a walk along them draws is what is drawn without, and the rest is how often they fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longfill.request import SamplingParams
from longfill.worker.history import TokenHistory
from longfill.worker.sampler import LogitsError, SampledToken, SampleInput, draft_token, sample, verify

VOCAB = 6
P = np.array([0.35, 0.25, 0.2, 0.1, 0.07, 0.03])
"""A distribution whose logits are drawn from again and again."""
LOGITS = torch.tensor(np.log(P), dtype=torch.float32)
CHI_SQUARE = {4: 18.5, 5: 20.5}
"""99.9% by degrees of freedom. The seeds are fixed, so that a test passes always or never."""
SEEDS = range(3000)

CHOICES = [
    {"temperature": 0},
    {},
    {"temperature": 0.6, "top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.5},
    {"logit_bias": {5: 3.0, 0: -1.0}},
]


def request(seed: int = 0, index: int = 0, history: TokenHistory | None = None, **kwargs) -> SampleInput:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": None, **kwargs})
    return SampleInput("r", params, seed, index, stop_token_ids=(0, 1), history=history)


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def one_by_one(rows: torch.Tensor, row: SampleInput) -> list[SampledToken]:
    """Without drafts: a step for each row."""
    return [
        sample(logits[None], [SampleInput("r", row.params, row.seed, row.output_index + i, (0, 1), row.history)])[0]
        for i, logits in enumerate(rows)
    ]


def ids(tokens) -> list[int]:
    return [token.token_id for token in tokens]


def chi_square(seen: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * seen.sum()
    assert (seen[expected == 0] == 0).all()
    possible = expected > 0
    return float(((seen - expected)[possible] ** 2 / expected[possible]).sum())


class TestTheWalk:
    @settings(max_examples=200, deadline=None)
    @given(
        drafts=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        right=st.integers(0, 8),
        seed=st.integers(0, 2**64 - 1),
        index=st.integers(0, 10),
        choice=st.sampled_from([*CHOICES, {"logprobs": 2}, {"min_tokens": 4}, {"presence_penalty": 1.5}]),
    )
    def test_gives_the_tokens_of_single_steps_as_far_as_the_drafts_are_right(self, drafts, right, seed, index, choice):
        rows = random_rows(len(drafts) + 1)
        before = np.arange(index) % VOCAB

        def fresh() -> SampleInput:
            return request(seed, index, TokenHistory(np.array([2]), VOCAB, before.tolist()), **choice)

        want = one_by_one(rows, fresh())
        drafts[:right] = ids(want)[: min(right, len(drafts))]
        agreed = next((i for i, draft in enumerate(drafts) if draft != want[i].token_id), len(drafts))
        walked = fresh()
        assert list(verify(rows, walked, drafts)) == want[: agreed + 1]
        assert walked.history is not None
        assert walked.history.num_output_tokens == index + agreed + 1
        # As the step before it was dropped: from the same history again.
        assert list(verify(rows, walked, drafts)) == want[: agreed + 1]

    @pytest.mark.parametrize("rows", [1, 3])
    def test_rows_are_one_more_than_the_drafts(self, rows):
        with pytest.raises(ValueError, match=r"want float32 logits \[2, V\]"):
            verify(random_rows(rows), request(), [0])

    def test_each_row_sees_the_tokens_before_it(self):
        rows = LOGITS.expand(4, -1)
        walked = request(temperature=0, presence_penalty=2.0, history=TokenHistory(np.array([5]), VOCAB))
        assert ids(verify(rows, walked, [0, 1, 2])) == [0, 1, 2, 3]

    def test_min_tokens_counts_the_rows(self):
        rows = LOGITS.expand(4, -1)
        # Outputs 1 and 2 may not be token 0 or 1; output 3 may.
        assert ids(verify(rows, request(temperature=0, min_tokens=3, index=1), [2, 2, 1])) == [2, 2, 0]

    def test_logprobs_are_those_of_each_row(self):
        rows = random_rows(3)
        tokens = verify(rows, request(logprobs=1), ids(one_by_one(rows, request()))[:2])
        for token, row in zip(tokens, rows, strict=True):
            assert token.logprobs is not None
            want = row.double().log_softmax(-1)[token.token_id]
            assert token.logprobs[token.token_id].logprob == pytest.approx(float(want))


class TestRowsThatAllowNoToken:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("choice", CHOICES)
    def test_matter_only_once_the_walk_is_there(self, bad, choice):
        rows = random_rows(4)
        right = ids(one_by_one(rows, request(3, **choice)))
        broken = rows.clone()
        broken[2, 1] = bad
        wrong = [right[0], (right[1] + 1) % VOCAB, right[2]]
        assert ids(verify(broken, request(3, **choice), wrong)) == right[:2]
        # It ends before the row, as steps without drafts do; the next step begins with it.
        assert ids(verify(broken, request(3, **choice), right[:3])) == right[:2]
        with pytest.raises(LogitsError, match="request r: the model's logits contain NaN") as caught:
            verify(broken[2:], request(3, 2, **choice), right[2:3])
        assert list(caught.value.reasons) == ["r"]

    def test_a_row_without_a_token_after_masking_ends_the_walk_too(self):
        rows = torch.full((2, VOCAB), -math.inf)
        rows[0, 2] = rows[1, 0] = 0.0
        assert ids(verify(rows, request(min_tokens=2), [2])) == [2]
        with pytest.raises(LogitsError, match="min_tokens"):
            verify(rows[1:], request(index=1, min_tokens=2), [])


def peeking(seed: int) -> int:
    """Whatever is not drawn."""
    return (sample(LOGITS[None], [request(seed)])[0].token_id + 1) % VOCAB


DRAFTERS: dict[str, Callable[[int], int]] = {
    "the same model": lambda seed: draft_token(LOGITS, request().params, seed, 0),
    "a near model": lambda seed: draft_token(LOGITS + 0.3 * random_rows(1, 8)[0], request().params, seed, 0),
    "the best": lambda _seed: 0,
    "the worst": lambda _seed: VOCAB - 1,
    "whatever is wrong": peeking,
    "by the seed": lambda seed: seed % VOCAB,
}


class TestDistribution:
    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_tokens_follow_the_models_probabilities_whatever_is_drafted(self, drafter):
        """Of the first token, and of the second where the first draft is right."""
        first, second = np.zeros(VOCAB), np.zeros(VOCAB)
        rows = LOGITS.expand(2, -1)
        for seed in SEEDS:
            tokens = ids(verify(rows, request(seed), [DRAFTERS[drafter](seed)]))
            assert tokens == ids(one_by_one(rows, request(seed)))[: len(tokens)]
            first[tokens[0]] += 1
            if len(tokens) == 2:
                second[tokens[1]] += 1
        assert chi_square(first, P) < CHI_SQUARE[VOCAB - 1]
        if drafter == "whatever is wrong":
            assert second.sum() == 0
        elif second.sum() > 200:
            assert chi_square(second, P) < CHI_SQUARE[VOCAB - 1]

    @pytest.mark.parametrize("draft", range(VOCAB))
    def test_a_draft_is_accepted_with_its_probability_and_else_replaced_by_the_rest(self, draft):
        rest = np.zeros(VOCAB)
        accepted = 0
        for seed in SEEDS:
            tokens = ids(verify(LOGITS.expand(2, -1), request(seed), [draft]))
            if len(tokens) == 2:
                accepted += 1
            else:
                rest[tokens[0]] += 1
        deviation = math.sqrt(len(SEEDS) * P[draft] * (1 - P[draft]))
        assert abs(accepted - len(SEEDS) * P[draft]) < 3.3 * deviation  # 99.9%
        without = np.where(np.arange(VOCAB) == draft, 0, P)
        assert chi_square(rest, without / without.sum()) < CHI_SQUARE[VOCAB - 2]

    def test_a_whole_text_is_the_same_with_drafts_of_any_quality(self):
        """A Markov chain as the model: what follows depends on the token before."""
        model = random_rows(VOCAB, 5)
        pairs = np.zeros((VOCAB, VOCAB))
        for seed in range(120):
            want = [0]
            for index in range(20):
                want.append(sample(model[want[-1]][None], [request(seed, index)])[0].token_id)
            for quality in (0.0, 0.5, 3.0):
                assert speculative(model, seed, quality, length=20) == want
            np.add.at(pairs, (want[:-1], want[1:]), 1)
        probabilities = model.double().softmax(-1).numpy()
        for token in range(VOCAB):
            often = probabilities[token] * pairs[token].sum() > 5
            merged = np.append(pairs[token][often], pairs[token][~often].sum())
            share = np.append(probabilities[token][often], probabilities[token][~often].sum())
            assert chi_square(merged, share) < CHI_SQUARE[5]


def speculative(model: torch.Tensor, seed: int, noise: float, *, length: int, drafts: int = 3) -> list[int]:
    """A text from the model with drafts from a noisy copy of it."""
    drafter = model + noise * random_rows(VOCAB, 6)
    text = [0]
    while len(text) <= length:
        index, guesses = len(text) - 1, text[-1:]
        for i in range(drafts):
            guesses.append(draft_token(drafter[guesses[-1]], request().params, seed, index + i))
        text += ids(verify(model[guesses], request(seed, index), guesses[1:]))
    return text[: length + 1]


class TestDrafts:
    @pytest.mark.parametrize("choice", CHOICES)
    def test_the_same_logits_are_accepted_always(self, choice):
        params = request(**choice).params
        for seed in range(200):
            rows = random_rows(4, seed)
            drafts = [draft_token(row, params, seed, 5 + i) for i, row in enumerate(rows[:3])]
            assert len(verify(rows, request(seed, 5, **choice), drafts)) == 4

    def test_a_common_uniform_fits_more_often_than_one_of_its_own(self):
        near = LOGITS + 0.3 * random_rows(1, 8)[0]
        q = near.double().softmax(-1).numpy()
        drawn = [sample(LOGITS[None], [request(seed)])[0].token_id for seed in SEEDS]
        common = sum(draft_token(near, request().params, s, 0) == t for s, t in zip(SEEDS, drawn, strict=True))
        own = sum(draft_token(near, request().params, 2**63 + s, 0) == t for s, t in zip(SEEDS, drawn, strict=True))
        assert abs(own / len(SEEDS) - float((P * q).sum())) < 0.03
        assert common > 1.5 * own

    def test_a_greedy_request_takes_the_first_of_the_best(self):
        params = request(temperature=0).params
        assert draft_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), params, 9, 9) == 1
        assert draft_token(torch.tensor([1.0, 3.0, 3.5, 2.0], dtype=torch.bfloat16), params, 9, 9) == 2

    @pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_that_allow_no_token_still_give_a_guess(self, values, temperature):
        assert draft_token(torch.tensor(values), request(temperature=temperature).params, 1, 1) == 0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_its_logits_are_not_touched(self, dtype):
        values = random_rows(1)[0].to(dtype)
        before = values.clone()
        draft_token(values, request(logit_bias={1: 5.0}).params, 1, 1)
        assert torch.equal(values, before)
