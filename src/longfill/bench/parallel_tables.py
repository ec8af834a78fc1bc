"""Markdown tables of what `bench parallel ... --json` printed.

Imports the other benchmarks' tables. Invariant: made from the values alone, so that a saved file gives them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longfill.bench.tables import table

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


def markdown(values: Mapping[str, Any]) -> str:
    """What was measured and all results."""
    if values["parallel"] == "balance":
        return "\n".join(_balance_lines(values))
    machine, results = values["machine"], values["results"]
    load = "" if values["load_average"] is None else f" Load average before: {values['load_average']:.2f}."
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"torch {machine['torch']}, longfill {machine['longfill']}.{load}",
        "",
        f"{values['model']}, {_count(values['threads'], 'thread')} a rank. {_what(values)} Fastest of "
        f"{_count(values['repeats'], 'run')}; by repeat: the median of the ratio within each.",
        "",
        *_scaling(values["machine_scaling"]),
        *table(*(_prefills if values["parallel"] == "prefill" else _decodes)(results), names=1),
        "",
        "Seconds of the first rank by part; `wait`, for other ranks, is in the others."
        if values["parallel"] == "prefill"
        else "Milliseconds of the first rank for a token, by part; `wait`, for other ranks, is in the others.",
        "",
        *table(*_stages(results, per_step=values["parallel"] == "decode"), names=1),
    ]
    if any(result["comm"] for result in results):
        lines += ["", "Bytes that the first rank sent, by what they were:", "", *_comm(results)]
    return "\n".join(lines)


def _scaling(scaling: Mapping[str, Any] | None) -> list[str]:
    if scaling is None:
        return []
    rates, spread = scaling["one_thread_flops_per_s"], scaling["all_math"]
    return [
        f"{scaling['threads']} threads of this machine do {scaling['math']:.2f} times the multiply-adds of one "
        f"({min(spread):.2f} to {max(spread):.2f}) and read {scaling['read']:.2f} times the bytes; one does "
        f"{min(rates) / 1e9:,.0f} to {max(rates) / 1e9:,.0f} GFLOP/s.",
        "",
    ]


def _what(values: Mapping[str, Any]) -> str:
    if values["parallel"] == "decode":
        return (
            f"{_count(values['decoded'], 'token')} behind a context of {values['context']:,} that is filled in, not "
            "computed; the median time between two of them."
        )
    chunk = f"Prompts in steps of {values['chunk']:,} tokens"
    measured = values["tokens_measured"]
    if measured is None:
        return f"{chunk}, computed whole."
    return f"{chunk}. **Only the last {measured:,} tokens are computed and timed**; those before them are filled in."


def _prefills(results: Sequence[Mapping[str, Any]]) -> Rows:
    head = (
        "layout", "tokens", "ranks", "seconds", "tokens/s", "times one rank", "by repeat", "det over plain",
        "waited, s", "sent, MB", "pairs, most over least", "bits of one rank",
    )  # fmt: skip
    return head, [
        (
            f"`{result['layout']}`",
            f"{result['length']:,}",
            str(result["ranks"]),
            f"{result['seconds']:,.2f}",
            f"{result['tokens_per_s']:,.0f}",
            _or_dash(result["ratio"], ".2f"),
            _or_dash(result["paired_ratio"], ".2f"),
            _or_dash(result["deterministic_cost"], ".2f"),
            f"{result['wait_seconds']:,.2f}",
            f"{sum(result['comm'].values()) / 1e6:,.1f}",
            _most_over_least(result["rank_scored_pairs"]),
            sameness(result),
        )
        for result in results
    ]


def _decodes(results: Sequence[Mapping[str, Any]]) -> Rows:
    head = (
        "layout", "ranks", "a token, ms", "tokens/s", "times one rank", "by repeat", "det over plain", "waited, ms",
        "sent, KB", "bits of one rank",
    )  # fmt: skip
    return head, [
        (
            f"`{result['layout']}`",
            str(result["ranks"]),
            f"{1e3 * result['seconds']:,.2f}",
            f"{result['tokens_per_s']:,.1f}",
            _or_dash(result["ratio"], ".2f"),
            _or_dash(result["paired_ratio"], ".2f"),
            _or_dash(result["deterministic_cost"], ".2f"),
            f"{1e3 * result['wait_seconds'] / result['steps']:,.2f}",
            f"{sum(result['comm'].values()) / result['steps'] / 1e3:,.1f}",
            sameness(result),
        )
        for result in results
    ]


def _stages(results: Sequence[Mapping[str, Any]], *, per_step: bool) -> Rows:
    names = list(dict.fromkeys(name for result in results for name in result["stage_seconds"]))
    parts = [*(name for name in names if name not in ("step", "compute", "wait")), "wait"]
    rows = []
    for result in results:
        unit = 1e3 / result["steps"] if per_step else 1.0
        own = [f"{unit * result['stage_seconds'].get(name, 0.0):,.2f}" for name in parts]
        rows.append([f"`{result['layout']}`", *([] if per_step else [f"{result['length']:,}"]), *own])
    return ["layout", *([] if per_step else ["tokens"]), *parts], rows


def _comm(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        sent = sorted(result["comm"].items(), key=lambda item: -item[1])
        if sent:
            parts = ", ".join(f"{what} {size:,}" for what, size in sent)
            steps = _count(result["steps"], "step")
            lines.append(f"- `{result['layout']}`, {result['length']:,} tokens, {steps}: {parts}")
    return lines


def _balance_lines(values: Mapping[str, Any]) -> list[str]:
    head = (
        "split",
        "ranks",
        "pairs of a rank, millions",
        "most over least",
        "gain at most",
        "in the first step",
        "least",
    )
    rows = [
        (
            result["split"],
            str(result["ranks"]),
            " ".join(f"{pairs / 1e6:,.1f}" for pairs in result["rank_pairs"]),
            f"{result['most_over_least']:.4f}",
            f"{result['speedup']:.2f}",
            f"{result['chunk_speedups'][0]:.2f}",
            f"{min(result['chunk_speedups']):.2f}",
        )
        for result in values["results"]
    ]
    return [
        f"A prompt of {values['length']:,} tokens in steps of {values['chunk']:,}, top-k {values['topk']:,}: pairs "
        "that the indexer scores in a layer, and by what factor ranks can make that faster at most: over the prompt, "
        "where every step waits for its slowest rank, in the first step and in the worst one. From the plans alone.",
        "",
        *table(head, rows, names=1),
    ]


def sameness(result: Mapping[str, Any]) -> str:
    """Whether a layout gave what one rank gives, in a word or two."""
    if result["same_bits"] is None:
        return "-"
    return "same" if result["same_bits"] else "same tokens" if result["same_tokens"] else "other tokens"


def _most_over_least(pairs: Sequence[int]) -> str:
    return f"{max(pairs) / min(pairs):.4f}" if pairs and min(pairs) else "-"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
