"""The operations by which the ranks of one group exchange rows, named by what they mean.

May import torch, the link and the account. Invariant: every member calls the same operations in the same order, and a
group of one hands back what it is given.

A row is whatever stands under one index of a tensor's first dimension. Shapes below: `[sum(counts), ...]`, with one
count for each member, in the order of `ranks`; counts may be zero. Every operation raises ParallelError where another
member is gone or does not answer in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longfill.parallel.comm import Comm
from longfill.parallel.link import Link, Transfer
from longfill.parallel.sums import tree_sum


class Pending:
    """An operation that has begun. `wait` gives its result, and must be called before the tensors of it are used."""

    def __init__(self, group: Group, what: str, name: str, transfers: Sequence[Transfer], result: Tensor) -> None:
        self._group = group
        self._what = what
        self._name = name
        self._transfers = transfers
        self._result = result

    def wait(self) -> Tensor:
        """The result, once all of it is there."""
        self._group.finish(self._what, self._name, self._transfers)
        self._transfers = ()
        return self._result


class Group:
    """Some ranks of the mesh, of which this process is one."""

    def __init__(self, ranks: tuple[int, ...], world_rank: int, link: Link | None, comm: Comm) -> None:
        """`ranks` are world ranks; a group of one needs no link."""
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(world_rank)
        """Own place in the group."""
        self._link = link
        self._comm = comm

    def gather_rows(self, what: str, x: Tensor, counts: Sequence[int], *, out: Tensor | None = None) -> Tensor:
        """[sum(counts), ...]: every member's rows one after the other; `x` is [counts[rank], ...], of any dtype.

        `out`: a contiguous tensor for the result, of which `x` may be the own part already.
        """
        return self._start_gather("gather_rows", what, x, counts, out).wait()

    def start_gather(self, what: str, x: Tensor, counts: Sequence[int], *, out: Tensor | None = None) -> Pending:
        """`gather_rows` that begins at once and is waited for later. Meanwhile `x` may be overwritten, unless it is a
        part of `out`."""
        return self._start_gather("start_gather", what, x, counts, out)

    def _start_gather(self, name: str, what: str, x: Tensor, counts: Sequence[int], out: Tensor | None) -> Pending:
        self._check(name, what, x, counts, own=True)
        if self.size == 1:
            return Pending(self, what, name, (), x)
        starts = _starts(counts)
        if out is None:
            out = x.new_empty((starts[-1], *x.shape[1:]))
        parts = [out[a:b] for a, b in pairwise(starts)]
        own = parts[self.rank]
        if own.data_ptr() != x.data_ptr():
            own.copy_(x)
        transfers = [
            *self._receives(what, name, lambda member: parts[member]),
            *self._sends(what, name, lambda _: own),
        ]
        return Pending(self, what, name, transfers, out)

    def exchange_rows(self, what: str, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all: of `x` [sum(send), ...] the next `send[j]` rows go to member j.

        Returns [sum(receive), ...]: the `receive[j]` rows that came from member j, in order of members.
        """
        name = "exchange_rows"
        self._check(name, what, x, send)
        self._check_members(name, what, receive)
        if self.size == 1:
            return x
        x, sends, receives = x.contiguous(), _starts(send), _starts(receive)
        out = x.new_empty((receives[-1], *x.shape[1:]))

        def outgoing(member: int) -> Tensor:
            return x[sends[member] : sends[member + 1]]

        def incoming(member: int) -> Tensor:
            return out[receives[member] : receives[member + 1]]

        transfers = [*self._receives(what, name, incoming), *self._sends(what, name, outgoing)]
        incoming(self.rank).copy_(outgoing(self.rank))
        self.finish(what, name, transfers)
        return out

    def sum_rows(self, what: str, x: Tensor, counts: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Reduce-scatter: every member has a partial `x` [sum(counts), ...]; member j gets the sum of its rows.

        Returns [counts[rank], ...]. The parts travel in `x`'s dtype, are added in float32 in the order of `tree_sum`
        over the members, and rounded once to `dtype` (default: `x`'s).
        """
        name = "sum_rows"
        self._check(name, what, x, counts)
        dtype = x.dtype if dtype is None else dtype
        if self.size == 1:
            return x.to(dtype)
        x, starts = x.contiguous(), _starts(counts)

        def rows_of(member: int) -> Tensor:
            return x[starts[member] : starts[member + 1]]

        own = rows_of(self.rank)
        parts = [own if member == self.rank else torch.empty_like(own) for member in range(self.size)]
        transfers = [
            *self._receives(what, name, lambda member: parts[member]),
            *self._sends(what, name, rows_of),
        ]
        self.finish(what, name, transfers)
        return tree_sum(parts).to(dtype)

    def to_first(self, what: str, x: Tensor, counts: Sequence[int]) -> Tensor | None:
        """`gather_rows` at member 0; None at all others."""
        name = "to_first"
        self._check(name, what, x, counts, own=True)
        if self.size == 1:
            return x
        if self.rank:
            x = x.contiguous()
            self.finish(what, name, self._sends(what, name, lambda _: x, only=0))
            return None
        starts = _starts(counts)
        out = x.new_empty((starts[-1], *x.shape[1:]))
        transfers = self._receives(what, name, lambda member: out[starts[member] : starts[member + 1]])
        out[: starts[1]].copy_(x)
        self.finish(what, name, transfers)
        return out

    def from_first(self, what: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Member 0's `x`, whose shape and dtype all members know; what the others give is not looked at."""
        name = "from_first"
        if self.rank:
            out = torch.empty(tuple(shape), dtype=dtype)
            self.finish(what, name, self._receives(what, name, lambda _: out, only=0))
            return out
        if x is None or x.shape != tuple(shape) or x.dtype != dtype:
            given = "None" if x is None else f"{list(x.shape)} {x.dtype}"
            raise ValueError(f"{name} {what!r}: member 0 gives {given}, the others expect {list(shape)} {dtype}")
        whole = x.contiguous()
        self.finish(what, name, self._sends(what, name, lambda _: whole))
        return x

    def smallest(self, what: str, value: int) -> int:
        """The least of all members' ints. For agreements at start: 8 bytes go to every other member."""
        return int(self.gather_rows(what, torch.tensor([value]), [1] * self.size).min())

    def finish(self, what: str, name: str, transfers: Sequence[Transfer]) -> None:
        """Wait for transfers; all of them together have the time limit of one."""
        if not transfers:
            return
        link = self._connected
        until = time.monotonic() + link.timeout
        for transfer in transfers:
            with self._comm.waiting(what, f"{name} {what!r} waits for rank {transfer.peer}"):
                link.wait(transfer, f"{name} {what!r}", until)

    def _sends(
        self, what: str, name: str, outgoing: Callable[[int], Tensor], *, only: int | None = None
    ) -> list[Transfer]:
        """Begin to send to every other member, or `only` to one; empty tensors stay."""
        transfers = []
        for member in self._others(only):
            part = outgoing(member)
            if part.nbytes:
                transfers.append(self._connected.send(part, self.ranks[member], f"{name} {what!r}"))
                self._comm.count(what, part.nbytes)
        return transfers

    def _receives(
        self, what: str, name: str, incoming: Callable[[int], Tensor], *, only: int | None = None
    ) -> list[Transfer]:
        """Begin to receive from every other member, or `only` from one."""
        return [
            self._connected.receive(part, self.ranks[member], f"{name} {what!r}")
            for member in self._others(only)
            if (part := incoming(member)).nbytes
        ]

    def _others(self, only: int | None) -> list[int]:
        """Members in the order of their distance, so that not all begin with the same one."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        return others if only is None else [only]

    @property
    def _connected(self) -> Link:
        if self._link is None:
            raise ValueError(f"ranks {self.ranks} have no link")
        return self._link

    def _check(self, name: str, what: str, x: Tensor, counts: Sequence[int], *, own: bool = False) -> None:
        """Raise ValueError unless `x` has the rows of all counts, or of the own one."""
        self._check_members(name, what, counts)
        rows = counts[self.rank] if own else sum(counts)
        if x.shape[0] != rows:
            raise ValueError(f"{name} {what!r}: member {self.rank} gives {x.shape[0]} rows where counts say {rows}")

    def _check_members(self, name: str, what: str, counts: Sequence[int]) -> None:
        if len(counts) != self.size:
            raise ValueError(f"{name} {what!r}: {len(counts)} counts for {self.size} members")


def _starts(counts: Sequence[int]) -> list[int]:
    """First row of each member, then the number of rows."""
    return list(accumulate(counts, initial=0))
