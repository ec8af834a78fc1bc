"""Which features combine: every pair is either run by the tests and equal, or refused at start with both names.

Imports config, request and errors only. Invariant: `FEATURES` and `REFUSED` are the one source; the engine's check, the
tests and docs/compatibility.md (`python -m longfill.compatibility > docs/compatibility.md`) all read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from longfill.config import EngineArgs, cache_formats, flag_name
from longfill.errors import ConfigError
from longfill.request import SamplingParams

Effect = Literal["model", "rounding", "none"]
Cell = Literal["same bits", "within tolerance", "refused", "one value"]


class IndexerFacts(Protocol):
    """What the rules ask about an indexer."""

    @property
    def types(self) -> tuple[str, ...]:
        """Per layer "full" or "shared"."""
        ...


class ModelFacts(Protocol):
    """What the rules ask about a model; `models.config.ModelConfig` has it."""

    @property
    def indexer(self) -> IndexerFacts | None: ...
    @property
    def quant(self) -> object | None: ...
    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Per layer whether it has experts."""
        ...

    @property
    def dtype(self) -> str:
        """Of weights and activations, after `--dtype`."""
        ...


@dataclass(frozen=True)
class Setup:
    """An engine's arguments and model, and one request's parameters (None when the engine starts)."""

    args: EngineArgs
    model: ModelFacts
    params: SamplingParams | None = None


@dataclass(frozen=True)
class Feature:
    """One thing a user can turn on or a model can bring.

    `option` is its name in messages. Features of one `group` are values of one option. `effect`: it decides what is
    computed ("model"), how it is rounded ("rounding"), or must not change one bit ("none"). `tolerance` is what
    rounding may change: of a row's logits the root mean square of the difference from float32 over that of the logits,
    median over a prompt's rows.
    """

    name: str
    option: str
    group: str
    effect: Effect
    enabled: Callable[[Setup], bool]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """A pair of features, by name, that is refused, and the reason with what to do."""

    first: str
    second: str
    why: str


def _value(knob: str, value: object, effect: Effect, tolerance: float = 0.0) -> Feature:
    """The feature that `knob` has `value`."""
    name = f"{knob}={value}"
    option = f"{flag_name(knob)} {value}"
    return Feature(name, option, knob, effect, lambda s: bool(getattr(s.args, knob) == value), tolerance)


def _changed(knob: str, effect: Effect, tolerance: float = 0.0, option: str | None = None) -> Feature:
    """The feature that `knob` does not have its default."""
    default = EngineArgs.__dataclass_fields__[knob].default
    flag = option or flag_name(knob)
    return Feature(knob, flag, knob, effect, lambda s: bool(getattr(s.args, knob) != default), tolerance)


def _dtype(value: str, tolerance: float = 0.0) -> Feature:
    """The dtype that a model runs in, be it `--dtype` or the checkpoint's."""
    return Feature(
        f"dtype={value}", f"--dtype {value}", "dtype", "rounding", lambda s: s.model.dtype == value, tolerance
    )


def _index_format(value: str, tolerance: float = 0.0) -> Feature:
    """The format that index keys are kept in, be it asked for or what `auto` stands for."""

    def enabled(s: Setup) -> bool:
        if s.args.indexer_cache_dtype == "auto" and s.model.indexer is None:
            return False
        return cache_formats(s.args, s.model.dtype)[1] == value

    knob = "indexer_cache_dtype"
    return Feature(f"{knob}={value}", f"--indexer-cache-dtype {value}", knob, "rounding", enabled, tolerance)


