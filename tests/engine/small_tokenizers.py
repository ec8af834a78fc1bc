"""Tokenizers small enough to build in a test, of the kinds that matter: their splits, decoders and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GLM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
CORPUS = [
    "The access code of amber Kestrel is 48213. It's what they'd said; don't  forget,   okay?\n\n",
    "def f(x):\n    return x + 1  # naïve café 価格は三千円です。\r\n\tそうですか 한국어 문장 🙂🙂\n",
    "It ends.\nNext line (here).\nAnd, then,\n\nit ended.\n",
    "Numbers 1 22 333 4444 and (brackets) [here] {there} <|not special|> https://example.org/a?b=c&d=e\n",
] * 20
SPECIAL = ["<|bos|>", "<|eos|>", "<｜end▁of▁turn｜>", "<pad>"]


def _byte_level(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), "naïve"])
    return tokenizer


def gpt2() -> Tokenizer:
    """Byte-level BPE with GPT-2's built-in expression."""
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))


def glm() -> Tokenizer:
    """Byte-level BPE split as GLM-4 and later do; wraps a text in two special tokens."""
    tokenizer = _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GLM), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    return tokenizer


def deepseek() -> Tokenizer:
    """Byte-level BPE split as DeepSeek V3 does, in three stages."""
    return _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
                pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizers.Sequence([]),
    )


def qwen() -> Tokenizer:
    """Byte-level BPE with NFC and single digits."""
    return _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GLM.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    )


def _byte_fallback_vocabulary(*, space: str) -> list[str]:
    words = ["the", "code", "of", "is", "a", "b", "é", ".", ",", "Answer", ":"]
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"0123456789", *words, *(space + w for w in words)]


def llama() -> Tokenizer:
    """Byte fallback in the SentencePiece way: spaces spelled ▁, one leading space stripped."""
    tokens = [*_byte_fallback_vocabulary(space="▁"), "▁", "▁▁"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def needle() -> Tokenizer:
    """Words, digits and bytes without merges, whitespace dropped, as the bundled model has it."""
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(_byte_fallback_vocabulary(space="")))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|\S"), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"(?<=[A-Za-z.,?:!;])$"), " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Byte fallback with a Metaspace pre-tokenizer and decoder, which mark the beginning of a text."""
    tokenizer = llama()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return tokenizer


def words() -> Tokenizer:
    """Whole words, no decoder: joined by spaces."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "[UNK]", "the", "code", "is", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece() -> Tokenizer:
    """Word pieces with ## and the decoder's clean-up of spaces before punctuation."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "[UNK]", "the", "co", "##de", "is", ".", "'"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


CUTTABLE = [gpt2, glm, deepseek, qwen, needle, words]
NOT_CUTTABLE = [llama, metaspace, word_piece]
BYTE_FALLBACK = [llama, needle, metaspace]
ALL = [*CUTTABLE, *NOT_CUTTABLE]


def save_folder(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """A model folder: tokenizer.json and `name` -> `name.json` (objects) or the text of `chat_template.jinja`."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if name == "chat_template":
            (folder / "chat_template.jinja").write_text(content, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
