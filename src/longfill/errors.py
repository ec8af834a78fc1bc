"""The error family: each says what is wrong, where, and what to do. Imports nothing."""


class LongfillError(Exception):
    """Base of every error that longfill raises on purpose."""


class ConfigError(LongfillError):
    """A flag or engine argument that is wrong, or two that exclude each other."""


class ModelError(LongfillError):
    """A model folder, config.json or checkpoint that cannot be honoured; names the file, field or tensor."""


class CapacityError(LongfillError):
    """Something that does not fit the memory budget; carries the largest value that would."""


class RequestError(LongfillError):
    """A request that cannot be served as asked (too long, bad sampling parameters); the engine goes on."""


class KernelError(LongfillError):
    """A compute kernel that does not give on this machine what defines it."""


class EngineDeadError(LongfillError):
    """The engine's process has failed: nothing that it was asked for will come any more."""


class ParallelError(LongfillError):
    """A rank that is gone, late, or not the one that was expected; names the ranks and what they were doing."""


class OverloadedError(LongfillError):
    """A request that the queue has no room for now; `retry_after` says in how many seconds it may have."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoppingError(LongfillError):
    """The server is being stopped, and what it was asked for will not be done."""
