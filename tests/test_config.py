"""Engine arguments are refused for what they are, and the machine's limits are read where this process's cgroup is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from longfill import config
from longfill.config import (
    EngineArgs,
    cgroup_cpu_count,
    cgroup_memory_limit,
    choices_of,
    default_threads,
    physical_core_count,
)
from longfill.errors import ConfigError

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"memory_budget": 2**31}, r"--memory-budget: expected text, got 2147483648; .* as \"2GiB\""),
        ({"max_num_batched_tokens": None}, "--max-num-batched-tokens: expected an integer, got None"),
        ({"max_num_batched_tokens": 4096.0}, "--max-num-batched-tokens: expected an integer, got 4096.0"),
        ({"max_model_len": "4096"}, "--max-model-len: expected an integer, got '4096'"),
        ({"block_size": True}, "--block-size: expected an integer, got True"),
        ({"enable_prefix_caching": "no"}, "--enable-prefix-caching: expected True or False, got 'no'"),
        ({"digest": 1}, "--digest: expected True or False, got 1"),
        ({"enable_prefix_caching": None}, "--enable-prefix-caching: expected True or False, got None"),
        ({"model": None}, "--model: expected text, got None"),
        ({"tokenizer": 3}, "--tokenizer: expected text, got 3"),
        ({"hf_overrides": '{"index_topk": 8}'}, "--hf-overrides: expected a mapping"),
        ({"dtype": "int8"}, "--dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": None}, "--dtype: None is not one of auto"),
        ({"kv_cache_dtype": ["fp8"]}, "--kv-cache-dtype: .* is not one of auto"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens: 0 is out of range"),
    ],
)
def test_a_knob_of_another_type_is_refused_by_its_flag(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**args)


def test_optional_knobs_take_none_and_mappings_are_read_only() -> None:
    EngineArgs(tokenizer=None, max_model_len=None, memory_budget=None, hf_overrides={"index_topk": 8}, num_threads=None)


def test_choices_are_those_of_the_annotation() -> None:
    assert choices_of("attention_path") == ("auto", "paged", "workspace")
    assert choices_of("model") == choices_of("block_size") == choices_of("digest") == ()
    for knob in ("dtype", "kv_cache_dtype", "indexer_cache_dtype", "kernel_backend"):
        assert choices_of(knob)[0] == "auto"


class Cgroups:
    """A fake mount of cgroups and the list of those that the process is in."""

    def __init__(self, folder: Path, *memberships: str) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "membership"
        self.membership.write_text("".join(line + "\n" for line in memberships))

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    @property
    def memory(self) -> int:
        return cgroup_memory_limit(self.root, self.membership)

    @property
    def cpus(self) -> int:
        return cgroup_cpu_count(self.root, self.membership)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


LIMITS = [
    pytest.param("0::/a/b", "", "memory.max", "cpu.max", id="v2"),
    pytest.param("0::/a/b", "unified/", "memory.max", "cpu.max", id="v2 beside v1"),
    pytest.param("7:memory:/a/b\n5:cpu,cpuacct:/a/b", "{}/", "memory.limit_in_bytes", "cpu.cfs", id="v1"),
]


def quota(cgroups: Cgroups, folder: str, name: str, cores: float) -> None:
    if name == "cpu.max":
        cgroups.put(f"{folder}{name}", f"{int(cores * 100_000)} 100000")
    else:
        cgroups.put(f"{folder}cpu.cfs_quota_us", str(int(cores * 100_000)))
        cgroups.put(f"{folder}cpu.cfs_period_us", "100000")


@pytest.mark.parametrize(("membership", "mount", "memory", "cpu"), LIMITS)
def test_the_tightest_limit_between_the_own_cgroup_and_the_root_holds(
    tmp_path: Path, membership: str, mount: str, memory: str, cpu: str
) -> None:
    for level in ("", "a/", "a/b/"):
        folder = tmp_path / f"at {level.replace('/', '-')}"
        folder.mkdir()
        cgroups = Cgroups(folder, membership)
        for other in ("", "a/", "a/b/", "a/b/c/", "z/"):
            own = other == level
            inside = other in ("", "a/", "a/b/")
            cgroups.put(mount.format("memory") + other + memory, str((64 if own else 128 if inside else 1) * MIB))
            quota(cgroups, mount.format("cpu") + other, cpu, 2.9 if own else 5 if inside else 1)
        assert cgroups.memory == 64 * MIB
        assert cgroups.cpus == 2


def test_the_controllers_mount_may_have_both_their_names(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "5:cpu,cpuacct:/a", "0::/")
    quota(cgroups, "cpu,cpuacct/a/", "cpu.cfs", 3)
    assert cgroups.cpus == 3


@pytest.mark.parametrize("membership", ["0::/docker/host-path", "0::/../other", "", "nonsense"])
def test_a_path_that_is_not_mounted_leaves_the_roots_limit(tmp_path: Path, membership: str) -> None:
    cgroups = Cgroups(tmp_path, membership)
    cgroups.put("memory.max", str(64 * MIB))
    cgroups.put("cpu.max", "150000 100000")
    cgroups.put("../other/memory.max", "1")
    assert cgroups.memory == 64 * MIB
    assert cgroups.cpus == 1


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    assert Cgroups(tmp_path).memory == MACHINE
    assert Cgroups(tmp_path).cpus == 8
    cgroups = Cgroups(tmp_path, "0::/a", "4:memory:/a", "3:cpu:/a")
    cgroups.put("a/memory.max", "max")
    cgroups.put("a/cpu.max", "max 100000")
    cgroups.put("memory/a/memory.limit_in_bytes", str(2**63 - 4096))
    cgroups.put("cpu/a/cpu.cfs_quota_us", "-1")
    cgroups.put("cpu/a/cpu.cfs_period_us", "100000")
    assert cgroups.memory == MACHINE
    assert cgroups.cpus == 8


def test_less_than_a_core_is_one(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "0::/")
    cgroups.put("cpu.max", "50000 100000")
    assert cgroups.cpus == 1


def put_system(folder: Path, nodes: list[str], siblings: list[str]) -> Path:
    """The kernel's description of a machine: each node's CPUs, and the hardware threads of each CPU's core."""
    for node, cpus in enumerate(nodes):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(cpus + "\n")
    for cpu, threads in enumerate(siblings):
        (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(threads + "\n")
    return folder


SIBLINGS = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]
"""Four cores of two threads, numbered as Linux does: the second threads come after all first ones."""


