"""`bench kernels`: every case against the ceilings of the same minute, and against torch.

May import the cases. Invariant: a case's ceiling is measured right before and right after it, and the better counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from longfill.bench import cases_attention, cases_index, cases_linear, cases_needle, cases_rows
from longfill.bench.ceilings import Ceiling, Ceilings, Machine, Math, Traffic
from longfill.bench.timing import measure
from longfill.bench.work import Case, Setting, Work
from longfill.errors import ConfigError

CASES: tuple[Case, ...] = (
    *cases_index.CASES,
    *cases_needle.CASES,
    *cases_attention.CASES,
    *cases_linear.CASES,
    *cases_rows.CASES,
)


@dataclass(frozen=True)
class KernelResult:
    """One case as measured. Rates are of the best call."""

    kernel: str
    case: str
    isa: str
    threads: int
    math: Math
    seconds: float
    median_seconds: float
    runs: int
    ns_per_item: float
    item: str
    flops: float
    bytes: float
    flops_per_s: float
    bytes_per_s: float
    intensity: float
    """FLOP a byte that must cross memory."""
    limit: Ceiling
    """The ceiling that binds, by the roofline."""
    ceiling: float
    """In FLOP/s, or in bytes/s where memory binds."""
    of_ceiling: float
    torch_seconds: float | None
    torch_ratio: float | None
    """How many times as long torch takes; None where it was not asked."""
    torch_formulation: str


def choose_cases(kernels: Sequence[str], name_contains: str = "") -> list[Case]:
    """The cases of the kernels named (all without a name). Raises ConfigError for a name that none has."""
    known = list(dict.fromkeys(case.kernel for case in CASES))
    unknown = [name for name in kernels if name not in known]
    if unknown:
        raise ConfigError(f"--kernel {unknown[0]}: there is no such kernel; choose from {', '.join(known)}")
    chosen = [case for case in CASES if (not kernels or case.kernel in kernels) and name_contains in case.name]
    if not chosen:
        raise ConfigError(f"--case {name_contains}: no case has that in its name")
    return chosen


def run_cases(
    cases: Iterable[Case],
    machine: Machine,
    ceilings: Ceilings,
    *,
    repeats: int,
    shrink: int = 1,
    with_torch: bool = True,
    on_result: Callable[[KernelResult], None] = lambda _: None,
) -> list[KernelResult]:
    """Measure the cases one after the other; only one's inputs exist at a time."""
    setting = Setting(machine.isa, machine.threads, shrink)
    results = []
    for case in cases:
        results.append(_run(case, setting, machine, ceilings, repeats, with_torch))
        on_result(results[-1])
        gc.collect()
    return results


def _run(
    case: Case, setting: Setting, machine: Machine, ceilings: Ceilings, repeats: int, with_torch: bool
) -> KernelResult:
    # The threads of torch, which wait in loops for a while, must not run beside a native kernel.
    torch.set_num_threads(1)
    work = case.make(setting)
    limit = binding_ceiling(work, ceilings)
    before = machine.measure(limit)
    timing = measure(work.call, repeats, machine.clock)
    ceiling = max(before, machine.measure(limit))
    amount = work.flops if limit == work.math else work.bytes
    torch_seconds = None
    if with_torch:
        torch.set_num_threads(setting.threads)
        with torch.inference_mode():
            torch_seconds = measure(work.torch.call, repeats, machine.clock).best
    return KernelResult(
        kernel=case.kernel,
        case=case.name,
        isa=setting.isa,
        threads=setting.threads,
        math=work.math,
        seconds=timing.best,
        median_seconds=timing.median,
        runs=timing.runs,
        ns_per_item=timing.best / work.items * 1e9,
        item=work.item,
        flops=work.flops,
        bytes=work.bytes,
        flops_per_s=work.flops / timing.best,
        bytes_per_s=work.bytes / timing.best,
        intensity=work.flops / work.bytes,
        limit=limit,
        ceiling=ceiling,
        of_ceiling=amount / timing.best / ceiling,
        torch_seconds=torch_seconds,
        torch_ratio=None if torch_seconds is None else torch_seconds / timing.best,
        torch_formulation=work.torch.note,
    )


def binding_ceiling(work: Work, ceilings: Ceilings) -> Math | Traffic:
    """What takes longer at the machine's best: the arithmetic, or moving the bytes."""
    arithmetic = work.flops / ceilings.of(work.math)
    return work.math if arithmetic >= work.bytes / ceilings.of(work.traffic) else work.traffic
