"""What this host gives the process: memory and cores, within the limits of its cgroups and its affinity mask.

Imports nothing of ours.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
SYSTEM = Path("/sys/devices/system")


def cgroup_memory_limit(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int:
    """Bytes that this process may use: the least of its cgroup's limit, those of the cgroups above and the machine's.

    `root` is where cgroups are mounted (v2, v1, or v1 beside v2 in `unified`); `membership` lists the process's own.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = [folder / "memory.max" for folder in _cgroup_folders("", root, membership)]
    files += [folder / "memory.limit_in_bytes" for folder in _cgroup_folders("memory", root, membership)]
    return min([total, *(int(text) for text in map(_read_text, files) if text.isdigit())])


def cgroup_cpu_count(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> int:
    """Cores that this process may use: its affinity mask, cut by every CPU quota of `cgroup_memory_limit`'s cgroups.

    A quota is rounded down to whole cores, and at least 1.
    """
    quotas = [_read_text(folder / "cpu.max").split() for folder in _cgroup_folders("", root, membership)]
    quotas += [
        [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
        for folder in _cgroup_folders("cpu", root, membership)
    ]
    cores = len(os.sched_getaffinity(0))
    for quota in quotas:
        if len(quota) == 2 and all(text.isdigit() for text in quota) and int(quota[1]) > 0:
            cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def node_core_counts(system: Path = SYSTEM) -> list[int]:
    """Cores of the affinity mask in each NUMA node, each counted once: its hardware threads share its multipliers.

    `system` is the kernel's description; a CPU that it does not mention is a core of its own, of one node more.
    """
    allowed = set(os.sched_getaffinity(0))
    nodes = [allowed & _cpu_list(_read_text(file)) for file in (system / "node").glob("node[0-9]*/cpulist")]
    nodes.append(allowed.difference(*nodes))
    return [len({_core_of(cpu, system) for cpu in node}) for node in nodes]


def default_threads(processes: int = 1) -> int:
    """Compute threads of each of so many processes where nobody names a number: at least 1.

    They share the cores that the affinity mask and `cgroup_cpu_count` leave, and none has more than those of the
    largest NUMA node: threads on two nodes wait for memory across the link.
    """
    nodes = node_core_counts()
    return max(1, min(min(cgroup_cpu_count(), sum(nodes)) // processes, max(nodes)))


def _core_of(cpu: int, system: Path) -> int:
    """The first hardware thread of the CPU's core."""
    return min(_cpu_list(_read_text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")) | {cpu})


def _cpu_list(text: str) -> set[int]:
    """`"0-2,8"` -> {0, 1, 2, 8}."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _cgroup_folders(controller: str, root: Path, membership: Path) -> list[Path]:
    """Folders that may hold this process's limits, from the mount's root down to its own cgroup.

    `controller` is one of v1, or "" for v2. In a container the cgroup's path may be the host's, of which only the root
    is mounted: a folder need not exist.
    """
    folders = [root, root / "unified"] if controller == "" else [root / controller]
    for line in _read_text(membership).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        parts = Path(path.lstrip("/")).parts
        # A path with ".." leads out of what is mounted here.
        if controller in names.split(",") and ".." not in parts:
            mounts = folders if controller == "" else [*folders, root / names]
            own = [mount.joinpath(*parts[:depth]) for mount in mounts for depth in range(1, len(parts) + 1)]
            return list(dict.fromkeys([*mounts, *own]))
    return folders


def _read_text(path: Path) -> str:
    """The file's text without surrounding space; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