FEATURES: tuple[Feature, ...] = (
    Feature("no indexer", "--model without an indexer", "indexer", "model", lambda s: s.model.indexer is None),
    Feature(
        "shared indexer layers", "--model with shared indexer layers", "indexer", "model",
        lambda s: s.model.indexer is not None and "shared" in s.model.indexer.types,
    ),
    Feature("no experts", "--model without experts", "experts", "model", lambda s: not any(s.model.moe_layers)),
    Feature("fp8 weights", "--model with fp8 weights", "weights", "model", lambda s: s.model.quant is not None),
    Feature(
        "index_topk", "index_topk in --hf-overrides", "index_topk", "model",
        lambda s: (s.args.hf_overrides or {}).get("index_topk") is not None,
    ),
    Feature(
        "sampling", "temperature above 0", "sampling", "model",
        lambda s: s.params is not None and s.params.temperature > 0,
    ),
    Feature("penalties", "penalties", "penalties", "model", lambda s: s.params is not None and s.params.has_penalties),
    Feature(
        "logit_bias", "logit_bias", "logit_bias", "model", lambda s: s.params is not None and bool(s.params.logit_bias)
    ),
    Feature(
        "min_tokens", "min_tokens", "min_tokens", "model", lambda s: s.params is not None and s.params.min_tokens > 0
    ),
    Feature(
        "structured_outputs", "structured_outputs", "structured_outputs", "model",
        lambda s: s.params is not None and s.params.structured_outputs is not None,
    ),
    _dtype("float32"),
    _dtype("bfloat16", 0.03),
    _dtype("float16", 0.006),
    _value("kv_cache_dtype", "float32", "rounding"),
    _value("kv_cache_dtype", "bfloat16", "rounding", 0.005),
    _value("kv_cache_dtype", "fp8", "rounding", 0.06),
    _value("kv_cache_dtype", "fp8_ds_mla", "rounding", 0.06),
    _index_format("float32"),
    _index_format("fp8", 0.005),
    _value("kernel_backend", "reference", "rounding", 1e-5),
    _value("kernel_backend", "cpu", "rounding"),
    _value("indexer_screen", "on", "none"),
    _value("indexer_screen", "off", "none"),
    _changed("sparse_mla_force_mqa", "rounding", 1e-5),
    Feature(
        "attention_path=paged", "--attention-path paged", "attention_path", "none",
        lambda s: s.args.attention_path != "workspace",
    ),
    _value("attention_path", "workspace", "none"),
    _changed("sparse_mla_prefill_workspace_factor", "none"),
    _changed("enable_prefix_caching", "none", option="--no-enable-prefix-caching"),
    _changed("num_gpu_blocks_override", "none"),
    _changed("block_size", "none"),
    _changed("max_num_batched_tokens", "none"),
    _changed("long_prefill_token_threshold", "none"),
    _changed("prefill_schedule_interval", "none"),
    _value("scheduling_policy", "priority", "none"),
    _value("prefill_policy", "fair", "none"),
    _changed("async_scheduling", "none"),
    _changed("split_mixed_batch", "none"),
    _changed("speculative_config", "none"),
    _changed("tensor_parallel_size", "rounding", 1e-5),
    _changed("enable_expert_parallel", "none"),
    _value("all2all_backend", "high_throughput", "none"),
    _value("all2all_backend", "low_latency", "none"),
    _changed("prefill_context_parallel_size", "none"),
    _value("pcp_split", "interleave", "none"),
    _value("pcp_split", "contiguous", "none"),
    _changed("decode_context_parallel_size", "rounding", 1e-5),
    _changed("cp_kv_cache_interleave_size", "rounding", 1e-5),
    _value("dcp_comm_backend", "ag_rs", "rounding", 1e-5),
    _changed("deterministic", "rounding", 1e-5),
    _changed("digest", "none"),
    _changed("skip_tokenizer_init", "none"),
    _changed("tokenizer", "none"),
    Feature("stop", "stop strings", "stop", "none", lambda s: s.params is not None and bool(s.params.stop_strings)),
    Feature(
        "prompt_logprobs", "prompt_logprobs", "prompt_logprobs", "none",
        lambda s: s.params is not None and s.params.prompt_logprobs is not None,
    ),
    Feature("n", "n above 1", "n", "none", lambda s: s.params is not None and s.params.n > 1),
)  # fmt: skip
"""Every feature of today. `attention_path` auto is paged; `kernel_backend` auto is cpu where that can be had."""

_NO_INDEXER = "the model attends to every position, so nothing would honour it; drop {0}"

