"""The scheduler's knobs as one validated object, made from the engine's arguments.

Imports config and errors. Invariant: a `SchedulerConfig` that exists can run; what contradicts itself was refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from longfill.config import EngineArgs, PrefillPolicy, SchedulingPolicy, flag_name
from longfill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and who goes first; names and meanings are vLLM's where it has the knob.

    Units: tokens, requests, seconds; `watermark` and `decode_share` are shares of 1.
    """

    max_model_len: int
    """Prompt and outputs of one request."""
    max_num_batched_tokens: int
    """Rows of one step, slots for a draft model's own tokens included."""
    max_num_seqs: int
    """Requests running at once."""
    max_num_scheduled_tokens: int | None = None
    """Tokens of one step (None: max_num_batched_tokens)."""
    max_num_active_seqs: int | None = None
    """Of these, so many at most (None: all); vLLM's knob to leave seats to sessions that pause."""
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: int = 1
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    prefill_policy: PrefillPolicy = "ordered"
    decode_share: float = 0.5
    ttft_target: float | None = None
    progress_timeout: float = 60.0
    num_speculative_tokens: int = 0
    draft_slots: int = 0
    """Rows beside its own that each request of a step costs: 0 for MTP, 1 for a draft model."""
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "prefill_schedule_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag_name(name)}: must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len: must hold a prompt token and an output, so at least 2, got {self.max_model_len}"
            )
        if self.max_num_batched_tokens <= self.draft_slots:
            raise ConfigError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} leaves no row beside the {self.draft_slots} "
                "draft slots that every request costs; raise it"
            )
        if self.step_tokens > self.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-scheduled-tokens: {self.step_tokens:,} is more than --max-num-batched-tokens "
                f"{self.max_num_batched_tokens:,}; lower it"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"--long-prefill-token-threshold: {self.long_prefill_token_threshold:,} is more than --max-model-len "
                f"{self.max_model_len:,}, so it would never apply; lower it"
            )
        if self.decode_share >= 1:
            raise ConfigError(
                f"--decode-share: {self.decode_share} leaves prompts no time beside decodes, so they would wait until "
                "none runs; give a share below 1"
            )

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def active_seqs(self) -> int:
        """Most requests that run at once: each must find a row in every step."""
        rows = min(self.step_tokens, self.max_num_batched_tokens // (1 + self.draft_slots))
        return min(self.max_num_active_seqs or self.max_num_seqs, self.max_num_seqs, rows)


def scheduler_config(
    args: EngineArgs, *, max_model_len: int, eos_token_ids: Collection[int] = (), draft_slots: int = 0
) -> SchedulerConfig:
    """The knobs of `args` that the scheduler reads. Raises ConfigError for those that contradict each other."""
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_num_scheduled_tokens=args.max_num_scheduled_tokens,
        max_num_active_seqs=args.max_num_active_seqs,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=args.long_prefill_token_threshold_adaptive,
        prefill_schedule_interval=args.prefill_schedule_interval,
        watermark=args.watermark,
        scheduler_reserve_full_isl=args.scheduler_reserve_full_isl,
        scheduling_policy=args.scheduling_policy,
        prefill_policy=args.prefill_policy,
        decode_share=args.decode_share,
        ttft_target=args.ttft_target,
        progress_timeout=args.progress_timeout,
        num_speculative_tokens=args.num_speculative_tokens,
        draft_slots=draft_slots,
        eos_token_ids=frozenset(eos_token_ids),
    )
