"""`bench decode`: the same prompts with other numbers of steps in flight and of drafts, and what each setting gains.

May import the engine. Invariant: every setting must say the same tokens, else there is no result; prompts are in the
prefix cache before anything is timed, so that what is measured is decoding.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longfill.bench.decode_texts import Text, prompts
from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.engine.stats import EngineStats, SpecDecodingStats
from longfill.errors import ConfigError, LongfillError
from longfill.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams, TokenIds

HOST = ("schedule", "update", "plan")
"""Stages of a step that are not the model's: all but the last are done by the host's thread."""


class OutputsDifferError(LongfillError):
    """Two settings of `bench decode` gave other tokens for the same prompt."""


@dataclass(frozen=True, order=True)
class Setting:
    """Steps in flight (1: none is prepared ahead) and drafts of a step."""

    depth: int
    drafts: int

    def __str__(self) -> str:
        return f"{self.depth} in flight with {self.drafts} drafts"

    def engine(self, args: EngineArgs) -> EngineArgs:
        """`args` with this setting."""
        method = {"method": "mtp", "num_speculative_tokens": self.drafts} if self.drafts else None
        return dataclasses.replace(
            args, speculative_config=method, async_scheduling=self.depth > 1, max_concurrent_batches=self.depth
        )


@dataclass(frozen=True)
class DecodePlan:
    """What is measured: `rounds` times `count` prompts of `context` tokens side by side, each round `repeats` times."""

    engine: EngineArgs
    text: Text
    context: int
    count: int
    rounds: int
    repeats: int
    max_tokens: int
    temperature: float
    settings: tuple[Setting, ...]

    def engine_args(self, setting: Setting) -> EngineArgs:
        """Pages for one round's prompts and what they say, the same for every setting."""
        room = max(each.drafts for each in self.settings)
        args = dataclasses.replace(
            self.engine,
            max_num_seqs=self.count,
            enable_prefix_caching=True,
            max_model_len=self.engine.max_model_len or self.context + self.max_tokens + room,
        )
        return setting.engine(args)

    def params(self, number: int) -> SamplingParams:
        """Of a round's prompt: answers end where the model ends them."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.engine.seed + number,
            max_tokens=self.max_tokens,
            ignore_eos=self.text != "answers",
        )


@dataclass
class DecodeResult:
    """One setting. Times are of each round's fastest run, from the moment when all its prompts had a first token."""

    depth: int
    drafts: int
    steps: int = 0
    tokens: int = 0
    """Sampled in those steps."""
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """By stage, as in `StepStats.seconds`."""
    spec: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    """Of all drafts of those runs, the first step's among them."""
    ratio: float | None = None
    """Tokens per second over those of one step in flight without drafts; None where that was not measured."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it: times of one step in seconds. `host` is what schedules, plans and books it, `compute`
        the model, `idle` what the worker waited for, `step` what the step added to the time that passed. What host and
        compute have more than `step` was done at the same time: as a share of host, `hidden`.
        """
        each = {name: total / self.steps for name, total in self.stage_seconds.items()}
        host = sum(each[name] for name in HOST)
        compute = each["compute"] - each["plan"]
        return {
            "depth": self.depth,
            "drafts": self.drafts,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.rate,
            "ratio": self.ratio,
            "per_step": {
                "host": host,
                "compute": compute,
                "idle": each["idle"],
                "step": each["step"],
                "hidden": min(1.0, max(0.0, (host + compute - each["step"]) / host)),
                "stages": each,
            },
            "acceptance": {
                "drafts": self.spec.num_drafts,
                "rate": self.spec.acceptance_rate,
                "mean_length": self.spec.mean_acceptance_length,
                "per_position": self.spec.acceptance_per_position,
            },
        }


@dataclass
class _Run:
    """One run of one round."""

    outputs: list[list[int]]
    steps: int
    tokens: int
    seconds: float
    stage_seconds: dict[str, float]
    spec: SpecDecodingStats

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run_decodes(plan: DecodePlan, on_run: Callable[[Setting, float], None]) -> list[DecodeResult]:
    """A result for every setting; `on_run` gets each run's tokens per second.

    Every repeat goes through all settings, each in an engine of its own that is gone before the next: on a machine
    shared with others a busy moment then does not fall on one setting alone.

    Raises OutputsDifferError where a setting says other tokens than the first.
    """
    best: dict[Setting, list[_Run]] = {}
    for _ in range(plan.repeats):
        for setting in plan.settings:
            runs = _measure(plan, setting)
            on_run(setting, sum(run.tokens for run in runs) / sum(run.seconds for run in runs))
            first = next(iter(best), setting)
            _compare(setting, runs, first, best.get(first, runs))
            best[setting] = [
                max(pair, key=lambda run: run.rate) for pair in zip(runs, best.get(setting, runs), strict=True)
            ]
    results = [_result(setting, runs) for setting, runs in best.items()]
    plain = next((result for result in results if (result.depth, result.drafts) == (1, 0)), None)
    for result in results:
        result.ratio = None if plain is None else result.rate / plain.rate
    return results


