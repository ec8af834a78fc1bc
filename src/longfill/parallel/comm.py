"""The account of one rank's exchanges: bytes sent, seconds waited, and what it is waiting for now.

Imports nothing of the house. Invariant: `bytes` counts what left for other ranks, exactly, under the name that the
caller gave it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Comm:
    """One per rank, for all groups of its mesh."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        """Bytes sent to other ranks since `take`, by the operation's name; no entry where there were none."""
        self.seconds: dict[str, float] = {}
        """Seconds waited for other ranks since `take_seconds`, by the operation's name."""
        self._doing: tuple[str, float] | None = None

    def take(self) -> dict[str, int]:
        """`bytes`, which begins anew."""
        taken, self.bytes = self.bytes, {}
        return taken

    def take_seconds(self) -> dict[str, float]:
        """`seconds`, which begins anew."""
        taken, self.seconds = self.seconds, {}
        return taken

    def count(self, what: str, num_bytes: int) -> None:
        """Book bytes that leave for another rank."""
        if num_bytes:
            self.bytes[what] = self.bytes.get(what, 0) + num_bytes

    @contextmanager
    def waiting(self, what: str, operation: str) -> Iterator[None]:
        """Book the seconds that pass within as waited for `what`; `operation` says in words for what and whom."""
        began = time.monotonic()
        self._doing = (operation, began)
        try:
            yield
        finally:
            self._doing = None
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began

    @property
    def doing(self) -> tuple[str, float] | None:
        """What is waited for at this moment, and for how many seconds it has been; None while nothing is.

        May be read from any thread.
        """
        doing = self._doing
        return None if doing is None else (doing[0], time.monotonic() - doing[1])
