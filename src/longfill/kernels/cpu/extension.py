"""The compiled extension, if this installation has one, and the instruction set it runs with.

May import the extension and `longfill.errors`. Invariant: one instruction set per process, decided once; a process
never falls from one to another on its own.
"""

from __future__ import annotations

import os
from functools import cache

from longfill.errors import ConfigError

try:
    import longfill.kernels.cpu._native as _native
except ImportError as error:
    # The traceback would keep the frames of the failed import alive.
    _failure: ImportError | None = error.with_traceback(None)
else:
    _failure = None

ISA_VARIABLE = "LONGFILL_ISA"


def available() -> bool:
    """Whether this installation was built with native kernels."""
    return _failure is None


def isa_names() -> tuple[str, ...]:
    """The instruction sets that this build has and this machine runs, best first; empty without native kernels."""
    return tuple(_native.isa_names()) if available() else ()


def tasks_done() -> int:
    """Tasks that kernels have done in this process; it grows while one runs, however long. 0 without native kernels."""
    return _native.tasks_done() if available() else 0


@cache
def selected_isa() -> str:
    """The instruction set of this process: the best one, or what LONGFILL_ISA names.

    Raises ConfigError where LONGFILL_ISA names one that the build or the machine lacks, or without native kernels.
    """
    names = isa_names()
    wanted = os.environ.get(ISA_VARIABLE, "")
    if not names:
        raise ConfigError(f"no native kernels in this installation ({_failure}); reinstall where a C++ compiler is")
    if wanted and wanted not in names:
        raise ConfigError(f"{ISA_VARIABLE}={wanted}: not available here; choose one of {', '.join(names)}")
    return wanted or names[0]


def describe() -> str:
    """One line for the start-up log: which kernels run and, where it is the reference, why."""
    if available():
        return f"native CPU kernels ({selected_isa()})"
    return f"reference kernels in PyTorch: this installation has no native ones ({_failure})"
