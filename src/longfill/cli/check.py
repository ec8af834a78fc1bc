"""`longfill check`: does sparse attention equal dense attention on this machine, and which kernel paths run.

Imports the session. Invariant: wherever top-k is no shorter than the context, every attention path, in one piece, in
chunks and while decoding, gives what dense attention gives, and a native indexer gives what the reference gives; a
difference ends with exit code 1.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longfill.cli.console import print_json, stderr, stdout
from longfill.cli.flags import JsonFlag, engine_flags
from longfill.cli.session import load_engine, show_kernels
from longfill.config import EngineArgs
from longfill.request import CompletionOutput, SamplingParams

if TYPE_CHECKING:
    from longfill.models.config import ModelConfig

SHORT_PROMPT = 64
LONG_PROMPT = 256
CHUNK = 48
DECODED = 8
RAISED_TOPK = LONG_PROMPT + DECODED
LOWERED_TOPK = 32
"""Few enough for most rows of the longer prompt to be scored, so that the indexer's kernels meet."""
COMPARED_TOKENS = 20
"""Most likely tokens whose log-probabilities are compared at each position."""

FLOAT32_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 0.25
"""Largest difference of log-probabilities, in nats, when activations or the cache are 16 bits wide or less."""


@dataclass(frozen=True)
class Case:
    """One prompt, run dense first; each variant must agree with that run."""

    name: str
    prompt_tokens: int
    max_tokens: int
    engine: EngineArgs
    variants: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Comparison:
    """One variant against the dense run of its case."""

    case: str
    variant: str
    prompt_tokens: int
    index_topk: int | None
    max_difference: float
    """Largest difference of a log-probability, in nats; infinite where the runs choose apart beyond a near tie."""
    tolerance: float
    kernel_paths: dict[str, str]

    @property
    def ok(self) -> bool:
        return self.max_difference <= self.tolerance  # NaN is not


@engine_flags()
def check(engine: EngineArgs, as_json: JsonFlag = False) -> int:
    """Compare sparse with dense attention, and native with reference kernels, on this machine; exit code 1 if they
    differ.

    --max-model-len, --attention-path, --sparse-mla-force-mqa and (in chunks) --max-num-batched-tokens are set by the
    check itself.
    """
    base = dataclasses.replace(
        engine,
        max_model_len=LONG_PROMPT + DECODED,
        max_num_batched_tokens=LONG_PROMPT,
        attention_path="auto",
        sparse_mla_force_mqa=False,
    )
    llm = load_engine(base)
    model, topk, paths = llm.model_name, _topk(llm.model_config), dict(llm.kernel_paths)
    show_kernels(paths, stderr())
    del llm
    gc.collect()
    native = paths.get("index_topk", "").startswith("native")
    comparisons = [comparison for case in cases(base, topk, native=native) for comparison in compare_case(case)]
    ok = all(comparison.ok for comparison in comparisons)
    if as_json:
        rows = [dataclasses.asdict(comparison) | {"ok": comparison.ok} for comparison in comparisons]
        print_json({"model": model, "ok": ok, "kernel_paths": paths, "comparisons": rows})
    else:
        _show(model, comparisons, ok, stdout())
    return 0 if ok else 1


def cases(base: EngineArgs, topk: int | None, *, native: bool) -> list[Case]:
    """What is compared: a short prompt as configured, a longer one with top-k raised above its length, and, where the
    indexer runs natively, one with a small top-k against the reference kernels."""
    sparse = {"sparse_mla_force_mqa": True}
    paged = ("sparse, paged", {**sparse, "attention_path": "paged"})
    workspace = ("sparse, workspace", {**sparse, "attention_path": "workspace"})
    chunks = {"max_num_batched_tokens": CHUNK}
    if topk is None:
        return [Case("no indexer", LONG_PROMPT, DECODED, base, ((f"dense, steps of {CHUNK} tokens", chunks),))]
    raised = _with_topk(base, max(topk, RAISED_TOPK))
    in_chunks = (f"{paged[0]}, steps of {CHUNK} tokens", {**paged[1], **chunks})
    found = [
        Case("as configured", min(SHORT_PROMPT, topk), 1, base, (paged, workspace)),
        Case("top-k raised", LONG_PROMPT, DECODED, raised, (paged, workspace, in_chunks)),
    ]
    if native:
        # In float32: rounding to bfloat16 would make keys score apart that are no near ties.
        lowered = dataclasses.replace(
            _with_topk(base, min(topk, LOWERED_TOPK)),
            kernel_backend="reference",
            dtype="float32",
            kv_cache_dtype="float32",
            indexer_cache_dtype="fp8",
        )
        variant = ("native against reference, float32", {"kernel_backend": "cpu"})
        found.append(Case("top-k lowered", LONG_PROMPT, DECODED, lowered, (variant,)))
    return found


