"""Token ids to text while they are being sampled, and the stop strings that end it.

May import the tokenizer and request. Invariant: text, once released, never changes, and all of it together is the
decode of the whole sequence, cut at the stop string; the cut depends on the text alone, not on how tokens divide it.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Protocol

from longfill.engine.text_pieces import components
from longfill.engine.token_bytes import spelled
from longfill.engine.tokenizer import Tokenizer
from longfill.request import SamplingParams


@dataclass(frozen=True)
class StopHit:
    """The stop string that ended the text."""

    stop: str


class Detokenizer:
    """One request's text. `append` takes each sampled token (but not a stop token that should leave no text).

    Where a stop string occurs, the one that ends first counts, and of those that end together the first in
    `params.stop`; the text ends before it, or behind it with `include_stop_str_in_output`. Until then, a tail that may
    become a stop string is held back, so that `text` never shows a part of one. As in vLLM, one that ends in the text
    of the first `params.min_tokens` tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = _stream(tokenizer, params.skip_special_tokens)
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._overlap = max(map(len, self._stops), default=1) - 1
        self._released: list[str] = []
        self._held = ""
        """Decoded, but perhaps the beginning of a stop string."""
        self._tail = ""
        """The last `_overlap` characters decoded: what a stop string that ends in new text may begin in."""
        self._hit: StopHit | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far; final after a stop or `finish`."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def take(self) -> str:
        """Text released since the last call, for who keeps the rest: a growing text is not joined anew at each token.

        `text` then begins behind it.
        """
        taken, self._released = self.text, []
        return taken

    def append(self, token_id: int) -> StopHit | None:
        """Take one token; returns the stop string if it is complete, after which further tokens change nothing."""
        if self._hit is not None or self._finished:
            return self._hit
        self._num_tokens += 1
        self._add(self._stream.push(token_id))
        if self._hit is None and self._find(self._stream.pending()) is not None:
            # Bytes that make up whole characters, a newline perhaps, wait only for what may follow. A stop string ends
            # the text here, so nothing follows.
            ending = self._stream.flush()
            if self._find(ending) is not None:
                self._add(ending)
        return self._hit

    def finish(self) -> StopHit | None:
        """No more tokens: release what was held back, with replacement characters for incomplete ones."""
        if self._hit is None and not self._finished:
            self._add(self._stream.flush())
        if self._hit is None:
            self._release(self._held)
        self._held = ""
        self._finished = True
        return self._hit

    def _add(self, new: str) -> None:
        if not new:
            return
        text = self._held + new
        found = self._find(new)
        if found is not None:
            stop, end = found
            self._hit = StopHit(stop)
            self._release(text[: len(self._held) + end - (0 if self._include else len(stop))])
            return
        hold = 0 if self._include else self._partial_stop(text)
        self._release(text[: len(text) - hold])
        self._held = text[len(text) - hold :]
        self._tail = (self._tail + new)[-self._overlap :] if self._overlap else ""

    def _find(self, new: str) -> tuple[str, int] | None:
        """The stop string that ends first in `new`, which follows the text so far, and where in `new` it ends."""
        if not new or not self._stops or self._num_tokens <= self._min_tokens:
            return None
        window, before = self._tail + new, len(self._tail)
        # From where it ends in `new`: one that ended before came too early to count.
        ends = [
            (at + len(stop), stop)
            for stop in self._stops
            if (at := window.find(stop, max(before + 1 - len(stop), 0))) >= 0
        ]
        if not ends:
            return None
        end, stop = min(ends, key=lambda found: found[0])
        return stop, end - before

    def _partial_stop(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(self._overlap, len(text))
        return next((n for n in range(longest, 0, -1) if self._begins_stop(text[-n:])), 0)

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)


class _TokenStream(Protocol):
    """Text of a growing token sequence: all that `push` and a last `flush` return is the decode of the whole."""

    def push(self, token_id: int) -> str:
        """Text that is certain now and was not before."""
        ...

    def pending(self) -> str:
        """Whole characters that later tokens could still change (about; `flush` is exact), or nothing."""
        ...

    def flush(self) -> str:
        """The rest, if no token follows."""
        ...


def _stream(tokenizer: Tokenizer, skip_special_tokens: bool) -> _TokenStream:
    kinds = [part["type"] for part in components(tokenizer.backend.decoder)]
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream(tokenizer, skipped)
    return _WindowStream(tokenizer, skipped, byte_fallback="ByteFallback" in kinds)


class _ByteLevelStream:
    """Tokens are bytes (GLM, DeepSeek): the text is their UTF-8, an incomplete character waiting for its rest."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = tokenizer.backend
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        return self._utf8.decode(spelled(token))

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: each token is decoded beside the one before it, which settles spaces between words.

    With byte fallback, a run of byte tokens waits for its end: if it is not UTF-8, all of it becomes replacement
    characters.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_fallback = byte_fallback
        self._before: list[int] = []
        self._run: list[int] = []
        self._run_text = ""
        self._utf8: codecs.IncrementalDecoder | None
        """Of the run; None once it is not UTF-8."""
        self._reset_run()

    def push(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if self._byte_fallback else None
        if byte is not None:
            self._extend_run(token_id, int(byte[1], 16))
            return ""
        window = [*self._before, *self._run, token_id]
        text = self._decode(window)[len(self._decode(self._before)) :]
        self._before = [token_id]
        self._reset_run()
        return text

    def pending(self) -> str:
        return "" if self._utf8 is None or self._utf8.getstate()[0] else self._run_text

    def flush(self) -> str:
        return self._decode([*self._before, *self._run])[len(self._decode(self._before)) :] if self._run else ""

    def _extend_run(self, token_id: int, byte: int) -> None:
        self._run.append(token_id)
        try:
            self._run_text += "" if self._utf8 is None else self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._utf8 = None

    def _reset_run(self) -> None:
        self._run.clear()
        self._run_text = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
