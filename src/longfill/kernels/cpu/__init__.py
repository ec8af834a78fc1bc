"""Native CPU kernels (`csrc/`), chosen by instruction set at run time."""

from longfill.kernels.cpu.extension import available, describe, isa_names, selected_isa
from longfill.kernels.cpu.indexer import index_topk, scratch_bytes
from longfill.kernels.cpu.packing import (
    PackedHeads,
    PackedLinear,
    PackedMlp,
    pack_heads,
    pack_linear,
    pack_mlp,
    packed_bytes,
    packed_heads_bytes,
)

__all__ = [
    "PackedHeads",
    "PackedLinear",
    "PackedMlp",
    "available",
    "describe",
    "index_topk",
    "isa_names",
    "pack_heads",
    "pack_linear",
    "pack_mlp",
    "packed_bytes",
    "packed_heads_bytes",
    "scratch_bytes",
    "selected_isa",
]
