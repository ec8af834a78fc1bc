"""Native CPU kernels (`csrc/`), chosen by instruction set at run time."""

from longfill.kernels.cpu.attention import attention_scratch_bytes
from longfill.kernels.cpu.backend import NativeBackend
from longfill.kernels.cpu.experts import experts_scratch_bytes, route_scratch_bytes
from longfill.kernels.cpu.extension import available, describe, isa_names, selected_isa
from longfill.kernels.cpu.indexer import check_screen, index_topk, merge_scratch_bytes, scratch_bytes
from longfill.kernels.cpu.linear import linear_scratch_bytes, mlp_scratch_bytes, per_head_scratch_bytes
from longfill.kernels.cpu.rows import row_scratch_bytes
from longfill.kernels.cpu.selftest import self_test

__all__ = [
    "NativeBackend",
    "attention_scratch_bytes",
    "available",
    "check_screen",
    "describe",
    "experts_scratch_bytes",
    "index_topk",
    "isa_names",
    "linear_scratch_bytes",
    "merge_scratch_bytes",
    "mlp_scratch_bytes",
    "per_head_scratch_bytes",
    "route_scratch_bytes",
    "row_scratch_bytes",
    "scratch_bytes",
    "selected_isa",
    "self_test",
]
