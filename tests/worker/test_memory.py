"""Memory: what a step takes beyond the reserved pools, and the numbers of the start-up table."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.allocations import Allocations, count_allocations, count_native, selfcheck
from tests.native import needs_native
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.config import EngineArgs
from longfill.errors import CapacityError
from longfill.kernels import cpu, workspace
from longfill.kernels.cpu import indexer as native_indexer
from longfill.kernels.interface import ScreenCounts
from longfill.kernels.reference import attention, indexer
from longfill.kernels.select import choose_kernels
from longfill.models.config import ModelConfig
from longfill.partition import LONG_MODEL_LEN, StepPlan, StepRequest
from longfill.worker import memory
from longfill.worker.memory import MemoryPlan, plan_memory
from longfill.worker.prompt_logprobs import PromptInput
from longfill.worker.sampler import SampleInput
from longfill.worker.worker import record_layout

MIB = 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TRANSIENT = ("activations", "attention tiles", "logits", "indexer tiles", "selection", "fp8 slices")
"""Rows of the plan from which a running step's tensors come; the score tiles in the fourth are reserved at start."""
NATIVE_SLACK = 2**19
"""Bytes of a native call that are no scratch: its lists of pieces, pages of the stack, the kernel's rounding of RSS."""

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"kernel_backend": "reference"},
    "native": {"kernel_backend": "cpu", "indexer_cache_dtype": "fp8"},
}
every_backend = pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
"""Index keys are float32 for the reference, as float32 models have them, and fp8 for the native kernels."""


@pytest.fixture(autouse=True)
def _a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are arithmetic: budgets beyond this machine's memory are planned too."""
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: 2**40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", max_position_embeddings=2**20, num_hidden_layers=2)
    return path


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


def started(folder: Path, max_model_len: int, **args: Any) -> LLM:
    """An engine whose pool is zeroed, so that steps may attend to contexts that nobody computed."""
    llm = engine(folder, max_model_len=max_model_len, memory_budget="4GiB", **args)
    llm.engine.worker.pool.zero_()
    return llm


def test_the_counter_counts() -> None:
    counted = selfcheck()
    assert (counted.peak, counted.largest) == (3 * MIB, 2 * MIB)
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of other tests' memory is resident, and would go uncounted
    assert 63 * MIB <= count_native(lambda: b"x" * (64 * MIB)) <= 67 * MIB


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


def set_tiles(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Give tiles other sizes, in the kernels and in the plan."""
    for module in (workspace, indexer, attention, memory):
        for name, size in sizes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


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


def native_scratch(plan: MemoryPlan) -> int:
    return next(row.bytes for row in plan.rows if row.name == "indexer scratch")


def transient(plan: MemoryPlan) -> int:
    """Bytes that the plan grants to a running step's tensors beyond what is reserved at start."""
    reserved = plan.workspace.score_tile_bytes + plan.workspace.selection_bytes
    return sum(row.bytes for row in plan.rows if row.name in TRANSIENT) - reserved


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


def test_mem_03_a_full_pool_parks_the_long_request(folder: Path) -> None:
    """A prompt in mid-prefill finds every page taken by running requests: it waits, loses nothing, ends the same."""
    args: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "max_num_seqs": 4}
    prompts = [tokens(20, seed=1), tokens(22, seed=2), tokens(90, seed=3)]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (60, 60, 8)]
    free = engine(folder, **args, memory_budget="2GiB").generate(prompts, params)
    llm = engine(folder, **args, num_gpu_blocks_override=42)
    llm.engine.add_request("a", prompts[0], params[0])
    llm.engine.add_request("b", prompts[1], params[1])
    llm.engine.add_request("long", prompts[2], params[2])
    done, parked = {}, 0
    for _ in range(1000):
        done.update({out.request_id: out for out in llm.engine.step() if out.finished})
        llm.engine.cache.check()
        parked += llm.engine.scheduler.num_waiting > 0
        if not llm.engine.has_unfinished_requests:
            break
    assert parked > 5, "the pool was never full"
    got = [done[name].outputs[0].token_ids for name in ("a", "b", "long")]
    assert got == [out.outputs[0].token_ids for out in free]
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages


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


