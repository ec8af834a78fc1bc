"""Text to token ids and back, with a model folder's own tokenizer.json, special tokens and chat template.

May import errors, NumPy and `tokenizers`. Invariant: the ids of a text are those that transformers gives, however long
the text is; a long text is encoded in pieces only where `text_pieces` proves that nothing changes.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from longfill.engine.chat_template import ChatTemplates, Message
from longfill.engine.text_pieces import may_cut, split_text
from longfill.errors import ModelError, RequestError
from longfill.request import TokenIds

_PIECE_CHARS = 16 * 1024
_PIECES_AT_ONCE = 8
"""In flight together, on as many threads: the tokenizer's working memory, some 50 bytes a character, covers these."""

_TRIM_ABOVE_CHARS = 256 * 1024
"""Texts longer than this leave freed memory worth returning to the system."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A Hugging Face `tokenizers` tokenizer and what its model folder says about it.

    `backend` is the `tokenizers.Tokenizer`; `vocab_size` is one past the largest token id; `special_token_ids` are
    those that `decode` skips on request; `eos_token_ids` are all ids that end an answer (generation_config.json, or
    else config.json, and the tokenizer's own), ascending.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: ChatTemplates | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = chat_templates or ChatTemplates({}, {}, "this tokenizer")
        backend.no_truncation()  # a limit kept in tokenizer.json from training would silently cut prompts
        backend.no_padding()
        own = backend.token_to_id(self.special_tokens["eos_token"]) if "eos_token" in self.special_tokens else None
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *(() if own is None else (own,))}))
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self._wrap = _special_tokens_around(backend) if may_cut(backend) else None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Load from a model folder; raises ModelError naming the file that is missing or malformed."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{folder}: no tokenizer.json; fetch it from the model's page, name its folder with --tokenizer, "
                "or pass --skip-tokenizer-init and send token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file}: not a tokenizer that `tokenizers` reads ({error}); download it again") from error
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        special = _add_special_tokens(backend, config)
        model_type = _read_json(folder / "config.json").get("model_type")
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=_eos_token_ids(folder),
            chat_templates=ChatTemplates.from_folder(folder, config, special, model_type),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Ids of `text`: int64 [tokens]. Special tokens spelled out in the text become their ids, as in transformers.

        A million-token text costs a few times its own size, in pieces, where the tokenizer allows that.
        """
        if self._wrap is None or len(text) <= _PIECE_CHARS:
            return self._encode_batch((text,), add_special_tokens)[0].astype(np.int64)
        before, after = self._wrap if add_special_tokens else (_NO_IDS, _NO_IDS)
        parts = [before]
        pieces_left = split_text(text, _PIECE_CHARS)
        while pieces := tuple(islice(pieces_left, _PIECES_AT_ONCE)):
            parts += self._encode_batch(pieces, add_special_tokens=False)
        ids = np.concatenate([*parts, after], dtype=np.int64)
        del parts
        if len(text) > _TRIM_ABOVE_CHARS:
            _return_freed_memory()
        return ids

    def decode(self, ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Text of the whole sequence; ids that the tokenizer does not know (padding of the vocabulary) give nothing."""
        try:
            text: str = self.backend.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise RequestError("token ids must lie between 0 and 2**32 - 1") from None
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """A conversation as the prompt's text, to be encoded with `add_special_tokens=False`; see `ChatTemplates`."""
        return self.chat_templates.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[np.ndarray[Any, Any]]:
        try:  # the batch call, also for one text: it lets other threads run, and tracks no offsets
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the prompt is not a valid Unicode string (half of a surrogate pair?)") from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


_NO_IDS = np.empty(0, dtype=np.uint32)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _added_token(value: str | Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    flags = {name: bool(value.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return tokenizers.AddedToken(value["content"], special=True, **flags)


def _add_special_tokens(backend: Any, config: Mapping[str, Any]) -> dict[str, str]:
    """Make the named special tokens of the configuration special in the backend too; returns name -> content."""
    named = {name: _added_token(config[name]) for name in _NAMED if config.get(name)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= {name: _added_token(value) for name, value in extra.items()}
        extra = []
    backend.add_special_tokens([*named.values(), *map(_added_token, extra)])
    return {name: token.content for name, token in named.items()}


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ModelError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}")
        return tuple(ids)
    return ()


def _special_tokens_around(backend: Any) -> tuple[Any, Any] | None:
    """Ids that the post-processor puts before and after a text, or None where it does more than that."""
    plain, wrapped = (backend.encode("a", add_special_tokens=add) for add in (False, True))
    mask = wrapped.special_tokens_mask
    if 0 not in mask:
        return None
    start, stop = mask.index(0), len(mask) - mask[::-1].index(0)
    if wrapped.ids[start:stop] != plain.ids:
        return None
    return np.array(wrapped.ids[:start], dtype=np.uint32), np.array(wrapped.ids[stop:], dtype=np.uint32)


def _return_freed_memory() -> None:
    """glibc keeps what the tokenizer's threads freed; hand it back before the KV pool is sized or used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
