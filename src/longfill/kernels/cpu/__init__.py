"""Native CPU kernels (`csrc/`), chosen by instruction set at run time."""

from longfill.kernels.cpu.extension import available, describe, isa_names, selected_isa
from longfill.kernels.cpu.indexer import index_topk, scratch_bytes
from longfill.kernels.cpu.rows import (
    add_rms_norm,
    index_queries,
    rms_norm,
    rotate,
    row_scratch_bytes,
    store_index_keys,
    store_latent,
)

__all__ = [
    "add_rms_norm",
    "available",
    "describe",
    "index_queries",
    "index_topk",
    "isa_names",
    "rms_norm",
    "rotate",
    "row_scratch_bytes",
    "scratch_bytes",
    "selected_isa",
    "store_index_keys",
    "store_latent",
]
