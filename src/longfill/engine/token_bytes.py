"""The bytes that each token adds to a text, for tokenizers where they do not depend on its neighbours.

May import the tokenizer, text_pieces and worker. Invariant: the bytes of a sequence's tokens, joined, are its decode in
UTF-8 (where they are no UTF-8, the decode has replacement characters).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from longfill.engine.text_pieces import components
from longfill.engine.tokenizer import Tokenizer
from longfill.worker.structured import StructuredOutputs

_ALONE = {"Replace", "ByteFallback", "Fuse"}
"""Decoders that take each token by itself; `Fuse` only joins."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """By token id, empty for ids that the tokenizer does not know; None where they depend on the tokens around.

    Byte-level tokenizers (GLM, DeepSeek) have them, and those that decode word by word; not those that strip a space
    at the beginning, or put one between words.
    """
    kinds = [part["type"] for part in components(tokenizer.backend.decoder)]
    if kinds == ["ByteLevel"]:
        return [spelled(tokenizer.backend.id_to_token(index) or "") for index in range(tokenizer.vocab_size)]
    if kinds and set(kinds) <= _ALONE:
        fallback = "ByteFallback" in kinds
        return [_alone(tokenizer, index, fallback=fallback) for index in range(tokenizer.vocab_size)]
    return None


def structured_outputs(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int) -> StructuredOutputs:
    """Forms of outputs that a tokenizer spells. Its tokens' bytes are made when first asked for."""
    return StructuredOutputs(
        lambda: token_bytes(tokenizer),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).tolist(),
        special_token_ids=sorted(tokenizer.special_token_ids),
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for the characters from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def spelled(token: str) -> bytes:
    """The bytes that a token of a byte-level tokenizer spells; those of an added one are its text as written."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _alone(tokenizer: Tokenizer, index: int, *, fallback: bool) -> bytes:
    token = tokenizer.backend.id_to_token(index)
    if token is None:
        return b""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if fallback else None
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return tokenizer.decode([index], skip_special_tokens=False).encode()