def _measure(plan: DecodePlan, setting: Setting) -> list[_Run]:
    """One run of each round."""
    engine = LLMEngine(plan.engine_args(setting))
    try:
        runs = []
        for turn in prompts(
            plan.text, engine.tokenizer, engine.model_config.vocab_size,
            context=plan.context, count=plan.count, rounds=plan.rounds, seed=plan.engine.seed,
        ):  # fmt: skip
            # The second token warms up what decodes.
            _generate(engine, turn, lambda _number: SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            runs.append(_timed(engine, turn, plan.params))
        return runs
    finally:
        engine.close()
        del engine
        gc.collect()


def _result(setting: Setting, runs: Sequence[_Run]) -> DecodeResult:
    result = DecodeResult(setting.depth, setting.drafts)
    for run in runs:
        result.steps += run.steps
        result.tokens += run.tokens
        result.seconds += run.seconds
        result.spec.add(run.spec)
        for stage, seconds in run.stage_seconds.items():
            result.stage_seconds[stage] = result.stage_seconds.get(stage, 0.0) + seconds
    return result


def _timed(engine: LLMEngine, turn: Sequence[TokenIds], params: Callable[[int], SamplingParams]) -> _Run:
    """Generate, and count from the step on that gave the last prompt its first token."""
    start = copy.deepcopy(engine.stats)
    waiting = {str(number): ids.size for number, ids in enumerate(turn)}
    lengths = dict(waiting)
    began, before, sampled = time.perf_counter(), start, 0

    def follow() -> None:
        nonlocal began, before, sampled
        step = engine.last_step
        if not waiting or step is None:
            return
        for name, (_, length) in step.progress.items():
            lengths[name] = length
            if length > turn[int(name)].size:
                waiting.pop(name, None)
        if not waiting:
            sampled = sum(lengths[str(number)] - ids.size for number, ids in enumerate(turn))
            began, before = time.perf_counter(), copy.deepcopy(engine.stats)

    outputs = _generate(engine, turn, params, follow)
    seconds = time.perf_counter() - began
    texts = [output.outputs[0].token_ids for output in outputs]
    if sum(map(len, texts)) == sampled:
        raise ConfigError(
            "all outputs ended in the step that gave the last prompt its first token; ask for longer ones"
        )
    return _Run(
        texts,
        engine.stats.steps - before.steps,
        sum(map(len, texts)) - sampled,
        seconds,
        {stage: total - before.seconds.get(stage, 0.0) for stage, total in engine.stats.seconds.items()},
        _drafted(engine.stats, start),
    )


def _generate(
    engine: LLMEngine,
    turn: Sequence[TokenIds],
    params: Callable[[int], SamplingParams],
    follow: Callable[[], None] = lambda: None,
) -> list[RequestOutput]:
    """Run prompts side by side; `follow` is called after each step."""
    for number, token_ids in enumerate(turn):
        final = dataclasses.replace(params(number), output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(str(number), token_ids, final)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        done.update({output.request_id: output for output in engine.step()})
        follow()
    for output in done.values():
        if output.outputs[0].finish_reason == FinishReason.ERROR:
            raise LongfillError(f"prompt {output.request_id} failed: {output.outputs[0].stop_reason}")
    return [done[str(number)] for number in range(len(turn))]


def _drafted(now: EngineStats, before: EngineStats) -> SpecDecodingStats:
    """What became of the drafts between two totals."""
    earlier = [*before.spec.num_accepted_tokens_per_pos, *[0] * len(now.spec.num_accepted_tokens_per_pos)]
    return SpecDecodingStats(
        now.spec.num_drafts - before.spec.num_drafts,
        now.spec.num_draft_tokens - before.spec.num_draft_tokens,
        now.spec.num_accepted_tokens - before.spec.num_accepted_tokens,
        [a - b for a, b in zip(now.spec.num_accepted_tokens_per_pos, earlier, strict=False)],
    )


def _compare(setting: Setting, runs: Sequence[_Run], first: Setting, known: Sequence[_Run]) -> None:
    """Raise OutputsDifferError unless both said the same."""
    for turn, (run, other) in enumerate(zip(runs, known, strict=True)):
        for number, (a, b) in enumerate(zip(run.outputs, other.outputs, strict=True)):
            if a != b:
                at = next(
                    (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(min(a, b, key=len))
                )
                raise OutputsDifferError(
                    f"round {turn}, prompt {number}: {setting} says other tokens than {first}, from output {at} on. "
                    "Neither steps in flight nor drafts may change them, so their times say nothing; please report this"
                )
