"""What tests of memory share: the backends' settings, plans without engines, and the lines of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.native import needs_native
from tests.oracle.harness import engine

from longfill import LLM
from longfill.config import EngineArgs
from longfill.kernels import workspace
from longfill.kernels.reference import attention, indexer
from longfill.kernels.select import choose_kernels
from longfill.models.config import ModelConfig
from longfill.worker import memory
from longfill.worker.memory import MemoryPlan, plan_memory
from longfill.worker.worker import record_layout

MIB = 2**20
TRANSIENT = ("activations", "attention tiles", "logits", "indexer tiles", "selection", "weight slices")
"""Rows of the plan from which a running step's tensors come; the score tiles in the fourth are reserved at start."""

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"kernel_backend": "reference"},
    "native": {"kernel_backend": "cpu", "indexer_cache_dtype": "fp8"},
}
every_backend = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
"""Index keys are float32 for the reference, as float32 models have them, and fp8 for the native kernels."""


def started(folder: Path, max_model_len: int, **args: Any) -> LLM:
    """An engine whose pool is zeroed, so that steps may attend to contexts that nobody computed.

    So is the selection, in which native calls write: reserved memory is resident, and not counted as what a call takes.
    """
    llm = engine(folder, max_model_len=max_model_len, memory_budget="4GiB", **args)
    worker = llm.engine.worker
    worker.pool.zero_()
    worker.decoder.attend.workspace._selection.zero_()
    return llm


def set_tiles(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Give tiles other sizes, in the kernels and in the plan."""
    for module in (workspace, indexer, attention, memory):
        for name, size in sizes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


def native_scratch(plan: MemoryPlan) -> int:
    return next(row.bytes for row in plan.rows if row.name == "indexer scratch")


def transient(plan: MemoryPlan) -> int:
    """Bytes that the plan grants to a running step's tensors beyond what is reserved at start."""
    reserved = plan.workspace.score_tile_bytes + plan.workspace.selection_bytes
    return sum(row.bytes for row in plan.rows if row.name in TRANSIENT) - reserved


def plan(folder: Path, process_bytes: int = 300 * MIB, weight_bytes: int = 50 * MIB, **args: Any) -> MemoryPlan:
    engine_args = EngineArgs(model=str(folder), **({"memory_budget": "2GiB", "max_num_seqs": 4} | args))
    config = ModelConfig.from_folder(folder, None)
    layout = record_layout(engine_args, config)
    assert config.indexer is not None
    kernels = choose_kernels(
        engine_args,
        dtype=config.dtype,
        topk=config.indexer.topk,
        index_format=layout.index_format,
        index_head_dim=layout.index_head_dim,
    )
    return plan_memory(engine_args, config, layout, kernels, process_bytes=process_bytes, weight_bytes=weight_bytes)
