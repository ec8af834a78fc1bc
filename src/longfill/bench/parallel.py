"""`bench parallel prefill` and `decode`: the same prompt on several layouts of ranks, each in an engine of its own.

May import the engine. Invariant: within a length all layouts get the same token ids, the same contents of the cache and
the same number of threads a rank, and a layout that cannot run is refused before any is measured.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from longfill import compatibility
from longfill.bench.parallel_fill import filled_engine
from longfill.bench.parallel_layout import Layout
from longfill.bench.prefill import prompt
from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.engine.stats import StepStats
from longfill.errors import CapacityError, ConfigError, LongfillError
from longfill.models.config import ModelConfig
from longfill.models.shards import check_heads
from longfill.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams, TokenIds

WARM_UP_TOKENS = 256
Amount = TypeVar("Amount", int, float)


@dataclass(frozen=True)
class ParallelPlan:
    """What is measured: of prompts of so many tokens the prefill, or what is decoded behind it."""

    engine: EngineArgs
    layouts: tuple[Layout, ...]
    lengths: tuple[int, ...]
    measured: int | None = None
    """Last tokens of each prompt that are computed; those before them are filled in. None: everything is computed."""
    decoded: int = 0
    """Tokens behind the first one, which are timed instead of the prompt; 0 is a prefill."""
    repeats: int = 1

    def filled(self, length: int) -> int:
        """Tokens of a prompt of that length that are not computed."""
        return 0 if self.measured is None else length - self.measured

    def engine_args(self, layout: Layout, length: int) -> EngineArgs:
        """Pages for one such prompt and what follows it, and for the warm-up, which is to evict nothing."""
        args = dataclasses.replace(
            self.engine,
            skip_tokenizer_init=True,
            num_threads=self.engine.num_threads or 1,
            max_num_seqs=2,
            max_model_len=length + 1 + self.decoded,
            enable_prefix_caching=self.measured is not None,
            digest=True,
        )
        return layout.engine(args)


@dataclass
class Run:
    """One run of one layout."""

    seconds: float
    """From the prompt's arrival to its first token; in a decode the median between two tokens."""
    steps: int
    """That were timed; the sums below are over them."""
    stage_seconds: dict[str, float]
    """The first rank's, by stage; "wait" is a part of the others."""
    comm: dict[str, int]
    """Bytes that the first rank sent, by what they were."""
    rank_scored_pairs: tuple[int, ...]
    token_ids: tuple[int, ...]
    digest: str | None


@dataclass
class ParallelResult:
    """One layout at one length; times are of its fastest run."""

    layout: Layout
    length: int
    filled: int
    decoded: int
    runs: list[Run] = field(default_factory=list)
    ratio: float | None = None
    """Time of one rank over this one's; None where one rank was not measured."""
    paired_ratio: float | None = None
    """The median of the same ratio within each repeat: what a machine that is not steady disturbs less."""
    deterministic_cost: float | None = None
    """Of a deterministic layout: its time over that of the same ranks without."""
    same_tokens: bool | None = None
    same_bits: bool | None = None
    """Whether it said the tokens, and gave the logits, of one rank that is deterministic or not as this is."""

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.seconds)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        best = self.best
        return {
            "layout": self.layout.name,
            "ranks": self.layout.ranks,
            "length": self.length,
            "filled": self.filled,
            "decoded": self.decoded,
            "steps": best.steps,
            "seconds": best.seconds,
            "runs": [run.seconds for run in self.runs],
            "tokens_per_s": 1 / best.seconds if self.decoded else (self.length - self.filled) / best.seconds,
            "ratio": self.ratio,
            "paired_ratio": self.paired_ratio,
            "deterministic_cost": self.deterministic_cost,
            "stage_seconds": best.stage_seconds,
            "wait_seconds": best.stage_seconds.get("wait", 0.0),
            "comm": best.comm,
            "rank_scored_pairs": list(best.rank_scored_pairs),
            "same_tokens": self.same_tokens,
            "same_bits": self.same_bits,
        }


OnRun = Callable[[Layout, int, Run], None]


def check_plan(plan: ParallelPlan, model: ModelConfig) -> None:
    """Raise ConfigError for a length or a layout that cannot run, before any is measured."""
    for length, layout in itertools.product(plan.lengths, plan.layouts):
        needed, filled = length + 1 + plan.decoded, plan.filled(length)
        if needed > model.max_position_embeddings:
            raise ConfigError(
                f"a prompt of {length:,} tokens and {1 + plan.decoded} behind it are more than the model's "
                f"{model.max_position_embeddings:,} positions"
            )
        if plan.measured is not None and filled < 0:
            raise ConfigError(f"of {length:,} tokens {plan.measured:,} cannot be measured; measure fewer")
        args = plan.engine_args(layout, length)
        compatibility.check(args, model)
        check_heads(model.num_heads, args.tensor_parallel_size)
        unit = args.block_size * layout.page_factor
        if filled % unit:
            raise ConfigError(
                f"{layout.name}: a context of {filled:,} tokens is filled in by whole pages, which hold {unit:,}; give "
                "a multiple of that"
            )


