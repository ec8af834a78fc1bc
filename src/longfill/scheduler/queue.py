"""The requests that wait to be admitted, in the order in which they should be.

Imports Request. Invariant: finding the first costs the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from longfill.request import Request


class WaitingQueue:
    """First come first served; with `by_priority`, first come first served among those of one priority, lower first.

    Preempted requests stand before new ones.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._levels: dict[int, OrderedDict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        """All requests, the first to be admitted first."""
        for level in self.levels:
            yield from self.at(level)

    @property
    def levels(self) -> list[int]:
        """Priorities of those that wait, ascending; [0] or nothing where priorities do not count."""
        return sorted(self._levels)

    def at(self, level: int) -> Iterator[Request]:
        """Requests of one level in order."""
        return iter(self._levels.get(level, {}).values())

    def first(self, level: int) -> Request | None:
        """The next one of a level."""
        return next(self.at(level), None)

    def level_of(self, request: Request) -> int:
        """The level that a request, waiting or not, belongs to."""
        return request.priority if self._by_priority else 0

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._levels.setdefault(self.level_of(request), OrderedDict())[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Queue a preempted request in front."""
        self.add(request)
        self._levels[self.level_of(request)].move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Take a request out; fine for one that is not in it."""
        number = self.level_of(request)
        level = self._levels.get(number)
        if level is not None:
            level.pop(request.request_id, None)
            if not level:  # priorities may be as many as requests, such as deadlines
                del self._levels[number]
