"""Which machine and which software a measurement was taken on. May import torch and the kernels' description."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from longfill import __version__
from longfill.host import cgroup_memory_limit, default_threads
from longfill.kernels.cpu import isa_names

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and versions, as `--json` prints them."""
    return {
        "processor": processor_name(),
        "cores": default_threads(),
        "memory_bytes": cgroup_memory_limit(),
        "instruction_sets": list(isa_names()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "longfill": __version__,
    }


def processor_name(source: Path = CPU_INFO) -> str:
    """The processor as Linux names it, with family and model; else what Python knows."""
    try:
        lines = source.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{field} {fields[field]}" for field in ("cpu family", "model") if field in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name
