"""The bundled needle model (`model/`) and the texts it answers questions about; only re-exports.

Imports nothing but `longfill.needle.haystack`, so that it costs nothing to load.
"""

from longfill.needle.haystack import ANSWER_CUE, Fact, Haystack, build_haystack, default_facts

__all__ = ["ANSWER_CUE", "Fact", "Haystack", "build_haystack", "default_facts"]
