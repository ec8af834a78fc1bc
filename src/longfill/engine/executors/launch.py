"""What a launcher such as torchrun says of this process in its environment.

Imports configuration and errors only. Invariant: either all of it is there and makes sense, or none of it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from longfill.config import LAUNCH_VARIABLES
from longfill.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were started together."""

    rank: int
    world: int
    address: str
    """Host where the ranks' store is found."""
    port: int
    local_world: int
    """How many of them are on this machine."""
    store_is_elsewhere: bool
    """Whether the launcher has the store, and not rank 0."""
    attempt: str
    """Of the launcher, which starts everything anew after a failure."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None where it is not all there. Raises ConfigError, naming the variable, for what makes no sense."""
        if any(name not in environment for name in LAUNCH_VARIABLES):
            return None
        rank, world = _count(environment, "RANK", 0), _count(environment, "WORLD_SIZE", 1)
        if rank >= world:
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}: ranks are counted from 0 to {world - 1}")
        return cls(
            rank,
            world,
            environment["MASTER_ADDR"],
            _count(environment, "MASTER_PORT", 1),
            _count(environment, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in environment else world,
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def place(self) -> str:
        """Where the store is, in words."""
        return f"{self.address}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def _count(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number from {least} on")
    return int(text)
