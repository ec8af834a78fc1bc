"""Every way of cutting work, as pure functions from integers to integers.

May import NumPy, units and errors; never torch nor the engine. Invariant: what is cut covers the whole, once.
"""

from longfill.partition.dcp import dcp_local_lens, dcp_local_position, dcp_owner
from longfill.partition.indexer import IndexerChunk, indexer_chunks, key_ranges
from longfill.partition.pcp import PcpLayout, pcp_layout
from longfill.partition.row_shards import row_shards
from longfill.partition.slots import CompressRatio, KernelBlockSize, kernel_block_table, slot_mapping
from longfill.partition.step import StepPlan, StepRequest, plan_step
from longfill.partition.transfer import expected_acks, tp_source_ranks
from longfill.partition.workspace import (
    LONG_MODEL_LEN,
    indexer_workspace_rows,
    prefill_workspace_rows,
    workspace_chunks,
)

__all__ = [
    "LONG_MODEL_LEN",
    "CompressRatio",
    "IndexerChunk",
    "KernelBlockSize",
    "PcpLayout",
    "StepPlan",
    "StepRequest",
    "dcp_local_lens",
    "dcp_local_position",
    "dcp_owner",
    "expected_acks",
    "indexer_chunks",
    "indexer_workspace_rows",
    "kernel_block_table",
    "key_ranges",
    "pcp_layout",
    "plan_step",
    "prefill_workspace_rows",
    "row_shards",
    "slot_mapping",
    "tp_source_ranks",
    "workspace_chunks",
]
