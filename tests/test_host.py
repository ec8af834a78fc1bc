"""The machine's limits are read where this process's cgroup is, and its cores from the kernel's description."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from longfill import host
from longfill.host import cgroup_cpu_count, cgroup_memory_limit, default_threads, node_core_counts

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


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
    assert max(node_core_counts(put_system(tmp_path, nodes, siblings))) == cores


@pytest.mark.parametrize(
    ("quota_cores", "nodes", "processes", "threads"),
    [
        (2, [4], 1, 2), (8, [4, 0], 1, 4), (3, [3], 1, 3), (64, [32, 32], 1, 32), (64, [32, 32], 2, 32),
        (64, [32, 32], 3, 21), (10, [32, 32], 2, 5), (2, [2], 4, 1),
    ],
)  # fmt: skip
def test_cpu_01_threads_default_to_a_part_of_all_cores_within_a_node(
    monkeypatch: pytest.MonkeyPatch, quota_cores: int, nodes: list[int], processes: int, threads: int
) -> None:
    monkeypatch.setattr(host, "cgroup_cpu_count", lambda: quota_cores)
    monkeypatch.setattr(host, "node_core_counts", lambda: nodes)
    assert default_threads(processes) == threads
