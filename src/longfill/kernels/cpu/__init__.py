"""Native CPU kernels (`csrc/`), chosen by instruction set at run time."""

from longfill.kernels.cpu.attention import attention_scratch_bytes, dense_mla, gather_rows, sparse_mla
from longfill.kernels.cpu.extension import available, describe, isa_names, selected_isa
from longfill.kernels.cpu.indexer import index_topk, scratch_bytes

__all__ = [
    "attention_scratch_bytes",
    "available",
    "dense_mla",
    "describe",
    "gather_rows",
    "index_topk",
    "isa_names",
    "scratch_bytes",
    "selected_isa",
    "sparse_mla",
]
