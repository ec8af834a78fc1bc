"""longfill: prefill of million-token prompts for sparse-attention models, inside a memory budget."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

# Before torch loads its OpenMP runtime: a thread that waits for another gives up its core soon instead of spinning.
# With one busy neighbour on two cores a 16K prefill took 28.6 s with the default and 2.8 s so; alone it costs little.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Before torch's first matrix product: with AMX oneDNN sums in orders that depend on the number of rows (measured on a
# Xeon: bf16, 64 to 256 rows against 1024), without it in one.
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
os.environ.setdefault(ONEDNN_LIMIT, "AVX512_CORE_BF16")

if TYPE_CHECKING:
    from longfill.engine.llm import LLM as LLM
    from longfill.request import SamplingParams as SamplingParams

try:
    __version__ = version("longfill")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the engine (and torch) only when asked for: `longfill --help` and `longfill.partition` need neither."""
    if name == "LLM":
        from longfill.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from longfill.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'longfill' has no attribute {name!r}")
