"""Every knob of the server, beside the engine's: name, default, unit.

Imports config and errors. Invariant: one validated object; a name that means the same as one of vLLM's has vLLM's name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longfill.config import flag_name, parse_bytes
from longfill.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Arguments of `longfill serve`. Raises ConfigError, naming the flag, for a value that makes no sense."""

    host: str = "0.0.0.0"
    port: int = 8000
    """0: any free one, which the log names."""
    api_key: tuple[str, ...] = ()
    """Keys of which a client must bring one; none: no key is asked for."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may call the model; the first is what answers say. None: the model as it was given."""
    chat_template: str | None = None
    """A Jinja file, or the template itself; None: the model's own."""
    tool_call_parser: str = "auto"
    """The format of tool calls in the output; "auto" goes by the model's architecture, "none" leaves them as text."""
    reasoning_parser: str = "auto"
    """Likewise, of reasoning."""
    request_timeout: float | None = None
    """Seconds after which a request that is not done is aborted; a request's own `timeout` can only be shorter."""
    sse_keepalive_interval: float = 5.0
    """Seconds; a stream that has nothing to say sends a comment this often."""
    max_logprobs: int = 20
    """Most log-probabilities a token that a request may ask for."""
    max_body_size: str = "64MiB"
    """Of a request; a longer one is refused before it is read."""
    max_num_queued_reqs: int = 1024
    """Requests without a first token, those whose body is being read included; one more gets 429."""
    max_num_queued_tokens: int = 8 * 2**20
    """Prompt tokens of those; a request that would add more gets 429, unless it is the only one."""
    cache_salt: str | None = None
    """Stands for the salt of every request, whatever the client says."""
    shutdown_timeout: float = 120.0
    """Seconds that requests get to finish after a SIGTERM."""
    heartbeat_timeout: float = 8.0
    """Seconds in which an engine that does nothing at all counts as hung."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser (CORS)."""
    root_path: str = ""
    """Where a proxy has put the server."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_level: str = "info"
    max_body_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        at_least = {
            "port": 0, "max_logprobs": 0, "max_num_queued_reqs": 1, "max_num_queued_tokens": 1, "shutdown_timeout": 0,
        }  # fmt: skip
        for name, low in at_least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{flag_name(name)}: {getattr(self, name):,} is out of range; at least {low}")
        if self.port > 65535:
            raise ConfigError(f"--port: {self.port:,} is out of range; at most 65535")
        for name in ("request_timeout", "sse_keepalive_interval", "heartbeat_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{flag_name(name)}: give more than 0 s, got {value:g}")
        if self.heartbeat_timeout < 3:
            raise ConfigError("--heartbeat-timeout: the engine tells of itself every second; give at least 3 s")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level: {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key: an empty key would let everybody in; give a longer one, or none at all")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together; give both or none")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag_name(name)}: there is no file {path}")
        object.__setattr__(self, "max_body_bytes", parse_bytes(self.max_body_size, "--max-body-size"))

    def report(self) -> dict[str, Any]:
        """All values, ready for JSON; of keys their number only."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["api_key"] = f"{len(self.api_key)} keys" if self.api_key else None
        if self.cache_salt is not None:
            values["cache_salt"] = "set"
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