CONFIGS: list[dict[str, Any]] = [
    {"max_model_len": 4096},
    {"max_model_len": 100_000, "block_size": 16},
    {"max_model_len": 4096, "kv_cache_dtype": "fp8_ds_mla"},
    {"max_model_len": 4096, "attention_path": "workspace"},
    {"max_model_len": 4096, "num_gpu_blocks_override": 100},
]


@pytest.mark.parametrize("args", CONFIGS)
@every_backend
def test_mem_06_the_printed_numbers_add_up(folder: Path, args: dict[str, Any], backend: str) -> None:
    made = plan(folder, **args, **BACKENDS[backend])
    pool = made.rows[-1]
    names = {row.name for row in made.rows}
    assert ("indexer scratch" in names, "indexer scores" in names) == (backend == "native", backend == "reference")
    page_size = args.get("block_size", 64)
    assert pool.name == "KV pages"
    assert made.page_bytes == page_size * made.bytes_per_token
    assert pool.bytes == made.num_pages * page_size * made.bytes_per_token
    assert made.total == sum(row.bytes for row in made.rows) <= made.budget == 2 * 2**30
    printed = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", pool.note)]
    longest = -(-args["max_model_len"] // page_size) * page_size * made.bytes_per_token
    assert printed == [made.num_pages, made.page_bytes, made.bytes_per_token, args["max_model_len"], longest]
    if "num_gpu_blocks_override" in args:
        assert made.num_pages == args["num_gpu_blocks_override"]


@every_backend
def test_mem_06_the_pool_that_is_printed_is_the_pool_that_is_reserved(folder: Path, backend: str) -> None:
    llm = engine(folder, max_model_len=1000, **BACKENDS[backend])
    worker, made = llm.engine.worker, llm.memory
    assert worker.pool.nbytes == made.rows[-1].bytes
    space = worker.decoder.attend.workspace
    printed = {row.name: row.bytes for row in made.rows}
    assert space._logits.nbytes == printed.get("indexer scores", 0)
    assert space._tile.nbytes == made.workspace.score_tile_bytes
    assert made.workspace.score_tile_bytes < printed.get("indexer tiles", 1)
    assert space._selection.nbytes == made.workspace.selection_bytes
    assert (space._logits.nbytes > 0) == (backend == "reference")


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mem_06_the_native_line_is_the_most_that_the_extension_allocates(folder: Path, threads: int) -> None:
    indexer_config = ModelConfig.from_folder(folder, None).indexer
    assert indexer_config is not None
    most = cpu.scratch_bytes(
        heads=indexer_config.num_heads, dim=indexer_config.head_dim, topk=indexer_config.topk, num_threads=threads
    )
    made = [plan(folder, max_model_len=n, num_threads=threads, **BACKENDS["native"]) for n in (64, 65_536)]
    assert [native_scratch(p) for p in made] == [most, most]


def suggested(error: CapacityError) -> int:
    match = re.search(r"the largest that fits is --max-model-len (\d+)", str(error))
    assert match is not None, str(error)
    return int(match[1])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"block_size": 1},
    {"attention_path": "workspace"},
    {"attention_path": "workspace", "kv_cache_dtype": "fp8_ds_mla"},
    {"kv_cache_dtype": "fp8_ds_mla", "sparse_indexer_max_logits_mb": 1},
]


def assert_suggestion_is_exact(folder: Path, **args: Any) -> int:
    """The model's whole length is refused; what the refusal suggests starts, and one token more does not."""
    with pytest.raises(CapacityError) as refused:
        plan(folder, max_model_len=2**20, **args)
    length = suggested(refused.value)
    made = plan(folder, max_model_len=length, **args)
    assert made.total <= made.budget
    with pytest.raises(CapacityError) as again:
        plan(folder, max_model_len=length + 1, **args)
    assert suggested(again.value) == length
    return length