@pytest.mark.parametrize(
    ("nodes", "siblings", "affinity", "cores"),
    [
        (["0-7"], [str(cpu) for cpu in range(8)], range(8), 8),
        (["0-7"], SIBLINGS, range(8), 4),
        (["0-7"], ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"], range(8), 4),
        (["0-1,4-5", "2-3,6-7"], SIBLINGS, range(8), 2),
        (["0-1,4-5", "2-3,6-7"], SIBLINGS, (0, 4, 2, 3), 2),  # one core of the first node, two of the second
        (["0-1,4-5", "2-3,6-7"], SIBLINGS, (1, 5), 1),
        (["0-7", ""], SIBLINGS, range(8), 4),  # a node of memory alone
        (["0-3"], SIBLINGS[:4], (5, 6, 7), 3),  # not described
        ([], [], range(8), 8),
    ],
)
def test_cpu_01_a_core_counts_once_and_only_one_nodes_cores_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    siblings: list[str],
    affinity: Iterable[int],
    cores: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
    assert physical_core_count(put_system(tmp_path, nodes, siblings)) == cores


@pytest.mark.parametrize(("quota_cores", "physical", "threads"), [(2, 4, 2), (8, 4, 4), (3, 3, 3)])
def test_cpu_01_threads_default_to_the_fewer_of_quota_and_cores(
    monkeypatch: pytest.MonkeyPatch, quota_cores: int, physical: int, threads: int
) -> None:
    monkeypatch.setattr(config, "cgroup_cpu_count", lambda: quota_cores)
    monkeypatch.setattr(config, "physical_core_count", lambda: physical)
    assert default_threads() == threads


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, ["--decode-context-parallel-size 2", "3"]),
        (
            {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 3},
            ["--decode-context-parallel-size 3", "must be 1, 2 or 4"],
        ),
        ({"deterministic": True, "tensor_parallel_size": 3}, ["--deterministic", "--tensor-parallel-size 3"]),
        ({"pcp_split": "interleave"}, ["--pcp-split", "--prefill-context-parallel-size"]),
        ({"all2all_backend": "low_latency"}, ["--all2all-backend", "--enable-expert-parallel"]),
        ({"dcp_comm_backend": "ag_rs"}, ["--dcp-comm-backend", "--decode-context-parallel-size"]),
        ({"cp_kv_cache_interleave_size": 2}, ["--cp-kv-cache-interleave-size", "--decode-context-parallel-size"]),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 3},
            ["--cp-kv-cache-interleave-size 3", "--block-size 64"],
        ),
    ],
)
def test_sizes_of_ranks_that_are_no_mesh_are_refused_with_both_names(given: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs(**given)
    assert all(text in str(error.value) for text in texts)


def test_ranks_of_this_machine_are_all_unless_torchrun_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(tensor_parallel_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert args.local_ranks == 4
    monkeypatch.setenv("RANK", "0")
    assert args.local_ranks == 2
    assert EngineArgs(tensor_parallel_size=4, distributed_executor_backend="mp").local_ranks == 4
