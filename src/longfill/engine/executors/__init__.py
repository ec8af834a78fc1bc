"""Executors: what runs a step, on one rank in this process or on many in others.

May import everything below the engine. Invariant: the engine sees one interface and does not know which it has.
"""

from longfill.engine.executors.choose import executor_backend, make_executor
from longfill.engine.executors.interface import Executor

__all__ = ["Executor", "executor_backend", "make_executor"]
