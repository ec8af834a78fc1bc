"""Rank 0's side of the control connections: what the followers are told, how they are, and why one is gone.

May import messages and errors. Invariant: the first cause found is the one that stays, and once there is one all
followers are ended.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from longfill.engine.executors.messages import (
    Beat,
    Connecting,
    Done,
    Exited,
    Failed,
    FromFollower,
    Here,
    Stop,
    ToFollower,
    beat_seconds,
)
from longfill.engine.executors.sockets import hang_up
from longfill.errors import ParallelError

_LOOK_SECONDS = 0.25
_START_SECONDS = 60.0
"""What a process gets to start and to import, beyond the time limit."""
_STOP_SECONDS = 3.0
"""What followers that were told to stop get before they are ended by force."""
_LAST_SECONDS = 15.0
"""More than ending them takes, by force too."""

_STATUS_SECONDS = 0.5
"""How long the exit status of a process may take to come after its connection has closed."""
_CAUSE_SECONDS = 1.0
"""How long a better reason is looked for where one rank says that another one does not answer."""
_MISSED_BEATS = 3.5
"""So many without a beat, and a rank is taken for the reason why others wait."""


@dataclass
class Peer:
    """One follower as rank 0 sees it."""

    rank: int
    connection: Connection
    host: str = ""
    pid: int = 0
    state: str = "starts"
    work: int = 0
    is_connecting: bool = False
    is_ready: bool = False
    seen: float = field(default_factory=time.monotonic)
    failed: Failed | None = None
    ended: float | None = None
    """When its connection was found closed."""
    exit_code: int | None = None
    steps: int = 0
    """Those that it has computed."""
    comm: Counter[str] = field(default_factory=Counter)
    """Bytes that it has sent to other ranks in them, by what they were."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"

    def book(self, message: FromFollower) -> None:
        """Take in what it says."""
        self.seen = time.monotonic()
        if isinstance(message, Here):
            self.pid, self.host = message.pid, message.host
        elif isinstance(message, Beat):
            self.work, self.state = message.work, message.state
        elif isinstance(message, Done):
            self.steps += 1
            self.comm.update(message.comm)
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, Connecting):
            self.is_connecting = True
        else:
            self.is_ready, self.state = True, "is idle"

    @property
    def death_words(self) -> str:
        """What is said of a connection that closed without a word."""
        if self.exit_code is None:
            how = "its connection is closed"
        else:
            how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{self.name} died ({how}); it was last heard of while it {self.state}"

    @property
    def silence(self) -> float:
        """Seconds since it was last heard of; one that was never has some to start in."""
        return time.monotonic() - self.seen - (0 if self.pid else _START_SECONDS)

    @property
    def silence_words(self) -> str:
        """What is said of one that does not even beat."""
        seconds = f"{self.silence:.1f} s"
        return f"{self.name}: no sign of life for {seconds} (stopped?); it was last heard of while it {self.state}"


