"""Every knob of the engine: name, default, unit and range, in one validated object.

Imports errors only. The command line's flags, the help texts and `docs/` are made from these fields, so a knob exists
once. A name that means the same as one of vLLM's has vLLM's name.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from longfill.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
CacheDType = Literal["auto", "float32", "bfloat16", "fp8", "fp8_ds_mla"]
IndexerCacheDType = Literal["auto", "float32", "fp8"]
AttentionPath = Literal["auto", "paged", "workspace"]
KernelBackend = Literal["auto", "reference", "cpu"]
IndexerScreen = Literal["auto", "on", "off"]
SchedulingPolicy = Literal["fcfs", "priority"]
PrefillPolicy = Literal["ordered", "fair"]
PcpSplit = Literal["zigzag", "interleave", "contiguous"]
DcpCommBackend = Literal["ag_rs", "a2a"]
All2AllBackend = Literal["auto", "high_throughput", "low_latency"]
ExecutorBackend = Literal["auto", "uni", "mp", "external_launcher"]

DEFAULT_MEMORY_SHARE = 0.7
"""Share of the memory that the cgroup (or the machine) allows, taken when no budget is given. The rest is left to the
page cache, other processes and the fragmentation of the allocator."""

MAX_SPECULATIVE_TOKENS = 8

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher such as torchrun puts into the environment of every rank."""

DETERMINISTIC_SLICES = 8
"""Slices of inner widths, and of a context's keys, that `--deterministic` adds up: the most ranks that it can serve."""


@dataclass(frozen=True)
class StepLimits:
    """What a step and its requests are limited to where nobody says otherwise."""

    max_num_batched_tokens: int
    max_num_seqs: int


CPU_LIMITS = StepLimits(4096, 64)
"""Chosen by measurement: docs/performance.md, "Tokens of a step"."""
DEVICE_LIMITS: tuple[tuple[int, StepLimits], ...] = (
    (70 * 2**30, StepLimits(16_384, 1024)),
    (0, StepLimits(8_192, 256)),
)
"""From that many bytes of an accelerator's memory on, the most first; vLLM's figures for its `LLM` class."""


def default_limits(device_bytes: int | None = None) -> StepLimits:
    """A step's limits on an accelerator with so much memory, or on the CPU (None)."""
    if device_bytes is None:
        return CPU_LIMITS
    return next(limits for least, limits in DEVICE_LIMITS if device_bytes >= least)


