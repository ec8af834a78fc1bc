"""`bench prefill`: the same prompt through longfill and its peers, every measurement in a fresh process.

Imports the processes. Invariant: within a length all engines get the same checkpoint, token ids and thread count; a
peer that failed at one length is not tried at longer ones.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longfill.bench.child import ChildRequest
from longfill.bench.process import Outcome, run_child
from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.host import cgroup_memory_limit
from longfill.models.config import ModelConfig

PEER_MEMORY_SHARE = 0.8
WARM_UP_TOKENS = 256
FIRST_TOKEN_ID = 2
"""Ids below are those that models use for the begin and the end of a text."""


@dataclass(frozen=True)
class Contender:
    """One engine in one mode; `module` is what runs it, and its package is what must be importable."""

    engine: str
    mode: str
    module: str
    install: str = "pip install 'longfill[bench]'"
    """How to get it."""

    @property
    def label(self) -> str:
        return f"{self.engine}, {self.mode}" if self.mode else self.engine


LONGFILL = Contender("longfill", "", "longfill.bench.prefill_worker")
PEERS: Mapping[str, tuple[Contender, ...]] = {
    "transformers": (
        Contender("transformers", "one-shot", "longfill_peers.transformers_prefill"),
        Contender("transformers", "chunked", "longfill_peers.transformers_prefill"),
    ),
    "llama.cpp": (
        Contender(
            "llama.cpp",
            "chunked",
            "longfill_peers.llama_cpp_prefill",
            "pip install 'longfill[bench]' llama-cpp-python gguf",
        ),
    ),
}


@dataclass(frozen=True)
class PrefillPlan:
    """What is measured. `scratch` is a folder for what peers make of the checkpoint."""

    folder: Path
    engine: EngineArgs
    threads: int
    lengths: tuple[int, ...]
    peers: tuple[str, ...]
    scratch: Path
    chunk: int = 512
    repeats: int = 3
    peer_timeout: float = 900.0
    peer_memory_limit: int = field(default_factory=lambda: int(cgroup_memory_limit() * PEER_MEMORY_SHARE))

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (LONGFILL, *(contender for name in self.peers for contender in PEERS[name]))


@dataclass
class PrefillResult:
    """One engine at one length."""

    engine: str
    mode: str
    length: int
    status: str
    message: str = ""
    seconds: float | None = None
    tokens_per_s: float | None = None
    runs: int = 0
    loaded_rss_bytes: int | None = None
    """Resident once loaded and warm."""
    peak_rss_bytes: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    """longfill only: seconds by stage, FLOP by part, measured peak, share of it, kernel paths."""
    answer: dict[str, Any] = field(default_factory=dict, repr=False)
    ratio: float | None = None
    """longfill only: its tokens/s over those of the faster of transformers' modes."""
    largest_difference: float | None = None
    """Peers only: largest gap to longfill's log-probabilities of its most likely tokens, in nats."""
    same_token: bool | None = None
    """Peers only: whether both find the same token most likely."""

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it: without the logits."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "answer"}


def check_peers(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each known and once; raises ConfigError otherwise."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--against {name}: there is no such peer; choose from {', '.join(PEERS)}")
    return tuple(dict.fromkeys(names))


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """`length` random token ids; a shorter prompt of the same seed is the beginning of a longer one."""
    ids: list[int] = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, vocab_size, length).tolist()
    return ids


def run_prefills(plan: PrefillPlan, on_start: Callable[[Contender, int], None]) -> Iterator[PrefillResult]:
    """Yield a result for every contender at every length, the lengths ascending; a length's peers after longfill."""
    vocab_size = ModelConfig.from_folder(plan.folder, plan.engine.hf_overrides).vocab_size
    stopped: dict[Contender, PrefillResult] = {}
    for length in sorted(plan.lengths):
        token_ids = prompt(length, vocab_size, plan.engine.seed)
        results = []
        for contender in plan.contenders:
            earlier = stopped.get(contender)
            if earlier is None:
                on_start(contender, length)
                result = _measure(plan, contender, token_ids)
            else:
                result = dataclasses.replace(earlier, length=length, message=_not_tried(earlier))
            if result.status != "ok":
                stopped.setdefault(contender, result)
            results.append(result)
        _compare(results)
        yield from results


