"""Text while it is sampled: equal to the decode of the whole, cut at stop strings, and never a part of one shown."""

from __future__ import annotations

import time
from functools import cache

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from longfill.engine.detokenizer import Detokenizer, StopHit
from longfill.engine.token_bytes import _BYTE_OF_CHAR
from longfill.engine.tokenizer import Tokenizer
from longfill.request import SamplingParams

KINDS = [build.__name__ for build in small_tokenizers.ALL]
FALLBACK_KINDS = [build.__name__ for build in small_tokenizers.BYTE_FALLBACK]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(getattr(small_tokenizers, kind)())


def ids_of(kind: str, *tokens: str) -> list[int]:
    ids = [tokenizer(kind).backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def fallback(kind: str, text: bytes) -> list[int]:
    return ids_of(kind, *(f"<0x{byte:02X}>" for byte in text))


def run(kind: str, ids: list[int], **params) -> tuple[list[str], str, StopHit | None, int]:
    """Text after each token, the final text, the stop, and how many tokens were taken."""
    detokenizer = Detokenizer(tokenizer(kind), SamplingParams(**params))
    seen = []
    for taken, token in enumerate(ids, 1):
        hit = detokenizer.append(token)
        seen.append(detokenizer.text)
        if hit is not None:
            return seen, detokenizer.text, hit, taken
    hit = detokenizer.finish()
    return seen, detokenizer.text, hit, len(ids)


def char_by_char(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: read characters until some stop string is complete."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@st.composite
def sequences(draw, kind: str):
    """Token ids in which runs of bytes, specials and unknown ids are common."""
    vocabulary = tokenizer(kind).vocab_size
    low = st.integers(0, min(270, vocabulary - 1))
    any_id = st.integers(0, vocabulary + 3)
    return draw(st.lists(st.one_of(low, any_id), max_size=30))


class TestEqualsTheDecodeOfTheWhole:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("skip", [True, False])
    @settings(max_examples=120, deadline=None)
    @given(data=st.data())
    def test_for_any_tokens(self, kind, skip, data):
        ids = data.draw(sequences(kind))
        _, text, hit, _ = run(kind, ids, skip_special_tokens=skip)
        assert text == tokenizer(kind).decode(ids, skip_special_tokens=skip)
        assert hit is None

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_released_text_never_changes(self, kind, data):
        ids = data.draw(sequences(kind))
        seen, text, _, _ = run(kind, ids)
        for before, after in zip(["", *seen], [*seen, text], strict=True):
            assert after.startswith(before)

    @pytest.mark.parametrize("kind", ["gpt2", "glm", "deepseek", "qwen", "llama", "metaspace"])
    @settings(max_examples=60, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    def test_valid_text_shows_no_replacement_on_the_way(self, kind, text):
        text = text.replace("\ufffd", "")
        ids = tokenizer(kind).encode(text, add_special_tokens=False).tolist()
        seen, final, _, _ = run(kind, ids, skip_special_tokens=False)
        assert all("\ufffd" not in part for part in seen)
        assert final == tokenizer(kind).decode(ids, skip_special_tokens=False)

    def test_byte_level_alphabet_is_the_library_s(self):
        ids = tokenizer("gpt2")
        for char, byte in _BYTE_OF_CHAR.items():
            token = ids.backend.token_to_id(char)
            assert run("gpt2", [token])[1] == bytes([byte]).decode("utf-8", errors="replace")
        assert len(_BYTE_OF_CHAR) == 256


class TestIncompleteCharacters:
    @pytest.mark.parametrize("char", ["é", "価", "🙂"])
    def test_byte_level_waits_for_the_last_byte(self, char):
        alphabet = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
        ids = ids_of("gpt2", *(alphabet[byte] for byte in char.encode()))
        seen, text, _, _ = run("gpt2", ids)
        assert seen == [""] * (len(ids) - 1) + [char]
        assert run("gpt2", ids[:-1])[1] == "\ufffd"
        assert text == char

    @pytest.mark.parametrize("kind", FALLBACK_KINDS)
    def test_byte_fallback_waits_for_the_end_of_the_run(self, kind):
        after = ids_of(kind, "b")
        for text in ("é", "価🙂", "\n"):
            seen, final, _, _ = run(kind, [*fallback(kind, text.encode()), *after])
            assert seen[-1].startswith(text)
            assert final.startswith(text)
            assert set(seen[:-1]) == {""}

    @pytest.mark.parametrize("kind", FALLBACK_KINDS)
    def test_a_run_that_is_not_utf8_is_replaced_as_a_whole(self, kind):
        ids = [*fallback(kind, b"ok\xff"), *ids_of(kind, "b")]
        assert run(kind, ids)[1] == tokenizer(kind).decode(ids)
        assert run(kind, ids)[1].startswith("\ufffd" * 3)

    def test_skipped_special_token_does_not_break_a_character(self):
        half, rest = fallback("llama", "é".encode())
        assert run("llama", [half, *ids_of("llama", "<|eos|>"), rest])[1] == "é"


class TestStopStrings:
    STOPS = st.lists(st.text("ab .é", min_size=1, max_size=4), min_size=1, max_size=3)

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "needle"])
    @pytest.mark.parametrize("include", [False, True])
    @settings(max_examples=250, deadline=None)
    @given(data=st.data(), stops=STOPS)
    def test_cut_where_reading_character_by_character_would_cut(self, kind, include, data, stops):
        # Few different characters, spelled in words and in bytes, so that stop strings occur at every split.
        choices = [ids_of(kind, token) for token in ("a", "b", ".")]
        if kind == "gpt2":
            choices += [ids_of(kind, "Ġ"), ids_of(kind, "Ã", "©"), ids_of(kind, "Ã")]
        else:
            choices += [fallback(kind, text) for text in (b"a", b" ", "é".encode(), b"\xc3")]
        ids = [i for chunk in data.draw(st.lists(st.sampled_from(choices), max_size=14)) for i in chunk]
        seen, text, hit, taken = run(kind, ids, stop=stops, include_stop_str_in_output=include)
        whole = tokenizer(kind).decode(ids)
        want, stop = char_by_char(whole, stops, include)
        if "\ufffd" in whole and kind != "gpt2" and hit is not None:
            # A stop among bytes that later bytes spoil counts: it was the text when it was complete.
            whole = tokenizer(kind).decode(ids[:taken])
            want, stop = char_by_char(whole, stops, include)
        assert text == want
        assert hit == (None if stop is None else StopHit(stop))
        for part in seen:
            assert text.startswith(part), "text was shown and then taken back"

    @pytest.mark.parametrize("include", [False, True])
    def test_at_every_split_into_tokens(self, include):
        text, stop = "ab.STOP.ba", "STOP"
        spelled = [ids_of("gpt2", char)[0] for char in text]
        want = "ab." + (stop if include else "")
        for head in range(1, len(text) + 1):
            ids = tokenizer("gpt2").encode(text[:head], add_special_tokens=False).tolist()
            ids += spelled[head:]
            _, got, hit, _ = run("gpt2", ids, stop=stop, include_stop_str_in_output=include)
            assert (got, hit) == (want, StopHit(stop))

    def test_stops_at_the_token_that_completes_it(self):
        ids = ids_of("gpt2", *"ab.ba")
        assert run("gpt2", ids, stop=".b")[3] == 4
        assert run("llama", fallback("llama", b"a\nb"), stop="\n")[3] == 2

    def test_token_that_overruns_the_stop_string_is_cut(self):
        token = tokenizer("gpt2").backend.id_to_token(next(i for i in range(300, 600)))
        assert len(token) > 1
        ids = ids_of("gpt2", "a", token)
        text = tokenizer("gpt2").decode(ids)
        assert run("gpt2", ids, stop=text[1])[1] == "a"
        assert run("gpt2", ids, stop=text[1], include_stop_str_in_output=True)[1] == text[:2]

    def test_a_part_of_a_stop_string_is_held_back_then_released(self):
        seen, text, hit, _ = run("gpt2", ids_of("gpt2", *"aSTO"), stop="STOP")
        assert seen == ["a"] * 4
        assert (text, hit) == ("aSTO", None)
        assert run("gpt2", ids_of("gpt2", *"aSTOa"), stop="STOP")[0][-1] == "aSTOa"
        assert run("gpt2", ids_of("gpt2", *"SSTSTO"), stop="STOP")[0] == ["", "S", "S", "SST", "SST", "SST"]

    def test_nothing_is_held_back_where_the_stop_string_is_shown_anyway(self):
        assert run("gpt2", ids_of("gpt2", *"STO"), stop="STOP", include_stop_str_in_output=True)[0][-1] == "STO"

    def test_the_stop_string_that_ends_first_counts_whatever_the_order(self):
        for stops in (["d", "abc"], ["abc", "d"]):
            assert run("gpt2", ids_of("gpt2", *"xabcd"), stop=stops)[1:3] == ("x", StopHit("abc"))
        assert run("gpt2", ids_of("gpt2", *"xabc"), stop=["bc", "abc"])[2] == StopHit("bc")
        assert run("gpt2", ids_of("gpt2", *"xabc"), stop=["abc", "bc"])[2] == StopHit("abc")

    def test_the_stop_string_that_ends_first_counts_inside_one_token(self):
        for stops in (["we", "ns"], ["ns", "we"], ["er", "we", "ns"]):
            assert run("needle", ids_of("needle", "Answer"), stop=stops)[1:3] == ("A", StopHit("ns"))

    def test_tokens_after_the_stop_change_nothing(self):
        detokenizer = Detokenizer(tokenizer("gpt2"), SamplingParams(stop="b"))
        for token in ids_of("gpt2", *"ab"):
            detokenizer.append(token)
        assert detokenizer.append(ids_of("gpt2", "c")[0]) == StopHit("b")
        assert detokenizer.finish() == StopHit("b")
        assert detokenizer.text == "a"

    def test_finish_twice_is_finish_once(self):
        detokenizer = Detokenizer(tokenizer("gpt2"), SamplingParams(stop="bc"))
        detokenizer.append(ids_of("gpt2", "b")[0])
        assert [detokenizer.finish(), detokenizer.text, detokenizer.finish(), detokenizer.text] == [None, "b"] * 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_cost_of_a_token_does_not_grow_with_the_text(kind):
    detokenizer = Detokenizer(tokenizer(kind), SamplingParams(stop=["never seen", "nor this"]))
    tokens = ids_of(kind, "a", "b", ".", "a")

    def seconds(count: int) -> float:
        start = time.process_time()
        for i in range(count):
            detokenizer.append(tokens[i % 4])
        return time.process_time() - start

    seconds(100)
    early = min(seconds(500) for _ in range(3))
    seconds(20000)
    late = min(seconds(500) for _ in range(3))
    assert late < 3 * early


class TestMinTokens:
    """A stop string counts from the token behind the first `min_tokens` on, as in vLLM."""

    @pytest.mark.parametrize(("min_tokens", "want"), [(0, "a"), (1, "a"), (2, "abxa"), (4, "abxa"), (5, "abxabx")])
    def test_one_that_ends_before_is_text(self, min_tokens, want):
        ids = ids_of("gpt2", *"abxabx")
        _, text, hit, taken = run("gpt2", ids, stop=["b"], min_tokens=min_tokens)
        assert text == want
        assert (hit, taken) == ((StopHit("b"), len(want) + 1) if len(want) < 6 else (None, 6))

    def test_one_that_begins_before_and_ends_behind_counts(self):
        seen, text, hit, taken = run("gpt2", ids_of("gpt2", *"xabc"), stop=["abc"], min_tokens=3)
        assert (seen, text, hit, taken) == (["x", "x", "x", "x"], "x", StopHit("abc"), 4)

    def test_a_short_one_that_ended_before_is_not_found_later_beside_a_long_one(self):
        _, text, hit, _ = run("gpt2", ids_of("gpt2", *"abcd"), stop=["b", "abcdef"], min_tokens=2)
        assert (text, hit) == ("abcd", None)

    @pytest.mark.parametrize("kind", FALLBACK_KINDS)
    def test_what_waits_for_the_end_counts_only_behind(self, kind):
        for min_tokens, want in ((0, ("", StopHit("a"))), (1, ("a", None))):
            _, text, hit, _ = run(kind, fallback(kind, b"a"), stop=["a"], min_tokens=min_tokens)
            assert (text, hit) == want
