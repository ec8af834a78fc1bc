"""A prompt from a haystack is as long as it was asked to be, whatever the tokenizer makes of a sentence."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from longfill.needle import haystack
from longfill.needle.haystack import FillerGrammar, Haystack, build_haystack

Count = Callable[[str], int]


def counting(**lengths: int) -> Count:
    """Tokens of a word: as given for `other` and `stop`, else 1; digits and marks are one token each."""

    def count(text: str) -> int:
        total = 0
        for word in text.split():
            body = word.rstrip(".,:?")
            total += 1 if body in haystack._PADDING or not body else lengths.get("other", 1)
            total += len(word) - len(body) if "stop" not in lengths else lengths["stop"] * (len(word) - len(body))
        return total

    return count


def assert_exact(built: Haystack, context: int, reserve: int, count: Count) -> None:
    assert built.facts
    for fact in built.facts:
        prompt = built.text + built.question(fact)
        assert sum(count(" " + word) for word in prompt.split()) + reserve == context


@pytest.mark.parametrize("other", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_the_length_is_exact_however_long_a_sentence_is(other: int, stop: int) -> None:
    count = counting(other=other, stop=stop)
    for seed in range(10):
        for context in (1500 * other, 1500 * other + 1, 2000 * other + 7):
            built = build_haystack(context, seed=seed, count=count, reserve=3, facts=8)
            assert_exact(built, context, 3, count)


def test_these_tokenizers_have_sentences_on_both_sides_of_the_gap() -> None:
    """Else the test above would not try what it says."""
    longest = {
        other: max(
            counting(other=other)(FillerGrammar(random.Random(seed), frozenset()).sentence()) for seed in range(200)
        )
        for other in (1, 8)
    }
    assert longest[1] < haystack._LONGEST_GAP < longest[8]


def test_a_tokenizer_that_splits_the_padding_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 tokens of 'and'"):
        build_haystack(40_000, seed=0, count=len, reserve=1)