def _not_tried(earlier: PrefillResult) -> str:
    if earlier.status == "not installed":
        return earlier.message
    return f"not tried: {earlier.status} at {earlier.length:,}"


def _measure(plan: PrefillPlan, contender: Contender, token_ids: list[int]) -> PrefillResult:
    length = len(token_ids)
    request = ChildRequest(
        folder=str(plan.folder),
        token_ids=token_ids,
        mode=contender.mode,
        threads=plan.threads,
        repeats=plan.repeats,
        warm_up=min(length, WARM_UP_TOKENS),
        chunk=plan.chunk,
    )
    if contender is LONGFILL:
        outcome = run_child(contender.module, dataclasses.replace(request, options=_engine_options(plan, length)))
    elif importlib.util.find_spec(contender.module.split(".")[0]) is None:
        outcome = Outcome("not installed")
    else:
        limit = plan.peer_memory_limit
        request = dataclasses.replace(request, memory_limit=limit, options={"scratch": str(plan.scratch)})
        outcome = run_child(contender.module, request, timeout=plan.peer_timeout, memory_limit=limit)
    if outcome.status == "not installed":
        outcome.message = contender.install
    return _result(contender, length, outcome)


def _engine_options(plan: PrefillPlan, length: int) -> dict[str, Any]:
    """Engine arguments for one prompt: pages for it alone, and no prefix that a second run would find."""
    args = dataclasses.replace(
        plan.engine,
        model=str(plan.folder),
        skip_tokenizer_init=True,
        num_threads=plan.threads,
        max_num_seqs=1,
        max_model_len=plan.engine.max_model_len or length + 1,
        enable_prefix_caching=False,
    )
    return dataclasses.asdict(args)


def _result(contender: Contender, length: int, outcome: Outcome) -> PrefillResult:
    result = PrefillResult(
        engine=contender.engine,
        mode=contender.mode,
        length=length,
        status=outcome.status,
        message=outcome.message,
        loaded_rss_bytes=outcome.loaded_rss_bytes,
        peak_rss_bytes=outcome.peak_rss_bytes,
        runs=len(outcome.runs),
        answer=outcome.answer,
    )
    if outcome.status == "ok" and outcome.seconds is not None:
        result.seconds, result.tokens_per_s = outcome.seconds, length / outcome.seconds
        result.figures = _figures(outcome, outcome.seconds)
    return result


def _figures(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """The best run's figures, held against the highest peak of all runs."""
    own = {key: value for key, value in outcome.runs[0].items() if key not in ("seconds", "peak_rss_bytes")}
    peaks = [run["peak_flops_per_s"] for run in outcome.runs if run.get("peak_flops_per_s")]
    if peaks:
        own["peak_flops_per_s"] = max(peaks)
        own["share_of_peak"] = sum(own["flops"].values()) / seconds / max(peaks)
    return own


def _compare(results: Sequence[PrefillResult]) -> None:
    """Set the ratio of longfill to transformers, and each peer's distance to longfill's answer."""
    own, *peers = results
    rates = [peer.tokens_per_s for peer in peers if peer.engine == "transformers" and peer.tokens_per_s]
    if own.tokens_per_s is not None and rates:
        own.ratio = own.tokens_per_s / max(rates)
    for peer in peers:
        if peer.answer and own.answer:
            peer.largest_difference, peer.same_token = _difference(own.answer["logprobs"], peer.answer["logits"])


def _difference(logprobs: Mapping[str, float], logits: Sequence[float]) -> tuple[float, bool]:
    values = np.asarray(logits, dtype=np.float64)
    normaliser = values.max() + math.log(np.exp(values - values.max()).sum())
    gaps = [abs(values[int(token)] - normaliser - own) for token, own in logprobs.items()]
    best = max(logprobs, key=lambda token: logprobs[token])
    return float(max(gaps)), int(best) == int(values.argmax())
