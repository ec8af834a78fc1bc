"""Native CPU kernels (`csrc/`), chosen by instruction set at run time."""

from longfill.kernels.cpu.extension import available, describe, isa_names, selected_isa
from longfill.kernels.cpu.indexer import ScreenCounts, index_topk, scratch_bytes

__all__ = ["ScreenCounts", "available", "describe", "index_topk", "isa_names", "scratch_bytes", "selected_isa"]
