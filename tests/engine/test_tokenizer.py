"""What transformers gives, whatever the text's length; clear errors for what a model folder lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import small_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import save_folder

from longfill.engine import tokenizer as module
from longfill.engine.text_pieces import may_cut, split_text
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ModelError, RequestError

CUTTABLE = [build.__name__ for build in small_tokenizers.CUTTABLE]
NOT_CUTTABLE = [build.__name__ for build in small_tokenizers.NOT_CUTTABLE]

# Pieces of text that meet at cuts: contractions, runs of every kind of space, scripts, marks, specials, halves of them.
CHUNKS = st.sampled_from(
    [
        *(
            "a",
            "the",
            "It's",
            "'S",
            "x1",
            "123",
            "7",
            "é",
            "e\u0301",
            "\u0301",
            "価格",
            "です",
            "문장",
            "ſ",
            "Ⅷ",
            "🙂",
            "\u3000",
        ),
        *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", " \n ", "\n\n"),
        *(".", ",", "'", "(", "<", "|", "...", "|>", "<|", "。"),
        *small_tokenizers.SPECIAL,
        *("<tool>", "naïve", "<|bos", "bos|>", "tool>"),
    ]
)
TEXTS = st.one_of(st.lists(CHUNKS, max_size=60).map("".join), st.text(st.characters(exclude_categories=["Cs"])))


@cache
def backend(kind: str):
    return getattr(small_tokenizers, kind)()


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(getattr(small_tokenizers, kind)())


@pytest.fixture
def tiny_pieces(monkeypatch):
    """Cut wherever it is allowed, so that every cut is tried."""
    monkeypatch.setattr(module, "_PIECE_CHARS", 1)
    monkeypatch.setattr(module, "_TRIM_ABOVE_CHARS", 0)


class TestPieces:
    @pytest.mark.parametrize("kind", CUTTABLE)
    def test_known_splits_may_be_cut(self, kind):
        assert may_cut(backend(kind))
        assert tokenizer(kind)._wrap is not None

    @pytest.mark.parametrize("kind", NOT_CUTTABLE)
    def test_splits_without_a_proof_are_encoded_whole(self, kind):
        assert not may_cut(backend(kind))

    @pytest.mark.parametrize("kind", [*CUTTABLE, *NOT_CUTTABLE])
    @settings(max_examples=150, deadline=None)
    @given(text=TEXTS, add=st.booleans())
    def test_ids_of_the_pieces_are_the_ids_of_the_whole(self, kind, text, add):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_PIECE_CHARS", 1)
            got = tokenizer(kind).encode(text, add_special_tokens=add)
        assert got.dtype == np.int64
        assert got.tolist() == backend(kind).encode(text, add_special_tokens=add).ids

    @settings(max_examples=200, deadline=None)
    @given(text=TEXTS, size=st.integers(1, 20))
    def test_pieces_join_to_the_text(self, text, size):
        pieces = list(split_text(text, size))
        assert "".join(pieces) == text
        assert all(len(piece) >= size for piece in pieces[:-1])

    @pytest.mark.parametrize(
        "token",
        [
            tokenizers.AddedToken("<big end>", normalized=False),
            tokenizers.AddedToken("a\nb", normalized=False),
            tokenizers.AddedToken("<m>", lstrip=True),
            tokenizers.AddedToken("<m>", rstrip=True),
            tokenizers.AddedToken("m", single_word=True),
        ],
    )
    def test_an_added_token_that_could_lie_across_a_cut_forbids_it(self, token):
        tokenizer = small_tokenizers.gpt2()
        tokenizer.add_tokens([token])
        assert not may_cut(tokenizer)
        text = "a <big end> a\nb a <m> a m a " * 5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_PIECE_CHARS", 1)
            assert Tokenizer(tokenizer).encode(text).tolist() == tokenizer.encode(text).ids

    @pytest.mark.parametrize(
        "change",
        [
            {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)},
            {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
            {"pre_tokenizer": tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+ \p{L}+"), "isolated")},
            {"pre_tokenizer": tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[A-Za-z]+|\S"), "merged_with_next")},
            {"normalizer": tokenizers.normalizers.NFKC()},
            {"normalizer": tokenizers.normalizers.Sequence([tokenizers.normalizers.Strip()])},
        ],
    )
    def test_one_unproved_part_forbids_it(self, change):
        tokenizer = small_tokenizers.gpt2()
        for name, value in change.items():
            setattr(tokenizer, name, value)
        assert not may_cut(tokenizer)

    def test_dropout_forbids_it(self):
        tokenizer = small_tokenizers.gpt2()
        tokenizer.model.dropout = 0.1
        assert not may_cut(tokenizer)

    def test_a_long_text_is_cut_at_the_real_size(self):
        text = "".join(small_tokenizers.CORPUS) * 70
        assert len(text) > 2 * module._PIECE_CHARS * module._PIECES_AT_ONCE
        assert tokenizer("glm").encode(text).tolist() == backend("glm").encode(text).ids

    def test_memory_of_a_long_text_stays_near_its_size(self, tmp_path):
        # In a process of its own: the peak resident size never comes down.
        save_folder(tmp_path / "m", small_tokenizers.glm())
        program = """
