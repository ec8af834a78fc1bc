"""Text that is still arriving, and questions about it that may have to wait for more.

May import nothing of longfill. Invariant: an answer depends on the text alone, never on how it was cut, and no more is
held back than the beginning of a tag (or of one header), so the whole takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields whenever it needs more text, and returns a T."""

Sink = Callable[[str], object]


class Tags:
    """Fixed strings to look for. Each begins with `<`, has no other, and none begins another."""

    def __init__(self, *tags: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, tags)) or r"(?!)")
        self._beginnings = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self._longest = max(map(len, tags), default=1)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a tag."""
        start = text.rfind("<", max(0, len(text) - self._longest + 1))
        return len(text) - start if start >= 0 and text[start:] in self._beginnings else 0


@dataclass(frozen=True)
class Run:
    """A stretch of characters of one class within a shape, bounded so that a shape is; `group` hands it out."""

    characters: str
    at_least: int = 0
    at_most: int = 256
    group: str = ""

    @property
    def pattern(self) -> str:
        return f"{self.characters}{{{self.at_least},{self.at_most}}}+"  # possessive: never tried shorter


SPACE = Run(r"\s")


class Shape:
    """A sequence of fixed strings and runs, such as a tag with attributes; each run stops before what follows it."""

    def __init__(self, *pieces: str | Run) -> None:
        self.full = re.compile("".join(map(_full, pieces)))
        beginning = ""
        for piece in reversed(pieces):
            beginning = rf"(?:{_beginning(piece)}\Z|{_full(piece, grouped=False)}{beginning})"
        self.beginning = re.compile(beginning)


def _full(piece: str | Run, grouped: bool = True) -> str:
    if isinstance(piece, str):
        return re.escape(piece)
    return f"(?P<{piece.group}>{piece.pattern})" if piece.group and grouped else piece.pattern


def _beginning(piece: str | Run) -> str:
    if isinstance(piece, str):
        return "(?:" + "|".join(re.escape(piece[:length]) for length in range(len(piece) - 1, -1, -1)) + ")"
    return f"{piece.characters}{{0,{piece.at_most}}}+"


class Incoming:
    """The text of one completion: `add` as it comes, `end` at its end; the generators take it up from the front."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self.ended = True

    @property
    def rest(self) -> str:
        """What has come and is not taken up."""
        return self._text[self._at :]

    def keep(self) -> None:
        """From here on, keep what is taken up, until `kept` hands it out."""
        self._kept = []

    def kept(self) -> str:
        text = "".join(self._kept or ())
        self._kept = None
        return text

    def take(self, count: int) -> str:
        """The next `count` characters, which have come already."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def until(self, tags: Tags, sink: Sink) -> Steps[str]:
        """Give `sink` the text before the next tag when it is certain. Returns the tag, not taken, or "" at the end."""
        while True:
            found = tags.pattern.search(self._text, self._at)
            held = 0 if self.ended else tags.held(self._text)
            certain = found.start() if found else len(self._text) - held
            if certain > self._at:
                sink(self.take(certain - self._at))
            if found or self.ended:
                return found.group() if found else ""
            yield

    def one_of(self, *shapes: Shape) -> Steps[re.Match[str] | None]:
        """Take up the shape that comes next; None, with nothing taken, where none of them does."""
        found = yield from self.next_of(*shapes)
        if found:
            self.take(found.end() - found.start())
        return found

    def next_of(self, *shapes: Shape) -> Steps[re.Match[str] | None]:
        """The shape that comes next, not taken up. None of the shapes is the beginning of another."""
        while True:
            for shape in shapes:
                if found := shape.full.match(self._text, self._at):
                    return found
            if self.ended or not any(shape.beginning.match(self._text, self._at) for shape in shapes):
                return None
            yield
