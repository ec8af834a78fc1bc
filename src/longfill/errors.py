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
