"""Layouts of ranks that the tests run, by name, and what is run on them. For tests only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longfill import LLM, SamplingParams

TP, PCP, DCP = "tensor_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"
EP = {"enable_expert_parallel": True}

EXACT: dict[str, dict[str, Any]] = {
    "pcp2": {PCP: 2},
    "pcp2-interleave": {PCP: 2, "pcp_split": "interleave"},
    "pcp2-contiguous": {PCP: 2, "pcp_split": "contiguous"},
    "pcp3": {PCP: 3},
    "pcp3-interleave": {PCP: 3, "pcp_split": "interleave"},
    "pcp4": {PCP: 4},
    "pcp4-contiguous": {PCP: 4, "pcp_split": "contiguous"},
    "ep2": {PCP: 2, **EP, "all2all_backend": "high_throughput"},
    "ep2-low-latency": {PCP: 2, **EP, "all2all_backend": "low_latency"},
    "ep4": {PCP: 4, **EP, "all2all_backend": "high_throughput"},
    "ep4-low-latency": {PCP: 4, **EP, "all2all_backend": "low_latency"},
}
"""Layouts that give the very bits of one rank."""

ROUNDED: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2},
    "tp4": {TP: 4},
    "tp2-ep": {TP: 2, **EP},
    "tp4-ep": {TP: 4, **EP},
    "tp2-pcp2": {TP: 2, PCP: 2},
    "tp2-pcp2-ep": {TP: 2, PCP: 2, **EP},
    "dcp2": {TP: 2, DCP: 2},
    "dcp2-ag_rs": {TP: 2, DCP: 2, "dcp_comm_backend": "ag_rs"},
    "dcp2-interleave16": {TP: 2, DCP: 2, "cp_kv_cache_interleave_size": 16},
    "dcp2-interleave64-ag_rs": {
        TP: 2, DCP: 2, "cp_kv_cache_interleave_size": 64, "dcp_comm_backend": "ag_rs"
    },
    "dcp4": {TP: 4, DCP: 4},
    "dcp4-interleave16-ag_rs": {
        TP: 4, DCP: 4, "cp_kv_cache_interleave_size": 16, "dcp_comm_backend": "ag_rs"
    },
    "dcp4-interleave64": {TP: 4, DCP: 4, "cp_kv_cache_interleave_size": 64},
    "tp4-dcp2": {TP: 4, DCP: 2},
    "pcp2-dcp2": {PCP: 2, DCP: 2},
    "pcp2-dcp2-interleave": {PCP: 2, DCP: 2, "pcp_split": "interleave", "cp_kv_cache_interleave_size": 16},
    "pcp2-dcp2-ag_rs": {PCP: 2, DCP: 2, "dcp_comm_backend": "ag_rs"},
    "tp2-pcp2-dcp4": {TP: 2, PCP: 2, DCP: 4},
    "tp2-pcp2-dcp2": {TP: 2, PCP: 2, DCP: 2, "pcp_split": "contiguous"},
}  # fmt: skip
"""Layouts whose sums have another order, and with `--deterministic` the same."""

DETERMINISTIC = (
    "tp2", "tp4", "tp2-pcp2", "tp4-ep", "dcp2", "dcp4", "tp4-dcp2", "pcp2-dcp2", "tp2-pcp2-dcp4", "tp2-pcp2-dcp2",
)  # fmt: skip


@dataclass
class Answers:
    """What each request gave."""

    token_ids: list[list[int]] = field(default_factory=list)
    digests: list[str | None] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    preemptions: int = 0


def prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, a list for each length; all begin alike, so that pages can be shared."""
    rng = np.random.default_rng(seed)
    longest = rng.integers(3, vocab, max(lengths))
    tails = [rng.integers(3, vocab, n) for n in lengths]
    return [
        np.concatenate([longest[: min(70, n // 2)], tail[min(70, n // 2) :]]).tolist()
        for n, tail in zip(lengths, tails, strict=True)
    ]


def answer(llm: LLM, batches: Sequence[Sequence[list[int]]], max_tokens: int = 6) -> Answers:
    """Generate greedily for each batch of prompts, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    got = Answers()
    for batch in batches:
        for output in llm.generate([list(prompt) for prompt in batch], params):
            completion = output.outputs[0]
            got.token_ids.append(list(completion.token_ids))
            got.digests.append(output.digest)
            assert completion.logprobs is not None
            got.logprobs.append(
                [one[t].logprob for t, one in zip(completion.token_ids, completion.logprobs, strict=True)]
            )
            got.cached.append(output.num_cached_tokens)
    got.preemptions = llm.stats.preemptions
    return got
