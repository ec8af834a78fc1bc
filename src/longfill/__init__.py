"""longfill: prefill of million-token prompts for sparse-attention models, inside a memory budget."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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
