"""Memory: the numbers of the start-up table, the refusals that they lead to, and a pool that is full."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tests.native import needs_native
from tests.oracle.harness import engine, tokens
from tests.worker.memory_lines import BACKENDS, MIB, every_backend, native_scratch, plan

from longfill import SamplingParams
from longfill.config import EngineArgs
from longfill.errors import CapacityError
from longfill.kernels import cpu
from longfill.models.config import ModelConfig
from longfill.partition import LONG_MODEL_LEN
from longfill.worker import memory

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("a_large_machine")


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


def test_what_ranks_exchange_is_planned_and_one_rank_exchanges_nothing(folder: Path) -> None:
    def lines(**args: Any) -> dict[str, int]:
        return {row.name: row.bytes for row in plan(folder, memory_budget="1GiB", max_model_len=512, **args).rows}

    assert "exchange" not in lines()
    two = lines(tensor_parallel_size=2)
    assert two["exchange"] > 0
    assert lines(deterministic=True)["exchange"] > 0, "slices of keys are merged on one rank too"
    assert lines(prefill_context_parallel_size=2, enable_expert_parallel=True)["exchange"] > two["exchange"]
    assert "gathered contexts" not in two
    assert lines(prefill_context_parallel_size=2, decode_context_parallel_size=2)["gathered contexts"] > 0


def test_a_page_table_entry_holds_a_page_of_every_rank_that_shares_the_cache(folder: Path) -> None:
    whole = plan(folder, memory_budget="1GiB", max_model_len=512, max_num_seqs=1, block_size=8)
    shared = plan(
        folder, memory_budget="1GiB", max_model_len=512, max_num_seqs=1, block_size=8, tensor_parallel_size=2,
        decode_context_parallel_size=2,
    )  # fmt: skip
    assert (whole.num_pages, shared.num_pages) == (512 // 8 + 1, 512 // 16 + 1)


def test_ranks_of_a_machine_share_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cgroup_memory_limit", lambda: 4096 * MIB)
    one = memory.budget_bytes(EngineArgs(model=str(folder)))
    assert memory.budget_bytes(EngineArgs(model=str(folder), tensor_parallel_size=2)) == one // 2
    memory.budget_bytes(EngineArgs(model=str(folder), memory_budget="2GiB", tensor_parallel_size=2))
    with pytest.raises(CapacityError, match=r"--memory-budget 3GiB: 2 ranks take it each, and together may use 4,096"):
        memory.budget_bytes(EngineArgs(model=str(folder), memory_budget="3GiB", tensor_parallel_size=2))
