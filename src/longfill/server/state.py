"""What the routes share: one object of everything that one server has.

May import the server's other files below the routes. Invariant: made once, after the engine is ready; nobody replaces
its parts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from longfill.config import EngineArgs
from longfill.engine.tokenizer import Tokenizer
from longfill.server.admission import Admission
from longfill.server.args import ServerArgs
from longfill.server.cache_report import CacheReports
from longfill.server.client import EngineClient
from longfill.server.metrics import Metrics
from longfill.server.prompts import Lanes
from longfill.worker.structured import StructuredOutputs


@dataclass
class AppState:
    """Everything that one server has."""

    client: EngineClient
    tokenizer: Tokenizer | None
    forms: StructuredOutputs | None
    """Checks structured outputs; None without a tokenizer."""
    args: EngineArgs
    server_args: ServerArgs
    admission: Admission
    metrics: Metrics
    load_seconds: float
    """What the model took to load."""
    cache_reports: CacheReports
    lanes: Lanes = field(default_factory=Lanes)
    """Threads that read bodies and tokenise."""
    started: float = field(default_factory=time.time)
    """Unix time."""
    draining: bool = False
    """A SIGTERM has come: requests end, and none is taken."""
    stopped: bool = False
    """Nothing is answered any more; streams that would never end do."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may call the model; the first is what answers say."""
        return self.server_args.served_model_name or (self.args.model,)

    @property
    def model_folder(self) -> Path:
        return Path(self.client.ready.model)

    @property
    def health(self) -> tuple[str, str]:
        """("ok", "draining", "hung" or "dead", and why)."""
        client = self.client
        if client.failure is not None:
            return "dead", client.failure
        if not client.is_alive:
            return "hung", f"the engine has done nothing for {client.hung_for:.0f} s"
        if self.draining:
            return "draining", "the server is being stopped: requests end, and none is taken"
        return "ok", ""