def run_layouts(plan: ParallelPlan, on_run: OnRun, before_run: Callable[[], None]) -> Iterator[ParallelResult]:
    """Yield a result for every layout at every length; `on_run` gets each run as it is done.

    Every repeat goes through all layouts, so that a busy moment of the machine does not fall on one alone.
    """
    vocab_size = ModelConfig.from_folder(plan.engine.model, plan.engine.hf_overrides).vocab_size
    for length in plan.lengths:
        token_ids = np.array(prompt(length, vocab_size, plan.engine.seed), dtype=np.int64)
        other_ids = np.array(prompt(min(length, WARM_UP_TOKENS), vocab_size, plan.engine.seed + 1), dtype=np.int64)
        results = [ParallelResult(layout, length, plan.filled(length), plan.decoded) for layout in plan.layouts]
        for _ in range(plan.repeats):
            for result in results:
                before_run()
                run = _measure(plan, result.layout, token_ids, other_ids)
                result.runs.append(run)
                on_run(result.layout, length, run)
        _compare(results)
        yield from results


def _measure(plan: ParallelPlan, layout: Layout, token_ids: TokenIds, other_ids: TokenIds) -> Run:
    """One run in an engine of its own, whose ranks are gone before the next."""
    filled = plan.filled(token_ids.size)
    engine = filled_engine(plan.engine_args(layout, token_ids.size), token_ids[:filled], plan.engine.seed)
    try:
        for _ in _generate(engine, other_ids, 2):
            pass
        began = time.perf_counter()
        steps = list(_generate(engine, token_ids, 1 + plan.decoded))
        output = steps[-1][2]
        assert output is not None, "the last step ends the prompt"
        _check(output, filled)
        return _run(began, steps, output, decoded=plan.decoded > 0)
    finally:
        engine.close()
        del engine
        gc.collect()


def _generate(
    engine: LLMEngine, token_ids: TokenIds, max_tokens: int
) -> Iterator[tuple[float, StepStats, RequestOutput | None]]:
    """Run a prompt alone: when each step was done, what it counted, and the output once there is one."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engine.add_request("measured", token_ids, params)
    while engine.has_unfinished_requests:
        outputs = engine.step()
        if engine.last_step is None:
            raise CapacityError("the prompt cannot be scheduled; raise --memory-budget")
        yield time.perf_counter(), engine.last_step, outputs[0] if outputs else None


def _check(output: RequestOutput, filled: int) -> None:
    """Raise LongfillError for an output that says nothing about the time it took."""
    if output.outputs[0].finish_reason == FinishReason.ERROR:
        raise LongfillError(f"the prompt failed: {output.outputs[0].stop_reason}")
    if output.num_cached_tokens != filled:
        raise LongfillError(
            f"of {filled:,} tokens that were filled in {output.num_cached_tokens:,} were found; raise --memory-budget"
        )


def _run(
    began: float,
    steps: Sequence[tuple[float, StepStats, RequestOutput | None]],
    output: RequestOutput,
    *,
    decoded: bool,
) -> Run:
    """Sum up a run: all of its steps, or in a decode those behind the one that gave the first token."""
    ends = [end for end, _, _ in steps]
    counted = [step for _, step, _ in steps]
    seconds = ends[-1] - began
    if decoded:
        counted = counted[1:]
        seconds = statistics.median(end - before for before, end in itertools.pairwise(ends))
    return Run(
        seconds=seconds,
        steps=len(counted),
        stage_seconds=_sum([step.seconds for step in counted]),
        comm=_sum([step.comm for step in counted]),
        rank_scored_pairs=tuple(sum(pairs) for pairs in zip(*(s.rank_scored_pairs for s in counted), strict=True)),
        token_ids=tuple(output.outputs[0].token_ids),
        digest=output.digest,
    )


def _sum(parts: Sequence[dict[str, Amount]]) -> dict[str, Amount]:
    total: dict[str, Amount] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def _compare(results: Sequence[ParallelResult]) -> None:
    """Hold the layouts of one length against one rank, and deterministic ones against the same without."""

    def find(knobs: dict[str, Any]) -> ParallelResult | None:
        return next((result for result in results if result.layout.knobs == knobs), None)

    one = find({})
    for result in results:
        layout = result.layout
        if one is not None:
            result.ratio = one.best.seconds / result.best.seconds
            pairs = zip(one.runs, result.runs, strict=True)
            result.paired_ratio = statistics.median(first.seconds / own.seconds for first, own in pairs)
        plain = find(layout.plain_knobs) if layout.deterministic else None
        if plain is not None:
            result.deterministic_cost = result.best.seconds / plain.best.seconds
        alike = find(layout.one_rank_knobs)
        if alike is not None and alike is not result:
            result.same_tokens = all(run.token_ids == alike.best.token_ids for run in result.runs)
            result.same_bits = all(run.digest == alike.best.digest for run in result.runs)
