"""What `bench serve` asks for: classes of prompts, the requests drawn from them, and when each is due.

Imports NumPy. Invariant: a seed gives the same requests in the same order at the same times, and every class gets its
share of them to within one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longfill.errors import ConfigError


@dataclass(frozen=True)
class PromptClass:
    """Requests of one size: a prompt of `input_len` tokens after the shared prefix, and an output of `output_len`."""

    input_len: int
    output_len: int
    weight: float = 1.0

    @property
    def name(self) -> str:
        """As in `--mix`."""
        return f"{self.input_len}:{self.output_len}"


@dataclass(frozen=True)
class Job:
    """One request to send."""

    number: int
    kind: int
    """Index of its class."""
    input_len: int
    """Tokens of its prompt, the shared prefix among them."""
    output_len: int
    due: float
    """Seconds after the start."""


@dataclass(frozen=True)
class Workload:
    """All that decides what is sent and when."""

    classes: tuple[PromptClass, ...]
    num_prompts: int
    seed: int
    prefix_len: int = 0
    range_ratio: float = 0.0
    """Lengths are drawn evenly from (1 - ratio) to (1 + ratio) times those of the class."""
    request_rate: float = math.inf
    """Requests a second."""
    burstiness: float = 1.0

    def jobs(self) -> list[Job]:
        """The requests in the order in which they are due."""
        rng = np.random.default_rng([self.seed, 0])
        kinds = np.repeat(np.arange(len(self.classes)), self._counts())
        rng.shuffle(kinds)
        due = arrivals(rng, self.num_prompts, self.request_rate, self.burstiness)
        jobs = []
        for number, (kind, when) in enumerate(zip(kinds, due, strict=True)):
            group = self.classes[kind]
            length = self.prefix_len + self._length(rng, group.input_len)
            jobs.append(Job(number, int(kind), length, self._length(rng, group.output_len), float(when)))
        return jobs

    def most_tokens(self, group: PromptClass) -> int:
        """The most that a request of this class can take, prompt and output."""
        return self.prefix_len + sum(self._bounds(length)[1] for length in (group.input_len, group.output_len))

    def _counts(self) -> list[int]:
        """Requests of each class: by weight, what is left over to the largest remainders."""
        total = sum(group.weight for group in self.classes)
        shares = [self.num_prompts * group.weight / total for group in self.classes]
        counts = [math.floor(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda kind: counts[kind] - shares[kind])
        for kind in by_remainder[: self.num_prompts - sum(counts)]:
            counts[kind] += 1
        for group, count in zip(self.classes, counts, strict=True):
            if count == 0:
                raise ConfigError(
                    f"--num-prompts {self.num_prompts} leaves none for prompts of {group.name}; "
                    f"ask for at least {math.ceil(total / group.weight)}"
                )
        return counts

    def _length(self, rng: np.random.Generator, middle: int) -> int:
        low, high = self._bounds(middle)
        return int(rng.integers(low, high, endpoint=True))

    def _bounds(self, middle: int) -> tuple[int, int]:
        return (
            max(1, math.floor(middle * (1 - self.range_ratio))),
            math.ceil(middle * (1 + self.range_ratio)),
        )


def arrivals(rng: np.random.Generator, count: int, rate: float, burstiness: float) -> np.ndarray:
    """Seconds at which requests are due, the first at once: gaps are gamma-distributed with mean 1 / rate, so that
    burstiness 1 is a Poisson process, less comes in bursts, more is more even.
    """
    if math.isinf(rate):
        return np.zeros(count)
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def parse_mix(specs: Sequence[str]) -> tuple[PromptClass, ...]:
    """`["131072:16:1", "512:128:20"]` -> two classes, a weight left out is 1; raises ConfigError."""
    classes: list[PromptClass] = []
    for spec in specs:
        parts = spec.split(":")
        try:
            weight = float(parts[2]) if len(parts) == 3 else 1.0
            group = PromptClass(int(parts[0]), int(parts[1]), weight)
            right = len(parts) in (2, 3) and min(group.input_len, group.output_len) > 0 and 0 < weight < math.inf
        except (ValueError, IndexError):
            right = False
        if not right:
            raise ConfigError(
                f"--mix {spec}: expected PROMPT:OUTPUT:WEIGHT, tokens of a prompt and of its output and how often it "
                "comes against the others, such as 131072:16:1"
            )
        if any(group.name == other.name for other in classes):
            raise ConfigError(f"--mix {spec}: {group.name} is given twice; add up the weights")
        classes.append(group)
    return tuple(classes)
