"""What sends tensors to other ranks and receives theirs: point to point, over gloo.

May import torch and errors. Invariant: the n-th tensor sent to a rank is the n-th that it receives from here, and no
wait for it is without a limit.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store, Work

from longfill.errors import ParallelError

_CONNECT_SECONDS = 30.0
"""Most that connecting may take, once all ranks have begun with it."""
_TAGS = 1 << 30
"""A tag is a C int; so many transfers between two ranks are never under way at once."""


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way to a rank, or from it."""

    work: Work
    peer: int


class Link:
    """The connections of one rank with all others.

    They are made by a process group of their own, so that `torch.distributed`'s global state stays the user's. A tensor
    travels as the bytes it consists of, whatever its dtype, straight from its place into that of the receiver. Every
    pair of ranks numbers its transfers, which is the tag that gloo matches them by.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float, address: str) -> None:
        """Connect with all ranks that share `store`, as they do now; `address` is where this rank listens.

        `timeout` is the limit of each later wait in seconds. Raises ParallelError where a rank does not come.
        """
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.host = socket.gethostname()
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        try:
            # Torch's own description of this class knows neither these options nor `send` and `recv`.
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=min(timeout, _CONNECT_SECONDS))
            options._threads = 1
            self._gloo = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise ParallelError(f"{self.name}: cannot connect from {address} with the others: {_line(error)}") from None

    @property
    def name(self) -> str:
        """This rank in words."""
        return f"rank {self.rank} of {self.size} ({self.host})"

    def send(self, x: Tensor, to: int, operation: str) -> Transfer:
        """Begin to send a contiguous tensor of at least one byte; it must stay as it is until the transfer is done."""
        self._sent[to] += 1
        with self._naming(operation, to):
            return Transfer(self._gloo.send([x], to, self._sent[to] % _TAGS), to)

    def receive(self, x: Tensor, source: int, operation: str) -> Transfer:
        """Begin to receive into a contiguous tensor of at least one byte."""
        self._received[source] += 1
        with self._naming(operation, source):
            return Transfer(self._gloo.recv([x], source, self._received[source] % _TAGS), source)

    def wait(self, transfer: Transfer, operation: str, until: float) -> None:
        """Wait until a transfer is done, or until the moment `until` of `time.monotonic`.

        Raises ParallelError, naming operation and rank, where it is not done then or the other rank is gone. The link
        is of no use afterwards.
        """
        with self._naming(operation, transfer.peer):
            # Zero would be no limit to gloo.
            transfer.work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

    @contextmanager
    def _naming(self, operation: str, peer: int) -> Iterator[None]:
        """Turn gloo's errors into ones that say who waited for whom."""
        try:
            yield
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            why = f"no answer within {self.timeout:g} s" if late else f"connection lost: {_line(error)}"
            raise ParallelError(f"{self.name}: {operation} waits for rank {peer}: {why}") from None


def _line(error: RuntimeError) -> str:
    """The first sentence of what gloo says, without the place in its source."""
    text = str(error).splitlines()[0]
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]
