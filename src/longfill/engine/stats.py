"""What each step counts, in one record that progress bars, JSON output, benchmarks and the planner's check all read.

Imports nothing of the house, and psutil. Invariant: every count comes from the plan that the step executed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil


@dataclass
class SpecDecodingStats:
    """What became of drafts; vLLM's names. A draft is what one request brings to one step."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """By place in the draft, from 0."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one draft of `drafted` tokens, of which the first `accepted` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for place in range(accepted):
            self.num_accepted_tokens_per_pos[place] += 1

    def add(self, other: SpecDecodingStats) -> None:
        """Count what `other` counted."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        mine += [0] * (len(theirs) - len(mine))
        for place, count in enumerate(theirs):
            mine[place] += count

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None before the first draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a step with a draft brought on average, its own one included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts whose token at each place was accepted."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]


@dataclass(frozen=True, slots=True)
class RequestShare:
    """What a step had to do with one request."""

    num_step_tokens: int
    """Tokens of it in the step."""
    num_prompt_tokens: int
    """Of its whole prompt."""
    num_cached_tokens: int
    """Of that, what was found in the prefix cache when it was first admitted."""


@dataclass(frozen=True)
class StepStats:
    """One executed step. Counts of chunks, pairs and rows are the first rank's, over all layers that do that work."""

    step: int
    num_tokens: int
    num_prompt_tokens: int
    """Of these, rows of prompts; the others decode."""
    num_running: int
    num_waiting: int
    pages_used: int
    pages_cached: int
    """Free pages whose prefix can be found."""
    pages_total: int
    """Pages that can hold tokens (the null page is not one)."""
    indexer_chunks: int
    """Query chunks that a backend which materialises scores takes, over all full-indexer layers."""
    scored_pairs: int
    """(query, key) pairs that the indexer ranks, over all full-indexer layers."""
    screened_pairs: int
    """Of those, pairs that `--indexer-screen` tested in int8 first."""
    screen_survivors: int
    """Of those, pairs that were scored exactly all the same."""
    gathered_rows: int
    """Latent rows copied into the workspace, over all layers; 0 where pages are read directly."""
    seconds: dict[str, float]
    """Stage -> seconds. "step" is what it added to the time that has passed, "compute" what the worker took, stages of
    the model among it; "schedule" and "update" are the host's part, and "idle" is how long the worker waited for it
    before this step. With steps in flight host and worker overlap, so that the parts are more than "step"."""
    progress: dict[str, tuple[int, int]]
    """Request id -> (num_computed_tokens, num_tokens), for every request of the step."""
    shares: dict[str, RequestShare]
    """By request id, like `progress`."""
    preempted: tuple[str, ...]
    rss_bytes: int
    """Resident memory of the process after the step, or up to `ResidentMemory.SECONDS` before."""
    rank_scored_pairs: tuple[int, ...] = ()
    """Of all ranks' scored pairs, each one's."""
    comm: dict[str, int] = field(default_factory=dict)
    """Bytes that the first rank has sent to others, by what they were (`partition.comm` predicts them)."""
    spec: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    """What became of the drafts that the step verified."""


class ResidentMemory:
    """Bytes of this process, looked up only so often: a look costs as much as planning a small step."""

    SECONDS = 0.1
    """A figure is used again for so long."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked = -self.SECONDS
        self._bytes = 0

    def bytes(self, now: float) -> int:
        """At `now`, in seconds of any one clock that started at 0 or later."""
        if now - self._looked >= self.SECONDS:
            self._looked, self._bytes = now, self._process.memory_info().rss
        return self._bytes


@dataclass
class EngineStats:
    """Running totals since the engine started."""

    steps: int = 0
    tokens: int = 0
    indexer_chunks: int = 0
    scored_pairs: int = 0
    screened_pairs: int = 0
    screen_survivors: int = 0
    gathered_rows: int = 0
    preemptions: int = 0
    comm: dict[str, int] = field(default_factory=dict)
    spec: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepStats) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += step.num_tokens
        self.indexer_chunks += step.indexer_chunks
        self.scored_pairs += step.scored_pairs
        self.screened_pairs += step.screened_pairs
        self.screen_survivors += step.screen_survivors
        self.gathered_rows += step.gathered_rows
        self.preemptions += len(step.preempted)
        self.spec.add(step.spec)
        for what, sent in step.comm.items():
            self.comm[what] = self.comm.get(what, 0) + sent
        for stage, seconds in step.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
