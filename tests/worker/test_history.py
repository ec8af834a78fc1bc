"""What penalties, biases and min_tokens make of logits: vLLM's formulas, in its order, from the tokens alone."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longfill.errors import RequestError
from longfill.request import SamplingParams
from longfill.worker.history import TokenHistory, adjusted, changes_logits
from longfill.worker.sampler import ROW_BYTES, LogitsError, SampleInput, sample, validate

INF = math.inf
VOCAB = 7


def history(prompt=(0,), outputs=(), vocab: int = VOCAB) -> TokenHistory:
    return TokenHistory(np.array(prompt, dtype=np.int64), vocab, outputs)


def changed(values, *, index: int = 0, prompt=(0,), outputs=(), stops=(), **kwargs) -> list[float]:
    logits = np.array(values, dtype=np.float64)
    params = SamplingParams(**{"max_tokens": None, **kwargs})
    got = adjusted(logits, params, index, stop_token_ids=stops, history=history(prompt, outputs, len(values)))
    assert logits.tolist() == values
    return got.tolist()


def plain(values, prompt, outputs, stops, params: SamplingParams) -> list[float]:
    """The definition, one token at a time."""
    result = []
    for token, value in enumerate(values):
        if len(outputs) < params.min_tokens and token in stops:
            value = -INF
        value += (params.logit_bias or {}).get(token, 0)
        if token in prompt or token in outputs:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * outputs.count(token)
        value -= params.presence_penalty * (token in outputs)
        result.append(value)
    return result


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(-30, 30), st.just(-INF)), min_size=VOCAB, max_size=VOCAB),
    prompt=TOKENS.filter(bool),
    outputs=TOKENS,
    stops=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.1, 4),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 12),
)
def test_same_as_one_token_at_a_time(values, prompt, outputs, stops, presence, frequency, repetition, bias, min_tokens):
    kwargs = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    kwargs |= {"logit_bias": bias, "min_tokens": min_tokens}
    got = changed(values, index=len(outputs), prompt=prompt, outputs=outputs, stops=stops, **kwargs)
    want = plain(values, prompt, outputs, stops, SamplingParams(max_tokens=None, **kwargs))
    assert got == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_repetition_counts_the_prompt_and_the_others_do_not():
    values = [4.0, -4.0, 4.0]
    assert changed(values, prompt=[0, 1], repetition_penalty=2.0) == [2.0, -8.0, 4.0]
    assert changed(values, prompt=[0, 1], presence_penalty=1.0, frequency_penalty=1.0) == values
    assert changed(values, prompt=[0, 0], outputs=[1, 2, 2], presence_penalty=0.5) == [4.0, -4.5, 3.5]
    assert changed(values, prompt=[0, 0], outputs=[1, 2, 2], frequency_penalty=0.5) == [4.0, -4.5, 3.0]


def test_the_order_is_vllms():
    # The bias comes before the division, the subtraction behind it.
    got = changed(
        [2.0], outputs=[0], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, logit_bias={0: 4.0}
    )
    assert got == [(2.0 + 4.0) / 2.0 - 1.0 - 1.0]
    # A bias may change the sign, and with it what the penalty does.
    assert changed([2.0], outputs=[0], repetition_penalty=2.0, logit_bias={0: -4.0}) == [-4.0]
    # No bias brings back what min_tokens took away.
    assert changed([2.0, 0.0], min_tokens=1, stops=[0], logit_bias={0: 100.0}) == [-INF, 0.0]


def test_min_tokens_ends_where_it_says():
    for index, want in enumerate([-INF, -INF, 1.0, 1.0]):
        assert changed([1.0, 0.0], index=index, min_tokens=2, stops=[0]) == [want, 0.0]


def test_a_penalty_next_to_nothing_gives_no_infinity():
    for penalty in (5e-324, 1e-300):
        got = changed([3.0, 2.0, 0.0, -1.0], prompt=[0, 1, 2, 3], repetition_penalty=penalty)
        assert np.isfinite(got).all()
        assert got[0] >= got[1] > got[2] >= got[3]


def test_only_what_has_an_effect_changes_logits():
    params = SamplingParams(min_tokens=2)
    assert [changes_logits(params, index) for index in range(4)] == [True, True, False, False]
    assert not changes_logits(SamplingParams(logit_bias={}), 0)
    assert changes_logits(SamplingParams(logit_bias={1: 0.5}), 9)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert changes_logits(SamplingParams(**{name: 0.5}), 9)


def test_penalties_without_a_history_are_refused():
    with pytest.raises(ValueError, match="history"):
        adjusted(np.zeros(3), SamplingParams(presence_penalty=1.0), 0)


class TestHistory:
    @settings(max_examples=100, deadline=None)
    @given(
        prompt=TOKENS.filter(bool),
        moves=st.lists(st.one_of(st.integers(0, VOCAB - 1), st.floats(0, 1)), max_size=40),
    )
    def test_counts_are_those_of_the_tokens_whatever_happened_before(self, prompt, moves):
        kept, outputs = history(prompt), []
        for move in moves:
            if isinstance(move, int):
                kept.append(move)
                outputs.append(move)
            else:
                outputs = outputs[: int(move * len(outputs))]
                kept.truncate(len(outputs))
            assert kept.num_output_tokens == len(outputs)
            ids, counts = kept.output_counts()
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(outputs)
            assert kept.in_prompt_V.tolist() == [token in prompt for token in range(VOCAB)]

    def test_outputs_that_it_never_saw_are_an_error(self):
        kept = history(outputs=[1, 2])
        kept.truncate(2)
        with pytest.raises(ValueError, match="sees 3 outputs, but only 2"):
            kept.truncate(3)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(4))


PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.5}


def draw(values: torch.Tensor, known: TokenHistory, start: int = 0, temperature: float = 1.0) -> list[int]:
    """Tokens of consecutive steps of one request."""
    params = SamplingParams(temperature=temperature, **PENALTIES)
    return [
        sample(row[None], [SampleInput("r", params, 5, start + i, history=known)])[0].token_id
        for i, row in enumerate(values)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_see_the_tokens_before_them(temperature):
    values, params = rows(30), SamplingParams(temperature=temperature, **PENALTIES)
    got = draw(values, history([1, 2]), temperature=temperature)
    for i, row in enumerate(values):
        seen = SampleInput("r", params, 5, i, history=history([1, 2], got[:i]))
        assert sample(row[None], [seen])[0].token_id == got[i]
    unpenalised = SamplingParams(temperature=temperature)
    assert got != [sample(row[None], [SampleInput("r", unpenalised, 5, i)])[0].token_id for i, row in enumerate(values)]


@pytest.mark.parametrize("again_from", [0, 1, 7, 29])
def test_replay_after_preemption_or_a_dropped_step_gives_the_same_tokens(again_from):
    values, known = rows(30), history([3])
    want = draw(values, known)
    assert known.num_output_tokens == 30
    assert draw(values[again_from:], known, again_from) == want[again_from:]
    assert draw(values[again_from:], history([3], want[:again_from]), again_from) == want[again_from:]


def test_a_greedy_request_with_penalties_does_not_repeat_itself():
    values = torch.tensor([[3.0, 2.5, 2.0, 1.5, -5.0, -5.0, -5.0]]).expand(4, -1)
    assert draw(values, history([6]), temperature=0.0) == [0, 1, 2, 3]


def test_logprobs_are_those_of_the_models_logits():
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={2: 50.0})
    [token] = sample(torch.tensor([[3.0, 2.0, 1.0]]), [SampleInput("r", params, 0, 0)])
    assert token.token_id == 2
    assert token.logprobs is not None
    assert {t: lp.rank for t, lp in token.logprobs.items()} == {2: 3, 0: 1, 1: 2}
    want = torch.log_softmax(torch.tensor([3.0, 2.0, 1.0]).double(), -1)[2]
    assert token.logprobs[2].logprob == pytest.approx(float(want))


def test_masking_all_that_the_model_allows_ends_that_request_and_no_other():
    values = torch.tensor([[0.0, 1.0, -INF], [0.0, 1.0, 2.0], [math.nan, 0.0, 0.0]])
    masked = SamplingParams(temperature=0, min_tokens=1)
    inputs = [SampleInput(name, masked, 0, 0, stop_token_ids=(0, 1)) for name in "abc"]
    with pytest.raises(LogitsError) as caught:
        sample(values, inputs)
    assert list(caught.value.reasons) == ["a", "c"]
    assert "min_tokens" in caught.value.reasons["a"]
    assert "NaN" in caught.value.reasons["c"]
    assert sample(values[1:2], inputs[1:2])[0].token_id == 2
    assert "request a: min_tokens" in str(caught.value)


def test_biased_tokens_must_be_in_the_vocabulary():
    validate(SamplingParams(logit_bias={99: 1.0}), vocab_size=100)
    with pytest.raises(RequestError, match="logit_bias: token id 100 is not below the vocabulary size 100"):
        validate(SamplingParams(logit_bias={1: 0.0, 100: 1.0}), vocab_size=100)


def test_drawing_a_row_takes_no_more_memory_than_is_planned_for():
    vocab = 2**17
    known = TokenHistory(np.arange(vocab), vocab)
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) / 100
    params = SamplingParams(top_p=0.9999, logprobs=64, logit_bias={3: 1.0}, **PENALTIES)
    draw = SampleInput("r", params, 1, 0, history=known)
    sample(row, [draw])
    tracemalloc.start()
    try:
        sample(row, [draw])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.8 * ROW_BYTES <= peak / vocab <= ROW_BYTES
    assert known.in_prompt_V.nbytes == vocab
