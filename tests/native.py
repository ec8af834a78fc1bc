"""Whether this installation has the native kernels, and whether it should.

For tests only. Invariant: where native kernels can be built, no test skips for want of them without another failing.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from longfill.kernels.cpu import available, describe

needs_native = pytest.mark.skipif(not available(), reason=describe())


def obstacles_to_building() -> list[str]:
    """What this machine lacks to build the native kernels from a checkout; empty where it can."""
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    lacking = []
    if not any(shutil.which(name) for name in compilers if name):
        lacking.append("C++ compiler")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        lacking.append("Python headers")
    return lacking
