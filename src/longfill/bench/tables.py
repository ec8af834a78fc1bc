"""Markdown tables from what `bench ... --json` printed, for `docs/performance.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longfill.bench.prefill_plot import label

GIB = 2**30


def markdown(values: Mapping[str, Any]) -> str:
    """The machine, what was measured and all results, of any of the benchmarks."""
    machine = values["machine"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB; "
        f"torch {machine['torch']}, longfill {machine['longfill']}.",
        "",
    ]
    if "kernels" in values:
        lines += table(*_ceilings(values["ceilings"]))
        for threads in dict.fromkeys(case["threads"] for case in values["kernels"]):
            own = [case for case in values["kernels"] if case["threads"] == threads]
            lines += ["", f"{threads} thread{'s' if threads > 1 else ''}:", "", *table(*_kernels(own), names=2)]
    elif "decodes" in values:
        lines += _decode_lines(values)
    else:
        lines += [f"{values['model']}, {values['threads']} threads:", "", *table(*_prefills(values["results"]))]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 0) -> list[str]:
    """Columns padded to one width, so that the text reads well as it is; all but the first `names` to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = (
            f"{cell:<{w}}" if i < names else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(f"| {' | '.join(cells)} |")
    marks = "|".join("-" * (width + 1) + ("-" if i < names else ":") for i, width in enumerate(widths))
    return [lines[0], f"|{marks}|", *lines[1:]]


def _ceilings(ceilings: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    head = ("threads", "bf16, GFLOP/s", "fp32, GFLOP/s", "read, GB/s", "copy, GB/s")
    rows = [
        (str(roofs["threads"]), *(f"{roofs[name] / 1e9:,.0f}" for name in ("bf16", "fp32", "read", "copy")))
        for roofs in ceilings
    ]
    return head, rows


def _kernels(cases: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    head = ("kernel", "case", "time, ms", "each", "rate", "of the ceiling", "times torch")
    return head, [
        (
            f"`{case['kernel']}`",
            case["case"],
            f"{case['seconds'] * 1e3:,.2f}",
            f"{nanoseconds(case['ns_per_item'])}/{case['item']}",
            rate(case),
            f"{case['of_ceiling']:.2f} of {case['limit']}",
            "-" if case["torch_ratio"] is None else f"{case['torch_ratio']:.1f}",
        )
        for case in cases
    ]


def nanoseconds(value: float) -> str:
    """`0.4321` -> `0.43 ns`, `12345` -> `12.3 us`."""
    if value >= 1e6:
        return f"{value / 1e6:,.2f} ms"
    return f"{value / 1e3:,.1f} us" if value >= 1e3 else f"{value:.2f} ns"


def rate(case: Mapping[str, Any]) -> str:
    """What a kernel case reached, in the unit of the ceiling that binds it."""
    if case["limit"] in ("read", "copy"):
        return f"{case['bytes_per_s'] / 1e9:,.1f} GB/s"
    return f"{case['flops_per_s'] / 1e9:,.0f} GFLOP/s"


def _prefills(results: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """A row a length: tokens/s and peak memory of each engine, and longfill's ratio and share of the peak."""
    names = list(dict.fromkeys(label(result) for result in results))
    head = ["length", *(f"{name}: tokens/s (GiB)" for name in names), "times transformers", "share of peak"]
    rows = []
    for length in dict.fromkeys(result["length"] for result in results):
        own = {label(result): result for result in results if result["length"] == length}
        first = own[names[0]]
        share = first["figures"].get("share_of_peak")
        rows.append(
            [
                f"{length:,}",
                *(speed(own[name]) if name in own else "-" for name in names),
                "-" if first["ratio"] is None else f"{first['ratio']:.1f}",
                "-" if share is None else f"{share:.2f}",
            ]
        )
    return head, rows


def speed(result: Mapping[str, Any]) -> str:
    """Tokens a second with peak memory in GiB, or why there are none."""
    if result["status"] != "ok":
        return str(result["status"])
    peak = result["peak_rss_bytes"]
    return f"{result['tokens_per_s']:,.0f}" + (f" ({peak / GIB:.1f})" if peak else "")


def _decode_lines(values: Mapping[str, Any]) -> list[str]:
    """What was said to be continued, a row a setting, and how often drafts were right."""
    rounds = "" if values["rounds"] == 1 else f", {values['rounds']} rounds"
    threads = f"{values['threads']} thread{'s' if values['threads'] > 1 else ''}"
    return [
        f"{values['model']}, {threads}. Text: {values['description']}. {values['prompts']} prompts of "
        f"{values['context']:,} tokens side by side{rounds}, at most {values['max_tokens']:,} tokens each, temperature "
        f"{values['temperature']:g}. All settings said the same tokens.",
        "",
        *table(*_decodes(values["decodes"])),
    ]


def _decodes(results: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    head = (
        "in flight", "drafts", "steps", "tokens", "tokens/s", "ratio", "step, ms", "model, ms", "host, ms", "hidden",
        "idle, ms", "tokens a draft step", "accepted by position",
    )  # fmt: skip
    rows = []
    for result in results:
        each, acceptance = result["per_step"], result["acceptance"]
        rows.append(
            [
                *(f"{result[name]:,}" for name in ("depth", "drafts", "steps", "tokens")),
                f"{result['tokens_per_s']:,.0f}",
                _or_dash(result["ratio"], ".2f"),
                *(f"{1e3 * each[name]:.2f}" for name in ("step", "compute", "host")),
                f"{each['hidden']:.0%}",
                f"{1e3 * each['idle']:.2f}",
                _or_dash(acceptance["mean_length"], ".2f"),
                " ".join(f"{share:.2f}" for share in acceptance["per_position"]) or "-",
            ]
        )
    return head, rows


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