REFUSED: tuple[Refusal, ...] = (
    *(
        Refusal(name, "no indexer", _NO_INDEXER)
        for name in (
            "attention_path=workspace",
            "sparse_mla_force_mqa",
            "sparse_mla_prefill_workspace_factor",
            "indexer_cache_dtype=float32",
            "indexer_cache_dtype=fp8",
            "indexer_screen=on",
            "indexer_screen=off",
            "index_topk",  # config.json's reader refuses it first, when it meets the field
        )
    ),
    Refusal(
        "kernel_backend=cpu",
        "dtype=float16",
        "native kernels compute in float32 and bfloat16; give --dtype bfloat16 or drop {0}",
    ),
    *(
        Refusal(name, "kernel_backend=reference", "the reference has no screen; drop one of them")
        for name in ("indexer_screen=on", "indexer_screen=off")
    ),
    Refusal(
        "indexer_screen=on",
        "indexer_cache_dtype=float32",
        "the screen tests fp8 index keys, and --indexer-cache-dtype auto is float32 beside float32 latent rows; add "
        "--indexer-cache-dtype fp8 or drop {0}",
    ),
    Refusal(
        "sparse_mla_prefill_workspace_factor",
        "attention_path=paged",
        "pages are read without a workspace (so is --attention-path auto); add --attention-path workspace or drop {0}",
    ),
    *(
        Refusal(name, "no experts", "no layer has any, so nothing would honour it; drop {0}")
        for name in ("all2all_backend=high_throughput", "all2all_backend=low_latency", "enable_expert_parallel")
    ),
    *(
        Refusal(name, shards, "a rank has a share of each context only, and reads it in its pages; drop {0}")
        for name in ("sparse_mla_prefill_workspace_factor", "attention_path=workspace")
        for shards in ("cp_kv_cache_interleave_size", "dcp_comm_backend=ag_rs", "decode_context_parallel_size")
    ),
    Refusal(
        "dcp_comm_backend=ag_rs",
        "deterministic",
        "it weighs parts by the log-sum-exp of all ranks, whose number then matters; give --dcp-comm-backend a2a",
    ),
    *(
        Refusal(
            "deterministic",
            name,
            "products of the reference depend on how many outputs a rank has; its kernels must be native ones, in "
            "float32 or bfloat16",
        )
        for name in ("kernel_backend=reference", "dtype=float16")
    ),
    Refusal("tokenizer", "skip_tokenizer_init", "no tokenizer is loaded; drop one of them"),
    Refusal(
        "structured_outputs",
        "skip_tokenizer_init",
        "no text is made to hold to a form; drop one of them",
    ),
    Refusal(
        "stop", "skip_tokenizer_init", "no text is made to search; drop --skip-tokenizer-init or use stop_token_ids"
    ),
)

ALTERS: dict[str, frozenset[str]] = {
    "enable_expert_parallel": frozenset({"tensor_parallel_size", "deterministic"}),
    "prefill_context_parallel_size": frozenset({"decode_context_parallel_size"}),
}
"""Features without an effect of their own that change how others round: whole experts are added one by one and parts of
experts part by part; prompts that are split gather keys that are, where other rows merge parts of attention."""

REFUSED_TOGETHER: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("deterministic", "decode_context_parallel_size", "no indexer"),
        "slices of keys are made of selected ones, and this model attends to all; drop --deterministic",
    ),
)
"""More than two features that are refused only together."""

OUTSIDE: dict[str, str] = {
    "model": "says which model, whose features are in the table",
    "revision": "says which model",
    "seed": "a number that sampling starts from",
    "max_model_len": "a limit",
    "max_num_seqs": "a limit",
    "max_num_scheduled_tokens": "a limit",
    "max_num_active_seqs": "a limit",
    "long_prefill_token_threshold_adaptive": "a way to choose the threshold, which has its row",
    "watermark": "a limit",
    "scheduler_reserve_full_isl": "when a request is admitted; the scheduler's tests run both",
    "decode_share": "a number of the fair policy, which has its row",
    "ttft_target": "a number of the fair policy, which has its row",
    "progress_timeout": "a limit",
    "max_concurrent_batches": "a number of --async-scheduling, which has its row; tests run 1 to 3",
    "memory_budget": "a limit",
    "sparse_indexer_max_logits_mb": "a limit, kept by a model without an indexer too",
    "distributed_executor_backend": "how ranks are started, which the executors' tests run",
    "distributed_timeout_seconds": "a limit",
    "num_threads": "a limit",
}
"""Knobs that are no feature, and why; every other field of `EngineArgs` has its row."""

