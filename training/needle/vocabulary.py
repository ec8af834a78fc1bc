"""The needle model's vocabulary: special tokens, bytes, digits, punctuation and the words of the grammar.

`encode` is the training-time twin of the exported tokenizer.json; `export.py` checks that both agree.
"""

from __future__ import annotations

import re

from longfill.needle.haystack import vocabulary_words

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PUNCTUATION = ".,?:!;'\"-()/"
VOCABULARY_SIZE = 640


def build_vocabulary() -> list[str]:
    """The token strings in the order of their ids."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *"0123456789", *PUNCTUATION]
    tokens += vocabulary_words()
    if len(set(tokens)) != len(tokens) or len(tokens) > VOCABULARY_SIZE:
        raise ValueError(f"{len(tokens)} tokens, {len(set(tokens))} different, for {VOCABULARY_SIZE} ids")
    tokens += [f"<reserved_{index}>" for index in range(VOCABULARY_SIZE - len(tokens))]
    return tokens


TOKENS = build_vocabulary()
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS)}
DIGIT_ZERO = TOKEN_IDS["0"]
_PIECES = re.compile(r"[A-Za-z]+|\S")
_known_words: dict[str, list[int]] = {}


def encode(text: str) -> list[int]:
    """Token ids of a text, without special tokens; whitespace only separates."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        known = _known_words.get(piece)
        if known is None:
            known = _known_words[piece] = _encode_piece(piece)
        ids += known
    return ids


def _encode_piece(piece: str) -> list[int]:
    if piece in TOKEN_IDS:
        return [TOKEN_IDS[piece]]
    ids: list[int] = []
    for character in piece:
        if character in TOKEN_IDS:
            ids.append(TOKEN_IDS[character])
        else:
            ids += [TOKEN_IDS[f"<0x{byte:02X}>"] for byte in character.encode()]
    return ids