class Followers:
    """All followers, watched by a thread of its own."""

    def __init__(
        self, connections: Mapping[int, Connection], *, time_limit: float, notices: Connection | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`connections` are by rank. Where the ranks are processes of this machine `notices` brings `Exited`.

        `end` is called at last, in the watching thread, and ends what of the followers does not end by itself.
        """
        self._peers = {rank: Peer(rank, connection) for rank, connection in connections.items()}
        self._time_limit = time_limit
        self._beat_seconds = beat_seconds(time_limit)
        self._notices = notices
        self._end = end
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._stops_until: float | None = None
        self._thread = threading.Thread(target=self._watch, name="longfill-followers", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the ranks cannot go on; None while they can."""
        return self._failure

    @property
    def work_done(self) -> int:
        """What the followers have done, by their last beats."""
        return sum(peer.work for peer in self._peers.values())

    def send(self, message: ToFollower) -> None:
        """Tell all followers. Raises ParallelError where one cannot be told within the time limit."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for peer in self._peers.values():
            try:
                peer.connection.send_bytes(data)
            except OSError as error:
                raise ParallelError(f"{peer.name} takes no message: {error}") from None

    def wait_until_connecting(self) -> None:
        """Wait until every follower waits for the others. Raises ParallelError where one dies or is silent."""
        self._wait_for(lambda peer: peer.is_connecting)

    def wait_until_ready(self) -> None:
        """Wait until every follower has loaded. Raises ParallelError where one dies, fails or is silent."""
        self._wait_for(lambda peer: peer.is_ready)

    def comm(self, steps: int) -> list[dict[str, int]]:
        """Bytes that each follower has sent to other ranks in so many steps, by what they were.

        Waits for what they say of the last one. Raises ParallelError where one is lost before.
        """
        self._wait_for(lambda peer: peer.steps >= steps)
        return [dict(peer.comm) for peer in self._peers.values()]

    def explain(self, symptom: str) -> str:
        """End all followers; returns the reason, of which rank 0 has seen a symptom."""

        def has_reason() -> bool:
            return self._failure is not None or self._silent_peer(_MISSED_BEATS * self._beat_seconds) is not None

        with self._changed:
            self._changed.wait_for(has_reason, timeout=2 * _CAUSE_SECONDS)
            silent = self._silent_peer(_MISSED_BEATS * self._beat_seconds)
        if silent is not None:
            return self.fail(silent.silence_words)
        return self.fail(self._lateness(symptom))

    def fail(self, reason: str) -> str:
        """End all followers for a reason; returns the first one that was given."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
        self._thread.join(_LAST_SECONDS)
        return self._failure

    def close(self) -> None:
        """Have all followers stop, by force if need be, and wait until they have."""
        if self._stops_until is None and self._failure is None:
            self._stops_until = time.monotonic() + _STOP_SECONDS
            with contextlib.suppress(ParallelError):
                self.send(Stop())
        self._thread.join(_LAST_SECONDS)

    def _wait_for(self, holds: Callable[[Peer], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(map(holds, self._peers.values())))
        if self._failure is not None:
            raise ParallelError(self._failure)

    def _watch(self) -> None:
        """Book what followers say until they have ended, or are to be ended."""
        while not self._is_over():
            listened = {peer.connection: peer for peer in self._peers.values() if peer.ended is None}
            notices = [] if self._notices is None else [self._notices]
            for source in wait([*listened, *notices], timeout=min(_LOOK_SECONDS, self._beat_seconds)):
                assert isinstance(source, Connection)
                self._hear(source, listened.get(source))
            with self._changed:
                if self._failure is None and self._stops_until is None:
                    self._failure = self._find_failure()
                self._changed.notify_all()
        for peer in self._peers.values():
            hang_up(peer.connection)
        self._end()

    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        all_ended = all(peer.ended is not None for peer in self._peers.values())
        return self._stops_until is not None and (all_ended or time.monotonic() > self._stops_until)

    def _hear(self, source: Connection, peer: Peer | None) -> None:
        try:
            message = source.recv()
        except (EOFError, OSError):
            if peer is None:
                self._notices = None  # the process that started the ranks is gone; they go on
            else:
                peer.ended = time.monotonic()
            return
        except Exception as error:
            if peer is None:
                raise
            peer.failed = Failed(f"it says what cannot be read: {type(error).__name__}: {error}", peer.state, False)
            return
        if isinstance(message, Exited):
            self._peers[message.rank].exit_code = message.code
        elif peer is not None:
            peer.book(message)

    def _find_failure(self) -> str | None:
        """The best reason there is to give up: what a follower says of itself, then a death, then a silence."""
        peers, now = self._peers.values(), time.monotonic()
        for peer in peers:
            if peer.failed is not None and not peer.failed.secondary:
                return f"{peer.name} failed while it {peer.failed.state}: {peer.failed.message}"
        for peer in peers:
            if peer.ended is not None and peer.failed is None:
                told = peer.exit_code is not None or self._notices is None
                if told or now - peer.ended > _STATUS_SECONDS:
                    return peer.death_words
        for peer in peers:
            if peer.failed is not None and now - peer.seen > _CAUSE_SECONDS:
                silent = self._silent_peer(_MISSED_BEATS * self._beat_seconds)
                return self._lateness(peer.failed.message) if silent is None else silent.silence_words
        silent = self._silent_peer(self._time_limit)
        return None if silent is None else silent.silence_words

    def _lateness(self, symptom: str) -> str:
        """What is said where ranks wait for one that lives: what all have been doing."""
        states = "; ".join(f"{peer.name} {peer.state}" for peer in self._peers.values())
        return f"{symptom} (last heard: {states}); if a rank is only slow, raise --distributed-timeout-seconds"

    def _silent_peer(self, seconds: float) -> Peer | None:
        """The follower that has been silent for longest, if for more than so long."""
        alive = [peer for peer in self._peers.values() if peer.ended is None and peer.failed is None]
        longest = max(alive, key=lambda peer: peer.silence, default=None)
        return longest if longest is not None and longest.silence > seconds else None