def _with_topk(engine: EngineArgs, topk: int) -> EngineArgs:
    return dataclasses.replace(engine, hf_overrides={**(engine.hf_overrides or {}), "index_topk": topk})


def compare_case(case: Case) -> list[Comparison]:
    """Runs the case dense and in each variant, one engine after the other."""
    reference = _run(case.engine, case)
    comparisons = []
    for name, changes in case.variants:
        variant = _run(dataclasses.replace(case.engine, **changes), case)
        comparisons.append(
            Comparison(
                case=case.name,
                variant=name,
                prompt_tokens=case.prompt_tokens,
                index_topk=variant.index_topk,
                max_difference=difference(reference.completion, variant.completion, variant.tolerance),
                tolerance=variant.tolerance,
                kernel_paths=variant.kernel_paths,
            )
        )
    return comparisons


def difference(reference: CompletionOutput, other: CompletionOutput, tolerance: float) -> float:
    """Largest difference between two greedy runs' log-probabilities, in nats, as far as they read the same tokens.

    Where they choose apart, the choice must be a near tie in the reference; what comes after it is not compared.
    """
    steps = zip(reference.token_ids, reference.logprobs or [], other.token_ids, other.logprobs or [], strict=True)
    worst, compared = 0.0, False
    for token, expected, other_token, got in steps:
        for shared in expected.keys() & got.keys():
            one, two = expected[shared].logprob, got[shared].logprob
            gap = 0.0 if one == two else abs(one - two)  # both may be minus infinity
            if math.isnan(gap):
                return math.nan
            worst, compared = max(worst, gap), True
        if token != other_token:
            tied = other_token in expected and expected[token].logprob - expected[other_token].logprob <= 2 * tolerance
            return worst if tied else math.inf
    return worst if compared else math.inf


@dataclass(frozen=True)
class _Run:
    completion: CompletionOutput
    index_topk: int | None
    tolerance: float
    kernel_paths: dict[str, str]


def _run(engine: EngineArgs, case: Case) -> _Run:
    llm = load_engine(engine)
    config = llm.model_config
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, case.prompt_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=case.max_tokens, ignore_eos=True, logprobs=COMPARED_TOKENS)
    [output] = llm.generate([prompt.tolist()], params)
    run = _Run(
        completion=output.outputs[0],
        index_topk=_topk(config),
        tolerance=_tolerance(engine, config),
        kernel_paths=dict(llm.kernel_paths),
    )
    del llm
    gc.collect()  # the next engine must find this one's memory free
    return run


def _topk(config: ModelConfig) -> int | None:
    return None if config.indexer is None else config.indexer.topk


def _tolerance(engine: EngineArgs, config: ModelConfig) -> float:
    exact = config.dtype == "float32" and engine.kv_cache_dtype in ("auto", "float32")
    return FLOAT32_TOLERANCE if exact else ROUNDED_TOLERANCE


def _show(model: str, comparisons: list[Comparison], ok: bool, console: Console) -> None:
    title = f"{escape(model)}: sparse against dense, native against reference"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("case", "variant", "prompt", "top-k", "difference", "allowed", ""):
        table.add_column(column)
    for row in comparisons:
        table.add_row(
            row.case,
            row.variant,
            f"{row.prompt_tokens:,}",
            "-" if row.index_topk is None else f"{row.index_topk:,}",
            f"{row.max_difference:.2g}",
            f"{row.tolerance:.2g}",
            "[green]equal[/]" if row.ok else "[bold red]DIFFERENT[/]",
        )
    console.print(table)
    console.print("[green]OK[/]" if ok else "[bold red]MISMATCH[/]: do not trust this model on this machine")
