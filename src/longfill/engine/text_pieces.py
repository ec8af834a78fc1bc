"""Cuts a long text into pieces whose tokens, one after the other, are exactly the tokens of the whole.

Imports the standard library only and reads a `tokenizers.Tokenizer`. Invariant: where equality is not proved for a
tokenizer, `may_cut` says no and the text is encoded whole.

The proof. A cut falls between a letter or digit and a space or newline that follows it.
(1) No added token lies across it: none of them contains such a pair, and none looks beyond its own characters.
(2) The normalizer is absent or NFC; a space or newline neither composes with what precedes it nor is changed.
(3) Every pre-tokenizer is local: what it does on one side of the cut does not depend on the other side. For the regular
    expressions below: no alternative has a match that contains the pair, so the cut is a boundary of the whole text's
    matches, and the scan starts afresh behind it; a match before it ends there whether the text goes on or not (the one
    look-ahead, `(?!\\S)`, only follows whitespace).
(4) At least one pre-tokenizer divides at the cut.
(5) The model treats each pre-token by itself, without dropout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Letters that were letters in every version of Unicode, since regex engines follow different ones.
_CUT = re.compile(r"[A-Za-z0-9一-龥ぁ-ゖァ-ヺ가-힣](?=[ \n])")

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DIVIDING_REGEXES = frozenset(
    {
        # GPT-2
        _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # GLM-4 and later, Llama 3; and Qwen 2 and 3, with single digits
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # DeepSeek V3 and later
        _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        # The bundled needle model
        r"[A-Za-z]+|\S",
    }
)
_LOCAL_REGEXES = frozenset({r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+"})
_DIVIDING_TYPES = frozenset({"WhitespaceSplit", "Whitespace", "BertPreTokenizer"})
_LOCAL_TYPES = frozenset({"Punctuation", "Digits"})


def may_cut(backend: Any) -> bool:
    """Whether the proof above holds for this `tokenizers.Tokenizer`."""
    model = backend.model
    if type(model).__name__ not in ("BPE", "WordLevel") or getattr(model, "dropout", None):
        return False
    if any(part["type"] != "NFC" for part in components(backend.normalizer)):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word or _CUT.search(token.content):
            return False
    effects = [_effect_at_cut(part) for part in components(backend.pre_tokenizer)]
    return "unknown" not in effects and "divides" in effects


def split_text(text: str, size: int) -> Iterator[str]:
    """Pieces of `text` of at least `size` characters each (but the last), cut at the first safe place after that."""
    start = 0
    while len(text) - start > size:
        cut = _CUT.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:] if start else text


def components(part: Any) -> list[dict[str, Any]]:
    """The parts of a tokenizer component (normalizer, pre-tokenizer, decoder) as JSON objects, sequences flattened."""
    return [] if part is None else _flatten(json.loads(part.__getstate__()))


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    children = next(value for value in state.values() if isinstance(value, list))
    return [leaf for child in children for leaf in _flatten(child)]


def _effect_at_cut(part: dict[str, Any]) -> str:
    kind = part["type"]
    if kind in _DIVIDING_TYPES:
        return "divides"
    if kind in _LOCAL_TYPES:
        return "local"
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return "divides" if part["use_regex"] else "local"
    if kind == "Split" and "Regex" in part["pattern"]:
        regex = part["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        how = (part["behavior"], part["invert"])
        if regex in _DIVIDING_REGEXES and how in {("Isolated", False), ("Removed", True)}:
            return "divides"
        if regex in _LOCAL_REGEXES and how == ("Isolated", False):
            return "local"
    return "unknown"