def _knob(default: Any, help: str, *, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "unit": unit, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What `--speculative-config` asks for; vLLM's names."""

    method: Literal["mtp"]
    num_speculative_tokens: int

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From the flag's JSON. Raises ConfigError, naming the field, for one that cannot be honoured."""
        flag = "--speculative-config"
        unknown = sorted(set(given) - {"method", "num_speculative_tokens"})
        if unknown:
            raise ConfigError(f"{flag}: {unknown[0]!r} is not supported; give method and num_speculative_tokens")
        method, count = given.get("method"), given.get("num_speculative_tokens")
        if method != "mtp":
            raise ConfigError(f"{flag}: method {method!r} is not supported; give 'mtp', the model's own draft layer")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"{flag}: num_speculative_tokens must be an integer from 1 to {MAX_SPECULATIVE_TOKENS}, got {count!r}"
            )
        return cls(method="mtp", num_speculative_tokens=count)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of `LLM(...)` and of every command that runs a model."""

    model: str = _knob("needle", "A model folder, a Hugging Face hub id, or `needle` for the bundled model")
    tokenizer: str | None = _knob(None, "Folder or hub id of the tokenizer (default: the model's)")
    revision: str | None = _knob(None, "Hub revision (branch, tag or commit) of the model")
    hf_overrides: Mapping[str, Any] | None = _knob(None, "Fields that replace those of config.json, as JSON")
    skip_tokenizer_init: bool = _knob(False, "Take and give token ids only; no tokenizer is loaded")
    dtype: DType = _knob("auto", "Weights and activations (auto: the checkpoint's)")
    seed: int = _knob(0, "Seed of sampling for requests that bring none", low=0, high=2**63 - 1)

    max_model_len: int | None = _knob(
        None, "Longest prompt plus output (default: the model's own limit)", unit="tokens", low=1
    )
    max_num_batched_tokens: int = _knob(
        CPU_LIMITS.max_num_batched_tokens, "Token budget of one step", unit="tokens", low=1
    )
    max_num_seqs: int = _knob(CPU_LIMITS.max_num_seqs, "Requests running at once", low=1)
    max_num_scheduled_tokens: int | None = _knob(
        None, "Tokens that one step schedules (default: its token budget)", unit="tokens", low=1
    )
    max_num_active_seqs: int | None = _knob(
        None, "Running requests beyond which none is admitted (default: all that may run)", low=1
    )
    long_prefill_token_threshold: int = _knob(
        0, "Tokens of one prompt in one step while other requests can run (0: no cap)", unit="tokens", low=0
    )
    long_prefill_token_threshold_adaptive: bool = _knob(
        False, "Raise that cap to an equal part of the token budget for each request that can run"
    )
    prefill_schedule_interval: int = _knob(
        1, "Prompts in every N-th step only, while something decodes and no backlog builds up", unit="steps", low=1
    )
    watermark: float = _knob(0.0, "Share of the KV pool kept free when a request is admitted", low=0, high=1)
    scheduler_reserve_full_isl: bool = _knob(
        True, "Admit a request only once its whole prompt fits beside what the running ones will need"
    )
    scheduling_policy: SchedulingPolicy = _knob(
        "fcfs", "First come first served, or lower `priority` first, which may take seats and pages from higher"
    )
    prefill_policy: PrefillPolicy = _knob(
        "ordered", "A step's prompt tokens in the order of admission, or in fair shares of requests and tenants"
    )
    decode_share: float = _knob(
        0.5, "With fair: share of their undisturbed rate that decodes keep beside prompts (0: none)", low=0, high=1
    )
    ttft_target: float | None = _knob(
        None,
        "With fair: prompts about to miss this time to first token go first, and decodes may wait for them as long",
        unit="s", low=0,
    )  # fmt: skip
    progress_timeout: float = _knob(
        60.0, "A request that is computed over and over without progress ends with an error after this", unit="s", low=0
    )
    async_scheduling: bool = _knob(False, "Prepare steps while others compute")
    max_concurrent_batches: int = _knob(2, "Steps in flight where they are prepared ahead", unit="steps", low=1, high=8)
    split_mixed_batch: bool = _knob(False, "Run a step's decode rows and its prompt rows as two calls")
    speculative_config: Mapping[str, Any] | None = _knob(
        None, 'Speculative decoding, as JSON: {"method": "mtp", "num_speculative_tokens": 2}'
    )

    memory_budget: str | None = _knob(
        None,
        "Memory of a rank for everything: weights, KV pages, workspaces, logits, activations and the process itself, "
        f"as 2GiB, 900MB... (default: {DEFAULT_MEMORY_SHARE:.0%} of what the cgroup allows, shared by its ranks)",
        unit="bytes",
    )
    num_gpu_blocks_override: int | None = _knob(
        None, "Pages of the KV pool (vLLM's name; default: what the memory budget leaves)", unit="pages", low=2
    )
    block_size: int = _knob(64, "Tokens in a KV page", unit="tokens", low=1, high=4096)
    kv_cache_dtype: CacheDType = _knob(
        "auto", "Latent rows of the KV cache (auto: float32 for float32 models, else bfloat16)"
    )
    indexer_cache_dtype: IndexerCacheDType = _knob(
        "auto", "Index keys of the KV cache (auto: float32 beside float32 latent rows, else fp8)"
    )
    enable_prefix_caching: bool = _knob(True, "Reuse the KV pages of equal prefixes")

    kernel_backend: KernelBackend = _knob(
        "auto", "Native CPU kernels where they can run (auto), only the torch reference, or insist on native (cpu)"
    )
    indexer_screen: IndexerScreen = _knob(
        "auto", "Test index keys in int8 before their exact scores: where it pays (auto), always, never; same bits"
    )
    attention_path: AttentionPath = _knob(
        "auto", "Sparse attention reads pages directly (paged) or through a gathered bf16 workspace (workspace)"
    )
    sparse_mla_force_mqa: bool = _knob(
        False, "Also run rows that select all their keys as sparse attention, never as dense"
    )
    sparse_mla_prefill_workspace_factor: int | None = _knob(
        None, "Rows of the gather workspace as a multiple of max_model_len", low=1, high=64
    )
    sparse_indexer_max_logits_mb: int = _knob(
        512, "Most memory that one query chunk's indexer scores take", unit="MiB", low=1, high=65536
    )

    tensor_parallel_size: int = _knob(1, "Ranks that share each layer's heads and inner widths", low=1, high=1024)
    enable_expert_parallel: bool = _knob(False, "Spread whole experts over the ranks, not a part of each")
    all2all_backend: All2AllBackend = _knob(
        "auto",
        "How rows reach their experts: once for each rank (high_throughput), in fixed buffers with one place for each "
        "expert (low_latency), or by the number of rows (auto)",
    )
    prefill_context_parallel_size: int = _knob(1, "Ranks that share a prompt's rows", low=1, high=1024)
    pcp_split: PcpSplit = _knob("zigzag", "How a prompt's rows are dealt out to them")
    decode_context_parallel_size: int = _knob(1, "Ranks that share the KV cache", low=1, high=1024)
    cp_kv_cache_interleave_size: int = _knob(
        1, "Tokens in a row that one rank's share of the cache holds", unit="tokens", low=1, high=4096
    )
    dcp_comm_backend: DcpCommBackend = _knob(
        "a2a", "How parts of attention come together: exchanged (a2a), or weighed and summed on the way (ag_rs)"
    )
    deterministic: bool = _knob(
        False, "Sum over fixed slices in a fixed order, so that the number of ranks changes no bit"
    )
    distributed_executor_backend: ExecutorBackend = _knob(
        "auto", "Ranks in this process (uni), in processes that it starts (mp), or as torchrun started them"
    )
    distributed_timeout_seconds: float = _knob(
        600.0, "How long a rank waits for another one, at start and in a step", unit="s", low=0.1
    )

    num_threads: int | None = _knob(
        None, "Compute threads of a rank (default: the cores of one NUMA node, or its share of all)", low=1, high=1024
    )
    digest: bool = _knob(False, "Hash the sampled rows' fp32 logits into RequestOutput.digest")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, low, high = getattr(self, f.name), f.metadata["low"], f.metadata["high"]
            flag = flag_name(f.name)
            _check_type(f.name, value)
            if value is None:
                continue
            if (low is not None and value < low) or (high is not None and value > high):
                unit = f" {f.metadata['unit']}" if f.metadata["unit"] else ""
                upper = f" and at most {high:,}" if high is not None else ""
                raise ConfigError(f"{flag}: {value:,} is out of range; at least {low:,}{upper}{unit}")
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        _ = self.speculation
        self._check_parallel()

    def _check_parallel(self) -> None:
        """Raise ConfigError for sizes of ranks that are no mesh."""
        tp, pcp, dcp = self.tensor_parallel_size, self.prefill_context_parallel_size, self.decode_context_parallel_size
        if pcp == 1 and tp % dcp:
            raise ConfigError(
                f"--decode-context-parallel-size {dcp}: without --prefill-context-parallel-size it shares the ranks of "
                f"--tensor-parallel-size, which is {tp} and no multiple of it"
            )
        if pcp > 1 and dcp not in (1, pcp, tp * pcp):
            raise ConfigError(
                f"--decode-context-parallel-size {dcp}: with --prefill-context-parallel-size {pcp} and "
                f"--tensor-parallel-size {tp} it must be 1, {pcp} or {tp * pcp}"
            )
        if self.deterministic and (DETERMINISTIC_SLICES % tp or DETERMINISTIC_SLICES % dcp):
            raise ConfigError(
                f"--deterministic adds up {DETERMINISTIC_SLICES} slices, which --tensor-parallel-size {tp} and "
                f"--decode-context-parallel-size {dcp} must divide; give powers of two, {DETERMINISTIC_SLICES} at most"
            )
        unused = (
            ("all2all_backend", "enable_expert_parallel", self.enable_expert_parallel),
            ("pcp_split", "prefill_context_parallel_size", pcp > 1),
            ("dcp_comm_backend", "decode_context_parallel_size", dcp > 1),
            ("cp_kv_cache_interleave_size", "decode_context_parallel_size", dcp > 1 or self.deterministic),
        )
        for knob, needed, there in unused:
            if not there and getattr(self, knob) != EngineArgs.__dataclass_fields__[knob].default:
                raise ConfigError(
                    f"{flag_name(knob)} {getattr(self, knob)} means nothing without {flag_name(needed)}; add that, or "
                    "drop it"
                )
        if (dcp > 1 or self.deterministic) and self.block_size % self.cp_kv_cache_interleave_size:
            raise ConfigError(
                f"--cp-kv-cache-interleave-size {self.cp_kv_cache_interleave_size} must divide --block-size "
                f"{self.block_size}"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config` as an object; raises ConfigError, naming the field, for one that cannot be honoured."""
        return None if self.speculative_config is None else SpeculativeConfig.from_mapping(self.speculative_config)

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts of a step; 0 without speculation."""
        speculation = self.speculation
        return 0 if speculation is None else speculation.num_speculative_tokens

    @property
    def num_ranks(self) -> int:
        """Ranks that run the model together."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    @property
    def is_launched(self) -> bool:
        """Whether a launcher has started all ranks. One that starts a single process may be anything's, a container's
        too, and that process starts its own."""
        if self.distributed_executor_backend != "auto":
            return self.distributed_executor_backend == "external_launcher"
        return all(name in os.environ for name in LAUNCH_VARIABLES) and os.environ["WORLD_SIZE"] != "1"

    @property
    def local_ranks(self) -> int:
        """Those of them on this machine: all, unless the launcher that has started them says otherwise."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "") if self.is_launched else ""
        return int(local) if local.isdigit() and int(local) > 0 else self.num_ranks

    @property
    def steps_in_flight(self) -> int:
        """Steps that are scheduled before the oldest is booked."""
        return self.max_concurrent_batches if self.async_scheduling else 1


def flag_name(knob: str) -> str:
    """The command line's spelling of a knob: `max_model_len` -> `--max-model-len`."""
    return "--" + knob.replace("_", "-")


