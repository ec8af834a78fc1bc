"""Speed of the native `index_topk`, top-k included, against the machine's own ceiling measured in the same run.

The ceiling is the multiply-add instruction of the chosen instruction set running from registers. Ratios carry over
between machines and between quiet and busy moments; absolute numbers do not.

    python benchmarks/index_topk.py --threads 1 --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from longfill.kernels.cpu import ScreenCounts, _native, index_topk, scratch_bytes, selected_isa
from longfill.kernels.interface import IndexCache, RequestRows, ScoredRows
from longfill.kernels.reference.quant import quantise_index_keys, quantise_index_queries

PAGE_SIZE = 64


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    dim: int
    topk: int
    rows: int
    keys: int
    data: str = "random"


CASES = (
    Case("glm-5 prefill", 32, 128, 2048, 64, 131_072),
    Case("glm-5 decode", 32, 128, 2048, 1, 131_072),
    Case("bundled prefill", 2, 64, 64, 2048, 131_072),
    Case("bundled prefill, short", 2, 64, 64, 2048, 8_192),
    Case("bundled prefill, ascending scores", 2, 64, 64, 2048, 65_536, "ascending"),
    Case("bundled prefill, 90% zeros", 2, 64, 64, 2048, 65_536, "zeros"),
    Case("bundled decode", 2, 64, 64, 1, 131_072),
    Case("4 heads x 32 prefill", 4, 32, 64, 2048, 65_536),
    Case("glm-5 prefill, ascending scores", 32, 128, 2048, 64, 65_536, "ascending"),
)


def make_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, IndexCache, list[list[ScoredRows]]]:
    torch.manual_seed(0)
    k_LD = torch.randn(case.keys, case.dim)
    q_TID = torch.randn(case.rows, case.heads, case.dim)
    if case.data == "ascending":
        k_LD[:] = torch.linspace(0.01, 1.0, case.keys)[:, None]
        q_TID = q_TID.abs()
    elif case.data == "zeros":
        k_LD[torch.rand(case.keys) < 0.9] = 0.0
    q_TID, w_TI = quantise_index_queries(q_TID, torch.rand(case.rows, case.heads))
    values, scales = quantise_index_keys(k_LD)
    num_pages = -(-case.keys // PAGE_SIZE)
    cache = IndexCache(values.view(num_pages, PAGE_SIZE, case.dim), scales.view(num_pages, PAGE_SIZE), "fp8", case.dim)
    start = case.keys - case.rows
    request = RequestRows(0, case.rows, start, torch.arange(num_pages))
    return q_TID, w_TI, cache, [[ScoredRows(request, 0, case.rows, start)]]


def _processor_seconds(threads: int) -> float:
    return time.process_time() / threads


def best_seconds(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = clock()
        call()
        best = min(best, clock() - begin)
    return best


def peak_flops(isa: str, threads: int, repeats: int, clock: Callable[[], float]) -> float:
    """FLOP/s of `threads` threads that do nothing but multiply-adds in registers."""
    iterations = 2_000_000
    with ThreadPoolExecutor(threads) as pool:
        flops = sum(pool.map(lambda _: _native.spin(isa, iterations), range(threads)))
        seconds = best_seconds(
            lambda: list(pool.map(lambda _: _native.spin(isa, iterations), range(threads))), repeats, clock
        )
    return flops / seconds


def measure(
    case: Case, isa: str, threads: int, repeats: int, clock: Callable[[], float], screen: str = "off"
) -> dict[str, object]:
    q_TID, w_TI, cache, chunks = make_inputs(case)
    selection_TK = torch.full((case.rows, case.topk), -1, dtype=torch.int32)
    peaks = [peak_flops(isa, threads, repeats, clock)]

    def run() -> ScreenCounts:
        return index_topk(q_TID, w_TI, cache, chunks, selection_TK, num_threads=threads, isa=isa, screen=screen)

    seconds = best_seconds(run, repeats, clock)
    counts = run()
    peaks.append(peak_flops(isa, threads, repeats, clock))
    scores = case.rows * (case.keys - case.rows) + case.rows * (case.rows + 1) // 2
    flops = 2 * scores * case.heads * case.dim
    return {
        "case": case.name,
        "heads": case.heads,
        "dim": case.dim,
        "topk": case.topk,
        "rows": case.rows,
        "keys": case.keys,
        "isa": isa,
        "threads": threads,
        "seconds": seconds,
        "ns_per_score": seconds / scores * 1e9,
        "gflops": flops / seconds / 1e9,
        "peak_gflops": max(peaks) / 1e9,
        "of_peak": flops / seconds / max(peaks),
        "screened": counts.screened / counts.pairs,
        "survivors": counts.survivors / max(counts.screened, 1),
        "scratch_bytes": scratch_bytes(
            heads=case.heads, dim=case.dim, topk=case.topk, num_threads=threads, isa=isa, screen=screen
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--isa", default=None, help="one of the machine's instruction sets (default: the best)")
    parser.add_argument("--screen", default="off", choices=("auto", "on", "off"), help="the int8 screen")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time over threads: for a machine shared with others"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # Idle threads of torch would spin beside the first measurement.
    torch.set_num_threads(1)
    isa = args.isa or selected_isa()
    results = []
    for threads in args.threads:
        clock = partial(_processor_seconds, threads) if args.cpu_time else time.perf_counter
        results += [
            measure(case, isa, threads, args.repeats, clock, args.screen) for case in CASES if args.case in case.name
        ]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for r in results:
        print(
            f"{r['case']:36} {r['isa']} x{r['threads']}: {r['seconds'] * 1e3:9.2f} ms"
            f"  {r['ns_per_score']:7.3f} ns/score  {r['gflops']:7.1f} of {r['peak_gflops']:.1f} GFLOP/s"
            f" = {r['of_peak']:.2f}" + (f", {r['survivors']:.4f} survive" if args.screen != "off" else "")
        )


if __name__ == "__main__":
    main()
