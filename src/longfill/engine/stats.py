"""What each step counts, in one record that progress bars, JSON output, benchmarks and the planner's check all read.

Imports nothing of the house. Invariant: every count comes from the plan that the step executed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepStats:
    """One executed step. Counts of chunks, pairs and rows are over all layers that do that work."""

    step: int
    num_tokens: int
    num_running: int
    num_waiting: int
    pages_used: int
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
    """Stage -> seconds; "step" is the whole."""
    progress: dict[str, tuple[int, int]]
    """Request id -> (num_computed_tokens, num_tokens), for every request of the step."""
    preempted: tuple[str, ...]
    rss_bytes: int
    """Resident memory of the process after the step."""


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
        for stage, seconds in step.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
