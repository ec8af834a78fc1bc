"""What rank 0 and its followers tell each other beside the model's own exchanges.

May import configuration, partition and the worker. Invariant: every message is a value that pickles, and each direction
is one connection, so that messages arrive in the order in which they were sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from longfill.config import EngineArgs
from longfill.models.config import ModelConfig
from longfill.parallel import Mesh
from longfill.partition import StepRequest
from longfill.partition.mesh import MeshShape
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.worker import Worker

MakeWorker = Callable[[EngineArgs, Path, ModelConfig, Mesh], Worker]


@dataclass(frozen=True)
class Setup:
    """To a rank that was started for this: what it is to load, and where the ranks find each other."""

    args: EngineArgs
    folder: Path
    config: ModelConfig
    shape: MeshShape
    make_worker: MakeWorker
    store_port: int
    log_level: int


@dataclass(frozen=True)
class Step:
    """To a follower: the requests of rank 0's plan, and the prompts whose log-probabilities are wanted."""

    requests: tuple[StepRequest, ...]
    prompts: tuple[PromptInput, ...]


@dataclass(frozen=True)
class Stop:
    """To a follower: there will be no further step."""


@dataclass(frozen=True)
class Here:
    """From a follower, as soon as it runs."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Connecting:
    """From a follower: it knows what to do, and waits for the other ranks."""


@dataclass(frozen=True)
class Ready:
    """From a follower: its model is loaded."""


@dataclass(frozen=True)
class Done:
    """From a follower: a step is computed."""

    comm: dict[str, int]
    """Bytes that it has sent to other ranks, by what they were."""


@dataclass(frozen=True)
class Beat:
    """From a follower, at intervals: it lives."""

    work: int
    """Grows while anything is computed."""
    state: str
    """What it is doing, in words that follow "while it"."""


@dataclass(frozen=True)
class Failed:
    """From a follower, last: why it ends."""

    message: str
    state: str
    """What it was doing."""
    secondary: bool
    """Whether another rank's end or silence is the reason."""


@dataclass(frozen=True)
class Exited:
    """From the process that started the ranks: one of them has ended."""

    rank: int
    code: int
    """Exit code, or minus the signal's number."""


ToFollower = Setup | Step | Stop
FromFollower = Here | Connecting | Ready | Done | Beat | Failed


def beat_seconds(time_limit: float) -> float:
    """Interval of beats: a second, or less where the time limit is short."""
    return min(1.0, time_limit / 4)
