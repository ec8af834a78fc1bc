"""Prompts of many steps, in every layout: 3,671 tokens behind one cached page, and 20,000 tokens beside them.

Each layout is also held to its predicted bytes, step by step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import needs_native
from tests.parallel.layouts import DCP, DETERMINISTIC, EXACT, ROUNDED, TP, Answers, answer
from tests.parallel.recorded import record
from tests.tiny import make_checkpoint

from longfill import LLM
from longfill.partition.comm import step_comm
from longfill.worker.comm_sizes import comm_sizes

PAGE = 64
BOUND = 2e-3
"""Most that a log-probability may differ where sums have another order: a key may be chosen otherwise."""
COMMON: dict[str, Any] = {
    "max_model_len": 20_480, "memory_budget": "4GiB", "max_num_batched_tokens": 2048, "num_threads": 1, "digest": True,
    "distributed_timeout_seconds": 300.0,
}  # fmt: skip

pytestmark = [needs_native, pytest.mark.usefixtures("forked_ranks")]


@dataclass(frozen=True)
class Model:
    """A checkpoint and the tokens of its vocabulary."""

    folder: str
    vocab: int


def batches(unit: int, vocab: int, *, long: bool) -> list[list[list[int]]]:
    """One unit of the cache; a prompt that goes on from it, with `long` beside one that comes again afterwards."""
    rng = np.random.default_rng(6)
    first = rng.integers(3, vocab, unit).tolist()
    behind = first + rng.integers(3, vocab, 3671 - unit).tolist()
    longer = rng.integers(3, vocab, 20_000).tolist()
    return [[[*first, 5]], [behind, longer], [longer]] if long else [[[*first, 5]], [behind]]


class Runs:
    """Answers by model and arguments; those of one rank are made once for each unit of the cache."""

    def __init__(self, odd: Path) -> None:
        self.models = {"needle": Model("needle", 600), "odd": Model(str(odd), 131)}
        self.one_rank = functools.cache(self._one_rank)

    def _one_rank(
        self, model: str, unit: int, dtype: str, *, deterministic: bool, experts: bool, long: bool
    ) -> Answers:
        layout = {"dtype": dtype, "deterministic": deterministic, "enable_expert_parallel": experts}
        return self.run(model, unit, layout, long=long)

    def run(self, model: str, unit: int, layout: dict[str, Any], *, long: bool) -> Answers:
        chosen = self.models[model]
        tokenizer = {} if model == "needle" else {"skip_tokenizer_init": True}
        with LLM(chosen.folder, **(COMMON | tokenizer | layout)) as llm:
            steps = record(llm.engine)
            got = answer(llm, batches(unit, chosen.vocab, long=long))
            worker = llm.engine.worker
            sizes = comm_sizes(worker.args, worker.config, worker.layout)
            for plan, comm in zip(steps.plans, steps.comm, strict=True):
                want = dict(step_comm(plan, worker.cut, sizes))
                # Where a row goes at high throughput is the router's choice, which no plan knows.
                seen = {name: size for name, size in comm.items() if name in want or not name.startswith("expert_")}
                assert seen == want
            shares = layout.get(TP, 1) > 1 and layout.get(DCP, 1) == 1
            assert ("selection" in llm.stats.comm) == shares
        return got

    def check(self, model: str, layout: dict[str, Any], *, long: bool = True) -> tuple[Answers, Answers]:
        """What a layout gave and what one rank gives."""
        unit = PAGE * int(layout.get(DCP, 1))
        deterministic = bool(layout.get("deterministic"))
        experts = deterministic and bool(layout.get("enable_expert_parallel"))
        got = self.run(model, unit, layout, long=long)
        dtype = layout.get("dtype", "auto")
        want = self.one_rank(model, unit, dtype, deterministic=deterministic, experts=experts, long=long)
        assert [cached // unit for cached in got.cached] == ([0, 1, 0, 19_999 // unit] if long else [0, 1])
        assert got.token_ids == want.token_ids
        return got, want


def check_close(got: Answers, want: Answers) -> None:
    gaps = [abs(a - b) for g, w in zip(got.logprobs, want.logprobs, strict=True) for a, b in zip(g, w, strict=True)]
    assert max(gaps) <= BOUND


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    odd = {
        "hidden_size": 60, "intermediate_size": 83, "moe_intermediate_size": 21, "n_routed_experts": 7,
        "num_experts_per_tok": 3, "vocab_size": 131, "kv_lora_rank": 36, "q_lora_rank": 28, "index_topk": 24,
        "num_hidden_layers": 3, "max_position_embeddings": 20_480,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "odd"
    make_checkpoint(folder, "glm_moe_dsa", indexer_types=["full", "shared", "full"], **odd)
    return Runs(folder)


@pytest.mark.parametrize("layout", ["pcp2", "ep2"])
def test_a_prompt_behind_a_cached_page_gives_the_same_bits(runs: Runs, layout: str) -> None:
    got, want = runs.check("needle", EXACT[layout], long=False)
    assert got.digests == want.digests


@pytest.mark.parametrize("layout", ["tp2", "tp2-pcp2", "dcp2"])
def test_a_prompt_behind_a_cached_page_gives_the_same_tokens_and_scoring_is_shared(runs: Runs, layout: str) -> None:
    got, want = runs.check("needle", ROUNDED[layout] | {"dtype": "float32"}, long=False)
    check_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXACT)
@pytest.mark.parametrize("model", ["needle", "odd"])
def test_the_same_bits(runs: Runs, model: str, layout: str) -> None:
    got, want = runs.check(model, EXACT[layout])
    assert got.digests == want.digests


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROUNDED)
@pytest.mark.parametrize("model", ["needle", "odd"])
def test_the_same_tokens(runs: Runs, model: str, layout: str) -> None:
    got, want = runs.check(model, ROUNDED[layout] | {"dtype": "float32"})
    check_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", DETERMINISTIC)
@pytest.mark.parametrize("model", ["needle", "odd"])
def test_the_same_bits_with_deterministic_sums(runs: Runs, model: str, layout: str) -> None:
    got, want = runs.check(model, ROUNDED[layout] | {"deterministic": True})
    assert got.digests == want.digests
