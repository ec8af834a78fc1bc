"""Memory: what a step takes beyond the reserved pools, against the lines of the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.allocations import Allocations, count_allocations, count_native, selfcheck
from tests.native import needs_native
from tests.tiny import make_checkpoint
from tests.worker.memory_lines import (
    BACKENDS,
    MIB,
    every_backend,
    native_scratch,
    set_tiles,
    started,
    transient,
)
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.kernels import workspace
from longfill.kernels.cpu import indexer as native_indexer
from longfill.kernels.interface import ScreenCounts
from longfill.kernels.reference import attention, indexer
from longfill.partition import StepPlan, StepRequest
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.sampler import SampleInput

NATIVE_SLACK = 2**19
"""Bytes of a native call that are no scratch: its lists of pieces, pages of the stack, the kernel's rounding of RSS."""

pytestmark = pytest.mark.usefixtures("a_large_machine")


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    make_checkpoint(path, "deepseek_v3", num_hidden_layers=2, max_position_embeddings=2**20)
    return path


def step_of(
    llm: LLM, parts: list[tuple[int, int]], logprobs: int | None = None
) -> tuple[StepPlan, list[SampleInput], list[PromptInput]]:
    """One step of requests (tokens cached, tokens in this step) that share their pages, all sampling.

    With `logprobs` each wants those of its outputs and of all that stands behind its rows.
    """
    worker = llm.engine.worker
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, logprobs=logprobs)
    page_size = worker.layout.page_size
    requests = []
    for i, (start, count) in enumerate(parts):
        pages = np.arange(1, 1 - (-(start + count) // page_size), dtype=np.int64)
        requests.append(StepRequest(str(i), start, count, pages, np.full(count, 5 + i, dtype=np.int64), True))
    plan = worker.plan(requests)
    inputs = [SampleInput(r.request_id, params, 1, 0) for r in plan.requests]
    prompts = [PromptInput(r.request_id, r.start + 1, r.token_ids, logprobs or 0) for r in plan.requests]
    return plan, inputs, prompts if logprobs is not None else []


def run_step(llm: LLM, parts: list[tuple[int, int]], logprobs: int | None = None) -> Allocations:
    """Run such a step and count."""
    step = step_of(llm, parts, logprobs)
    return count_allocations(lambda: llm.engine.worker.execute(*step))


def test_the_counter_counts() -> None:
    counted = selfcheck()
    assert (counted.peak, counted.largest) == (3 * MIB, 2 * MIB)
    assert 63 * MIB <= count_native(lambda: b"x" * (64 * MIB)) <= 67 * MIB


def test_the_counter_counts_what_malloc_had_kept() -> None:
    kept, fence = [bytes(2**16) for _ in range(1024)], bytes(2**16)
    del kept  # 64 MiB that stay resident, since what stands behind them is in use
    assert fence.count(0) == 2**16
    assert count_native(lambda: [b"x" * 2**16 for _ in range(512)]) >= 31 * MIB


@pytest.mark.parametrize(
    ("path", "args"),
    [
        pytest.param("paged", BACKENDS["reference"], id="paged-reference"),
        pytest.param("workspace", BACKENDS["reference"], id="workspace-reference"),
        pytest.param("paged", BACKENDS["reference"] | {"indexer_cache_dtype": "fp8"}, id="paged-reference-fp8_keys"),
        pytest.param("paged", BACKENDS["native"], id="paged-native", marks=needs_native),
        pytest.param("workspace", BACKENDS["native"], id="workspace-native", marks=needs_native),
        pytest.param("dense", {}, id="dense"),
    ],
)
def test_mem_01_a_steps_memory_does_not_grow_with_the_context(
    folder: Path, dense_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, args: dict[str, Any]
) -> None:
    monkeypatch.setattr(indexer, "SELECT_TILE", 2**13)
    monkeypatch.setattr(indexer, "KEY_TILE", 512)
    for module in (workspace, attention):
        monkeypatch.setattr(module, "CONTEXT_TILE", 512)
    where = dense_folder if path == "dense" else folder
    args = args if path == "dense" else args | {"attention_path": path}
    chunk = 16
    llm = started(
        where, 2**14, max_num_batched_tokens=chunk, max_num_seqs=1, sparse_indexer_max_logits_mb=2, **args
    )  # fmt: skip
    run_step(llm, [(2**10 - chunk, chunk)])  # what only the first step takes would hide what grows
    counted = {length: run_step(llm, [(length - chunk, chunk)]) for length in (2**10, 2**12, 2**14)}
    first, *later = counted.values()
    for length, step in zip(list(counted)[1:], later, strict=True):
        assert step.peak <= 1.05 * first.peak, f"{length} tokens of context: {step.peak:,} B, {first.peak:,} before"
        assert step.largest <= 1.05 * first.largest, f"{length} tokens of context: one of {step.largest:,} B"


def score_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills, while steps run, with the bytes of the reserved scores that each query chunk writes."""
    taken: list[int] = []
    logits = workspace.Workspace.logits

    def counted(self: workspace.Workspace, num_rows: int, num_keys: int) -> Tensor:
        scores_ML = logits(self, num_rows, num_keys)
        taken.append(scores_ML.nbytes)
        return scores_ML

    monkeypatch.setattr(workspace.Workspace, "logits", counted)
    return taken


def selection_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills, while steps run, with the most that selecting among each query chunk's scores allocates."""
    peaks: list[int] = []
    index_topk: Callable[..., None] = indexer.index_topk

    def counted(*args: Any) -> None:
        peaks.append(count_allocations(lambda: index_topk(*args)).peak)

    monkeypatch.setattr(indexer, "index_topk", counted)
    return peaks


def stage_peaks(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> tuple[list[int], list[int]]:
    """Fill, while steps run, with what attention allocates beside its outputs, and with what the head allocates."""
    attending: list[int] = []
    head: list[int] = []
    worker = llm.engine.worker
    attend, linear = worker.decoder.attend, worker.decoder.backend.linear

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(attend, name)

        def __call__(self, *args: Any) -> None:
            # The counter wants something to count, and native attention takes nothing from torch.
            peak = count_allocations(lambda: (torch.empty(1), attend(*args))).peak
            # A request's outputs, on their way into those of all, are a row's activations.
            attending.append(peak - args[-1].nbytes)

    def counted(x_TC: Tensor, weight: Any, **given: Any) -> Tensor:
        if weight is not worker.decoder.weights.lm_head:
            return linear(x_TC, weight, **given)
        results: list[Tensor] = []
        head.append(count_allocations(lambda: results.append(linear(x_TC, weight))).peak)
        return results[0]

    monkeypatch.setattr(worker.decoder, "attend", Counted())
    monkeypatch.setattr(worker.decoder.backend, "linear", counted)
    return attending, head


@pytest.mark.parametrize("index_format", ["float32", "fp8"])
def test_mem_01_the_indexers_buffers_are_the_plans_at_every_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch, index_format: str
) -> None:
    """A chunk that must be cut fills the scores' line within 5 %; what selecting takes beside them is as flat."""
    longest, chunk = 2**15, 40
    set_tiles(monkeypatch, SELECT_TILE=longest, KEY_TILE=4096, ROW_TILE=64)
    # k is so large that no row is pruned before its scores are compared: the most that selecting can take.
    llm = started(
        folder, longest, max_num_batched_tokens=chunk, max_num_seqs=1, sparse_indexer_max_logits_mb=1,
        indexer_cache_dtype=index_format, kernel_backend="reference", hf_overrides={"index_topk": 512},
    )  # fmt: skip
    line = {row.name: row.bytes for row in llm.memory.rows}
    beside = line["indexer tiles"] - llm.memory.workspace.score_tile_bytes
    first = 0
    for length in (2**13, 2**14, 2**15):
        with monkeypatch.context() as patch:
            scores, selecting = score_bytes(patch), selection_bytes(patch)
            llm.engine.worker.execute(*step_of(llm, [(length - chunk, chunk)]))
        assert 0.95 * line["indexer scores"] <= max(scores) <= line["indexer scores"], f"{length} tokens of context"
        first = first or max(selecting)
        assert max(selecting) <= 1.05 * first, f"{length} tokens of context"
        assert 0.3 * beside <= max(selecting) <= beside


def native_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills, while steps run, with the bytes that each native call took from the system; torch counts none of them."""
    peaks: list[int] = []
    index_topk: Callable[..., ScreenCounts] = native_indexer.index_topk

    def counted(*args: Any, **kwargs: Any) -> ScreenCounts:
        given: list[ScreenCounts] = []
        peaks.append(count_native(lambda: given.append(index_topk(*args, **kwargs))))
        return given[0]

    monkeypatch.setattr(native_indexer, "index_topk", counted)
    return peaks


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mem_01_native_scores_are_never_written_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """What a native call takes is the plan's line, however long the context; the scores would be 4 times that."""
    chunk, longest = 1024, 2**14
    llm = started(
        folder, longest, max_num_batched_tokens=chunk, max_num_seqs=1, num_threads=threads, **BACKENDS["native"]
    )
    peaks = native_peaks(monkeypatch)
    scratch = native_scratch(llm.memory)
    try:
        for length in (2**11, longest):
            run_step(llm, [(length - chunk, chunk)])
    finally:
        torch.set_num_threads(1)
    assert len(peaks) == 2 * llm.model_config.num_layers
    assert max(peaks) <= scratch + NATIVE_SLACK
    # So large that malloc maps it anew: memory that torch has freed could not hide it.
    assert 4 * chunk * longest > max(32 * MIB, 4 * (scratch + NATIVE_SLACK))


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        *[(path, "reference") for path in ("paged", "workspace", "dense", "all sparse")],
        *[pytest.param(path, "native", marks=needs_native) for path in ("paged", "workspace", "all sparse")],
    ],
)
def test_mem_02_the_worst_step_stays_within_the_plan(
    folder: Path, dense_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, backend: str
) -> None:
    """Last chunk at the longest context beside as many decodes as may run, log-probabilities on."""
    where = dense_folder if path == "dense" else folder
    args: dict[str, Any] = {
        "dense": {},
        "all sparse": {"sparse_mla_force_mqa": True, "hf_overrides": {"index_topk": 512}},
    }.get(path, {"attention_path": path})
    args |= BACKENDS[backend]
    longest, seqs, budget = 2048, 16, 512
    llm = started(where, longest, max_num_seqs=seqs, max_num_batched_tokens=budget, **args)
    peaks = native_peaks(monkeypatch)
    chunk = budget - (seqs - 1)
    step = run_step(llm, [(longest - 1 - chunk, chunk), *[(longest - 2, 1)] * (seqs - 1)], logprobs=64)
    assert step.peak <= transient(llm.memory), "more than the plan lists"
    assert step.largest <= 16 * MIB, "a large allocation outside the reserved pools"
    assert len(peaks) == (llm.model_config.num_layers if backend == "native" else 0)
    assert not peaks or max(peaks) <= native_scratch(llm.memory) + NATIVE_SLACK


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        *[(path, "reference") for path in ("paged", "workspace", "dense", "all sparse")],
        pytest.param("paged", "native", marks=needs_native),
    ],
)
def test_mem_02_the_worst_step_takes_what_the_plan_grants(
    folder: Path, dense_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, backend: str
) -> None:
    """As above with small tiles, so that lines which are planned too small have nothing to hide behind.

    Of the plan 30 % at least is used: it adds up stages that do not all live at once.
    """
    set_tiles(monkeypatch, SELECT_TILE=2**13, CONTEXT_TILE=512, ATTENTION_TILE_BYTES=2**17)
    args: dict[str, Any] = {
        "dense": {},
        "all sparse": {"sparse_mla_force_mqa": True, "hf_overrides": {"index_topk": 128}},
    }.get(path, {"attention_path": path})
    longest, seqs, budget = 1024, 8, 256
    where = dense_folder if path == "dense" else folder
    llm = started(
        where, longest, max_num_seqs=seqs, max_num_batched_tokens=budget, **(args | BACKENDS[backend])
    )  # fmt: skip
    granted = transient(llm.memory)
    rows = {row.name: row.bytes for row in llm.memory.rows}
    chunk = budget - (seqs - 1)
    parts = [(longest - 1 - chunk, chunk), *[(longest - 2, 1)] * (seqs - 1)]
    step = run_step(llm, parts, logprobs=64)
    assert 0.3 * granted <= step.peak <= granted
    assert rows["activations"] >= 0.5 * granted, "fixed tiles could hide a wrong line of activations"
    # Stage by stage, each against its own line.
    attending, head = stage_peaks(monkeypatch, llm)
    llm.engine.worker.execute(*step_of(llm, parts, logprobs=64))
    if backend == "native":
        assert max(attending) <= 0, "a native kernel's tiles are its own scratch"
    else:
        assert 0.3 * rows["attention tiles"] <= max(attending) <= rows["attention tiles"]
    assert 0.3 * rows["logits"] <= max(head) <= rows["logits"]


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mem_02_what_native_calls_take_is_in_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Every call of a step, its outputs aside, against the plan's line for all of them."""
    longest, chunk = 4096, 2048
    llm = started(
        folder, longest, max_num_batched_tokens=chunk, max_num_seqs=1, num_threads=threads, **BACKENDS["native"]
    )
    peaks: dict[str, int] = {}
    backend = llm.engine.worker.decoder.backend

    def count(name: str) -> None:
        operation = getattr(backend, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []
            peak = count_native(lambda: results.append(operation(*args, **kwargs)))
            outputs = [t for t in (results[0] if isinstance(results[0], tuple) else results) if t is not None]
            outputs += [
                t for t in args if name in ("per_head", "rotate", "sparse_mla", "dense_mla") and isinstance(t, Tensor)
            ]
            peaks[name] = max(peaks.get(name, 0), peak - sum(t.nbytes for t in outputs))
            return results[0]

        monkeypatch.setattr(backend, name, counted)

    names = ("linear", "per_head", "mlp", "experts", "rotate", "store_latent", "sparse_mla", "dense_mla")
    for name in names:
        count(name)
    try:
        for start in (0, longest - chunk):
            run_step(llm, [(start, chunk)])
    finally:
        torch.set_num_threads(1)
    scratch = next(row.bytes for row in llm.memory.rows if row.name == "kernel scratch")
    assert peaks.keys() == set(names)
    assert max(peaks.values()) <= scratch + NATIVE_SLACK, peaks


@pytest.mark.parametrize("rows", [(0, 512), (8, 504), (0, 16)])
@every_backend
def test_mem_02_a_first_chunk_stays_within_the_plan(folder: Path, rows: tuple[int, int], backend: str) -> None:
    for seqs in (1, 4):
        llm = started(folder, 1024, max_num_seqs=seqs, max_num_batched_tokens=512, **BACKENDS[backend])
        assert run_step(llm, [rows]).peak <= transient(llm.memory)


@every_backend
def test_mem_02_fp8_weights_are_in_the_plan(tmp_path: Path, backend: str) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", fp8=True, dtype=torch.bfloat16)
    llm = started(tmp_path, 1024, dtype="auto", max_num_seqs=1, max_num_batched_tokens=64, **BACKENDS[backend])
    weights = next(row for row in llm.memory.rows if row.name == "weights")
    assert weights.bytes == llm.engine.worker.decoder.weights.num_bytes
    assert run_step(llm, [(900, 64)]).peak <= transient(llm.memory)