import resource, sys
from longfill.engine.tokenizer import Tokenizer
tokenizer = Tokenizer.from_folder(sys.argv[1])
text = "The access code of amber Kestrel is 48213, it said.\\n" * 40_000
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
tokenizer.encode(text[:200_000])
before = peak()
ids = tokenizer.encode(text)
print(len(text), len(ids), peak() - before)
"""
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "m"], capture_output=True, text=True, check=True
        )
        chars, count, extra = map(int, done.stdout.split())
        assert count > chars / 8
        # int64 ids twice while they are joined, and a few MB in flight.
        assert extra < 16 * count + 10 * chars, (chars, count, extra)


CONFIG = {
    "bos_token": "<|bos|>",
    "eos_token": {"__type": "AddedToken", "content": "<|eos|>", "lstrip": False, "rstrip": False, "normalized": False},
    "pad_token": "<pad>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


class TestAgainstTransformers:
    @pytest.mark.parametrize("kind", ["glm", "gpt2", "llama", "needle"])
    @pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_eos_token": True, "add_bos_token": False}])
    def test_same_ids_and_same_text(self, tmp_path, kind, flags):
        transformers = pytest.importorskip("transformers")
        folder = save_folder(tmp_path / "m", backend(kind), tokenizer_config={**CONFIG, **flags})
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = Tokenizer.from_folder(folder)
        for text in ("", "It's <|eos|> here", " a  b\n", "価格<tool>🙂 naïve", "<｜end▁of▁turn｜>x"):
            for add in (True, False):
                ids = theirs(text, add_special_tokens=add)["input_ids"]
                assert ours.encode(text, add_special_tokens=add).tolist() == ids
                for skip in (True, False):
                    assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.special_tokens == theirs.special_tokens_map

    def test_special_tokens_of_the_configuration_that_tokenizer_json_does_not_mark(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = {
            "eos_token": "<tool>",
            "additional_special_tokens": ["the"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        folder = save_folder(tmp_path / "m", backend("glm"), tokenizer_config=config)
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
        ids = theirs("a<tool>other")["input_ids"]
        assert ours.encode("a<tool>other").tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "aor"


class TestFolder:
    def test_missing_tokenizer_json_says_what_to_do(self, tmp_path):
        with pytest.raises(ModelError, match=r"no tokenizer.json; .*--skip-tokenizer-init"):
            Tokenizer.from_folder(tmp_path)

    def test_malformed_files_are_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
            Tokenizer.from_folder(tmp_path)
        for name in ("tokenizer_config", "generation_config", "config", "special_tokens_map"):
            for content in ("{", "[]"):
                folder = save_folder(tmp_path / "m", backend("glm"))
                (folder / f"{name}.json").write_text(content)
                with pytest.raises(ModelError, match=f"{name}.json"):
                    Tokenizer.from_folder(folder)
                (folder / f"{name}.json").unlink()

    @pytest.mark.parametrize(
        ("files", "want"),
        [
            ({}, ()),
            ({"tokenizer_config": {"eos_token": "<|eos|>"}}, (1,)),
            ({"config": {"eos_token_id": 7}}, (7,)),
            ({"config": {"eos_token_id": [7, 5]}}, (5, 7)),
            ({"config": {"eos_token_id": None}, "generation_config": {}}, ()),
            ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 3]}}, (3, 9)),
            ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|eos|>"}}, (1, 7)),
            ({"generation_config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<|eos|>"}}, (1,)),
        ],
    )
    def test_ids_that_end_an_answer(self, tmp_path, files, want):
        assert Tokenizer.from_folder(save_folder(tmp_path / "m", backend("glm"), **files)).eos_token_ids == want

    @pytest.mark.parametrize("bad", ["</s>", -1, 1.5, [1, None]])
    def test_bad_eos_id_names_the_file(self, tmp_path, bad):
        folder = save_folder(tmp_path / "m", backend("glm"), config={"eos_token_id": bad})
        with pytest.raises(ModelError, match=r"config.json: eos_token_id"):
            Tokenizer.from_folder(folder)

    def test_truncation_and_padding_left_in_tokenizer_json_do_not_touch_prompts(self, tmp_path):
        limited = tokenizers.Tokenizer.from_str(backend("glm").to_str())
        limited.enable_truncation(4)
        limited.enable_padding(length=50)
        loaded = Tokenizer.from_folder(save_folder(tmp_path / "m", limited))
        assert loaded.encode("a b c d e f g").tolist() == backend("glm").encode("a b c d e f g").ids

    def test_vocab_size_is_one_past_the_largest_id(self):
        state = json.loads(backend("needle").to_str())
        highest = max(state["model"]["vocab"].values())
        state["added_tokens"].append({**state["added_tokens"][0], "id": highest + 10, "content": "<far>"})
        try:
            sparse = tokenizers.Tokenizer.from_str(json.dumps(state))
        except Exception:
            pytest.skip("this version of tokenizers refuses gaps")
        assert Tokenizer(sparse).vocab_size == max(sparse.get_vocab().values()) + 1
        assert tokenizer("needle").vocab_size == highest + 1


class TestTexts:
    def test_lone_surrogate_is_a_request_error(self):
        for text in ("a\ud800b", "\udc00" * 3, "a " * 20_000 + "\ud800"):
            with pytest.raises(RequestError, match="valid Unicode"):
                tokenizer("gpt2").encode(text)

    def test_ids_the_tokenizer_does_not_know_give_no_text(self):
        ids = tokenizer("gpt2").encode("ab").tolist()
        assert tokenizer("gpt2").decode([*ids, 10**6, *ids]) == "abab"

    def test_ids_out_of_range_are_a_request_error(self):
        for bad in (-1, 2**32, 2**40):
            with pytest.raises(RequestError, match="token ids"):
                tokenizer("gpt2").decode([bad])

    def test_empty(self):
        assert tokenizer("gpt2").encode("").tolist() == []
        assert tokenizer("glm").encode("").tolist() == [0, 1]
        assert tokenizer("gpt2").decode([]) == ""
        assert tokenizer("gpt2").decode(np.empty(0, dtype=np.int64)) == ""