@pytest.mark.parametrize("room_for", [777, 300_000])
@pytest.mark.parametrize("args", OPTIONS)
@every_backend
def test_mem_06_the_suggested_length_starts_and_one_more_does_not(
    folder: Path, args: dict[str, Any], room_for: int, backend: str
) -> None:
    """Under just the budget that `room_for` tokens need, whatever the backend takes for itself."""
    args = args | BACKENDS[backend]
    roomy = plan(folder, max_model_len=room_for, memory_budget="64GiB", **args)
    pages = -(-room_for // args.get("block_size", 64)) + 1
    need = sum(row.bytes for row in roomy.rows[:-2]) + pages * (roomy.page_bytes + memory.PAGE_BOOKKEEPING)
    length = assert_suggestion_is_exact(folder, memory_budget=str(need), **args)
    assert room_for <= length < room_for + 64
    assert assert_suggestion_is_exact(folder, memory_budget=str(need - 1), **args) < room_for


@pytest.mark.parametrize("args", [{}, {"attention_path": "workspace", "memory_budget": "64GiB"}])
@pytest.mark.parametrize("pages", [2, 33, 12_000])
@every_backend
def test_mem_06_the_length_suggested_for_a_pool_by_hand_fills_it(
    folder: Path, args: dict[str, Any], pages: int, backend: str
) -> None:
    length = assert_suggestion_is_exact(folder, num_gpu_blocks_override=pages, **args, **BACKENDS[backend])
    assert length == 64 * (pages - 1)


@pytest.mark.parametrize("args", [{}, {"attention_path": "workspace"}, {"num_gpu_blocks_override": 5000}])
@every_backend
def test_mem_06_a_longer_limit_never_needs_less(folder: Path, args: dict[str, Any], backend: str) -> None:
    args = args | BACKENDS[backend]
    lengths = [2, 64, 65, 4096, 100_000, 262_143, 262_144, 262_145, 300_000, 655_360, 655_361, 2**20]
    budget = {"memory_budget": "64GiB"}
    fixed = [
        sum(r.bytes for r in plan(folder, max_model_len=n, **args, **budget).rows[:-2])
        for n in lengths
        if fits(args, n)
    ]
    assert fixed == sorted(fixed)
    assert len(fixed) >= 7
    # What is accepted at a length is accepted at every shorter one, for budgets around each length's need.
    for need in sorted({bytes_ + extra for bytes_ in fixed for extra in (2**20, 2**25, 2**28)}):
        accepted = [accepts(folder, n, memory_budget=str(need), **args) for n in lengths]
        assert accepted == sorted(accepted, reverse=True)


def fits(args: dict[str, Any], length: int) -> bool:
    pages = args.get("num_gpu_blocks_override")
    return pages is None or -(-length // 64) + 1 <= pages


def accepts(folder: Path, length: int, **args: Any) -> bool:
    try:
        plan(folder, max_model_len=length, **args)
    except CapacityError:
        return False
    return True


def test_mem_06_too_many_pages_by_hand_are_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"1,000,000 pages \(--num-gpu-blocks-override\)"):
        plan(folder, max_model_len=4096, num_gpu_blocks_override=1_000_000)


def test_mem_06_a_budget_without_room_for_the_model_says_so(folder: Path) -> None:
    with pytest.raises(CapacityError, match="raise --memory-budget"):
        plan(folder, max_model_len=4096, memory_budget="100MiB")


def test_mem_06_a_request_of_the_longest_length_runs_in_the_smallest_pool(folder: Path) -> None:
    pages = 1 + 200 // 8
    llm = engine(folder, max_model_len=200, block_size=8, num_gpu_blocks_override=pages)
    out = llm.generate(tokens(199), GREEDY)[0]
    assert out.outputs[0].finish_reason == "length"
    assert len(out.outputs[0].token_ids) == 1


def test_the_factor_limit_is_the_partitions() -> None:
    assert memory.context_workspace_rows(EngineArgs(), LONG_MODEL_LEN) == 5 * LONG_MODEL_LEN
    assert memory.context_workspace_rows(EngineArgs(), LONG_MODEL_LEN + 1) == 5 * LONG_MODEL_LEN


def test_a_budget_beyond_the_machine_is_refused_with_both_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: 2**30)
    with pytest.raises(CapacityError, match=r"2GiB.*1,024\.0 MiB"):
        plan(folder, max_model_len=1024)


def test_the_reserve_for_the_process_is_the_same_for_two_starts_of_one_command() -> None:
    typical = [memory.process_reserve(rss * MIB) for rss in range(200, 257)]
    assert set(typical) == {320 * MIB}
    assert all(memory.process_reserve(rss * MIB) >= (rss + 64) * MIB for rss in range(100, 2000, 7))