BY_NAME = {feature.name: feature for feature in FEATURES}
_RULES = tuple((BY_NAME[rule.first], BY_NAME[rule.second], rule) for rule in REFUSED)


def check(args: EngineArgs, model: ModelFacts, params: SamplingParams | None = None) -> None:
    """Raise ConfigError, naming both options, for the first pair of enabled features that is refused."""
    setup = Setup(args, model, params)
    for first, second, rule in _RULES:
        if first.enabled(setup) and second.enabled(setup):
            raise ConfigError(f"{first.option} and {second.option} exclude each other: {rule.why.format(first.option)}")
    for names, why in REFUSED_TOGETHER:
        if all(BY_NAME[name].enabled(setup) for name in names):
            options = [BY_NAME[name].option for name in names]
            raise ConfigError(f"{', '.join(options[:-1])} and {options[-1]} exclude each other: {why}")


def cell(first: Feature, second: Feature) -> Cell:
    """What the table says about a pair."""
    if first.group == second.group:
        return "one value"
    if any({rule.first, rule.second} == {first.name, second.name} for rule in REFUSED):
        return "refused"
    return "within tolerance" if "rounding" in (first.effect, second.effect) else "same bits"


_MARKS: dict[Cell, str] = {"same bits": "=", "within tolerance": "≈", "refused": "✗", "one value": "·"}
_HEAD = """# Which features combine

Made by `python -m longfill.compatibility > docs/compatibility.md` from the data that the engine checks at start; do not
edit. `tests/test_compatibility.py` runs every pair on a small random model.

- `=` **tested equal**: the same tokens and the same bits of the logits as without those of the two that must not change
  any; what is left of the pair is compared with transformers.
- `≈` **tested equal** within the stated tolerance of the same in float32, and the same bits as the rounding one alone
  (but --enable-expert-parallel beside --tensor-parallel-size or --deterministic, and --prefill-context-parallel-size
  beside --decode-context-parallel-size, which then round in another order).
- `✗` **refused**, before any work, with both names.
- `·` values of one option: there is one at a time.
"""


def table() -> str:
    """docs/compatibility.md."""
    numbers = range(1, len(FEATURES) + 1)
    lines = [_HEAD, "| | feature | " + " | ".join(map(str, numbers)) + " |", "|---|---|" + ":-:|" * len(FEATURES)]
    for number, row in zip(numbers, FEATURES, strict=True):
        marks = [_MARKS[cell(row, column)] for column in FEATURES]
        lines.append(f"| {number} | {row.option} | {' | '.join(marks)} |")
    lines += ["", "## Refused", "", "| | and | why |", "|---|---|---|"]
    lines += [f"| {a.option} | {b.option} | {rule.why.format(a.option)} |" for a, b, rule in _RULES]
    lines += [
        f"| {BY_NAME[a].option} | {' and '.join(BY_NAME[name].option for name in rest)} | {why} |"
        for (a, *rest), why in REFUSED_TOGETHER
    ]
    lines += ["", "## Tolerances", "", _TOLERANCES, "", "| feature | tolerance |", "|---|---|"]
    lines += [f"| {f.option} | {f.tolerance:g} |" for f in FEATURES if f.effect == "rounding"]
    lines += ["", "## Not in the table", "", "| option | why |", "|---|---|"]
    lines += [f"| {flag_name(knob)} | {why} |" for knob, why in OUTSIDE.items()]
    return "\n".join(lines) + "\n"


_TOLERANCES = """Of each row of a prompt: root mean square of the logits' difference from a float32 run over that of the
logits. The median over the rows must be within the tolerance; a pair may have the sum of both. It is the median because
the tests' model is random and keeps 8 keys: a key chosen otherwise changes its row far more than rounding does. The
mean over all rows, those included, must be within 0.3; unrelated logits differ by 1.4. A dtype brings the defaults of
the cache formats with it.

The two kernel backends sum in different orders, so their bits differ, and they may keep different keys where two scores
are closer than fp32 rounding. --kernel-backend auto is cpu where the native kernels are installed and can compute the
model, and else reference; hence the tolerance stands beside reference. --sparse-mla-force-mqa changes bits with the
reference only: the native kernels take a causal range and its list of positions in the same order."""

if __name__ == "__main__":
    print(table(), end="")