def choices_of(knob: str) -> tuple[str, ...]:
    """Allowed values of a knob that is an enumeration, else an empty tuple."""
    return tuple(choice for kind in _kinds()[knob] if get_origin(kind) is Literal for choice in get_args(kind))


@cache
def _kinds() -> dict[str, tuple[Any, ...]]:
    """The types that each knob may have, from the annotations of `EngineArgs`."""
    hints = {f.name: get_type_hints(EngineArgs)[f.name] for f in dataclasses.fields(EngineArgs)}
    return {name: get_args(hint) if get_origin(hint) is UnionType else (hint,) for name, hint in hints.items()}


_EXPECTED = {int: "an integer", float: "a number", str: "text", bool: "True or False", Mapping: "a mapping"}


def _check_type(knob: str, value: object) -> None:
    """Raise ConfigError unless `value` has one of the knob's types; True and False are no integers."""
    kinds = _kinds()[knob]
    if any(_has_kind(value, kind) for kind in kinds):
        return
    if choices_of(knob):
        raise ConfigError(f"{flag_name(knob)}: {value!r} is not one of {', '.join(choices_of(knob))}")
    expected = " or ".join(_EXPECTED[get_origin(kind) or kind] for kind in kinds if kind is not NoneType)
    advice = '; write a size with its unit, as "2GiB"' if knob == "memory_budget" else ""
    raise ConfigError(f"{flag_name(knob)}: expected {expected}, got {value!r}{advice}")


def _has_kind(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, get_origin(kind) or kind)


def cache_formats(args: EngineArgs, dtype: str) -> tuple[str, str]:
    """(latent rows, index keys) of a model that runs in `dtype`: the formats as given, or what `auto` stands for.

    float32 models keep float32 index keys unless told otherwise: they are run for exactness.
    """
    latent: str = args.kv_cache_dtype
    if latent == "auto":
        latent = "float32" if dtype == "float32" else "bfloat16"
    index: str = args.indexer_cache_dtype
    if index == "auto":
        index = "float32" if latent == "float32" else "fp8"
    return latent, index


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_bytes(text: str, flag: str = "--memory-budget") -> int:
    """`"2GiB"` -> 2147483648. Units: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{flag}: cannot read {text!r}; write for example 2GiB or 900MB")
    value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise ConfigError(f"{flag}: {text!r} is not more than zero")
    return value
