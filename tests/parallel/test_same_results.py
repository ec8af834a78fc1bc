"""Many ranks give what one rank gives: the same tokens in every layout, the same bits where the layout promises them.

Lengths cross a page (64 tokens), twice a page, top-k and a step by one either way; each batch is cold first and then
hits, some requests are preempted, and drafts run beside.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.native import needs_native
from tests.parallel.layouts import DETERMINISTIC, EXACT, PCP, ROUNDED, Answers, answer, prompts
from tests.tiny import make_checkpoint

from longfill import LLM

PAGE = 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 129, 700)
STEP = 250
MTP = {"method": "mtp", "num_speculative_tokens": 2}
BOUND = 2e-4
"""Most that a log-probability may differ where sums have another order, in float32: a key may be chosen otherwise."""

VOCABULARY = {"needle": 600, "odd": 131, "dense": 512}
COMMON: dict[str, Any] = {
    "max_model_len": 2048, "memory_budget": "3GiB", "max_num_batched_tokens": STEP, "num_threads": 1, "digest": True,
    "distributed_timeout_seconds": 120.0,
}  # fmt: skip

pytestmark = [needs_native, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models with sizes that no number of ranks divides but where they must (heads)."""
    root = tmp_path_factory.mktemp("models")
    odd = {
        "hidden_size": 60, "intermediate_size": 83, "moe_intermediate_size": 21, "n_routed_experts": 7,
        "num_experts_per_tok": 3, "vocab_size": 131, "kv_lora_rank": 36, "q_lora_rank": 28, "index_topk": 24,
        "num_hidden_layers": 3,
    }  # fmt: skip
    make_checkpoint(root / "odd", "glm_moe_dsa", mtp=1, indexer_types=["full", "shared", "full"], **odd)
    make_checkpoint(root / "dense", "deepseek_v3", seed=1, n_group=1, num_hidden_layers=2)
    return {"needle": Path("needle"), "odd": root / "odd", "dense": root / "dense"}


def page_tokens(layout: dict[str, Any]) -> int:
    """Tokens under one entry of a page table."""
    return PAGE * int(layout.get("decode_context_parallel_size", 1))


class Runs:
    """Answers by model and arguments; those of one rank are made once."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self.one_rank = functools.cache(self._one_rank)

    def _one_rank(self, model: str, what: str, *, deterministic: bool = False, experts: bool = False) -> Answers:
        return self.run(model, what, {"deterministic": deterministic, "enable_expert_parallel": experts})

    def run(self, model: str, what: str, layout: dict[str, Any]) -> Answers:
        """`what`: "plain", "mtp", or "preempted" with the tokens under one entry of a page table."""
        name, _, kind = model.partition("/")
        args = COMMON | layout
        if name != "needle":
            args |= {"skip_tokenizer_init": True}
        if kind:
            args |= {"dtype": kind}
        if what == "mtp":
            args |= {"speculative_config": MTP}
        asked, max_tokens = prompts(LENGTHS, VOCABULARY[name]), 6
        if what.startswith("preempted"):
            unit = int(what.removeprefix("preempted"))
            # Prompts of three pages each, which all grow into a fourth one: there are ten.
            args |= {"num_gpu_blocks_override": 11 * unit // page_tokens(layout), "max_model_len": 4 * unit}
            asked, max_tokens = prompts((3 * unit - 9, 3 * unit - 8, 3 * unit - 7), VOCABULARY[name]), 20
        with LLM(str(self._folders[name]), **args) as llm:
            return answer(llm, [asked, asked[-2:]], max_tokens=max_tokens)


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> Runs:
    torch.set_num_threads(1)
    return Runs(folders)


def check_close(got: Answers, want: Answers, bound: float = BOUND) -> None:
    assert got.token_ids == want.token_ids
    gaps = [abs(a - b) for g, w in zip(got.logprobs, want.logprobs, strict=True) for a, b in zip(g, w, strict=True)]
    assert max(gaps) <= bound


@pytest.mark.parametrize("layout", EXACT)
def test_rows_over_ranks_and_experts_over_ranks_give_the_same_bits(runs: Runs, layout: str) -> None:
    got, want = runs.run("needle", "plain", EXACT[layout]), runs.one_rank("needle", "plain")
    assert got.token_ids == want.token_ids
    assert got.digests == want.digests
    assert got.cached == want.cached


@pytest.mark.parametrize("layout", ["pcp2", "pcp3-interleave", "ep2", "ep4-low-latency"])
@pytest.mark.parametrize("what", ["plain", "mtp"])
def test_a_model_of_odd_sizes_gives_the_same_bits(runs: Runs, layout: str, what: str) -> None:
    got, want = runs.run("odd", what, EXACT[layout]), runs.one_rank("odd", what)
    assert (got.token_ids, got.digests) == (want.token_ids, want.digests)


@pytest.mark.parametrize("form", ["high_throughput", "low_latency"])
@pytest.mark.parametrize("shared", [0, 1])
def test_ranks_without_an_expert_give_the_same_bits(tmp_path: Path, shared: int, form: str) -> None:
    make_checkpoint(tmp_path / "few", "glm_moe_dsa", n_routed_experts=3, num_experts_per_tok=2)
    if not shared:
        weights, config = tmp_path / "few/model.safetensors", tmp_path / "few/config.json"
        save_file({name: x for name, x in load_file(weights).items() if "shared_experts" not in name}, weights)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"n_shared_experts": 0}))

    def run(**layout: Any) -> Answers:
        with LLM(str(tmp_path / "few"), **(COMMON | {"skip_tokenizer_init": True} | layout)) as llm:
            return answer(llm, [prompts((1, 65, 300), 512)])

    got = run(**{PCP: 4, "enable_expert_parallel": True, "all2all_backend": form})
    want = run()
    assert (got.token_ids, got.digests) == (want.token_ids, want.digests)


@pytest.mark.parametrize("layout", ["pcp2", "pcp4-contiguous", "ep2"])
def test_preempted_requests_give_the_same_bits(runs: Runs, layout: str) -> None:
    got, want = runs.run("needle", "preempted64", EXACT[layout]), runs.one_rank("needle", "preempted64")
    assert got.preemptions > 0
    assert (got.token_ids, got.digests) == (want.token_ids, want.digests)


@pytest.mark.parametrize("layout", ROUNDED)
def test_split_sums_and_split_keys_give_the_same_tokens(runs: Runs, layout: str) -> None:
    got = runs.run("needle/float32", "plain", ROUNDED[layout])
    check_close(got, runs.one_rank("needle/float32", "plain"))
    unit = page_tokens(ROUNDED[layout])
    assert all(cached % unit == 0 for cached in got.cached)
    assert got.cached[-1] == (700 - 1) // unit * unit


@pytest.mark.parametrize("layout", ["tp2", "tp4-ep", "dcp2-ag_rs", "dcp4", "pcp2-dcp2", "tp2-pcp2-dcp4"])
@pytest.mark.parametrize("model", ["odd", "dense"])
def test_models_of_odd_sizes_and_without_an_indexer_give_the_same_tokens(runs: Runs, model: str, layout: str) -> None:
    check_close(runs.run(model, "plain", ROUNDED[layout]), runs.one_rank(model, "plain"))


@pytest.mark.parametrize("layout", ["tp2", "tp4-dcp2", "pcp2-dcp2"])
def test_drafts_beside_them(runs: Runs, layout: str) -> None:
    check_close(runs.run("needle/float32", "mtp", ROUNDED[layout]), runs.one_rank("needle/float32", "mtp"))


@pytest.mark.parametrize("layout", ["tp2", "tp4-dcp2", "pcp2-dcp2", "tp2-pcp2-dcp4"])
def test_preempted_requests_with_split_keys_end_like_others(runs: Runs, layout: str) -> None:
    """SCH-04: pages, hits and allocation count in one unit, however many ranks share a page."""
    what = f"preempted{page_tokens(ROUNDED[layout])}"
    got = runs.run("needle/float32", what, ROUNDED[layout])
    assert got.preemptions > 0
    check_close(got, runs.one_rank("needle/float32", what))


@pytest.mark.parametrize("layout", DETERMINISTIC)
def test_deterministic_sums_give_the_bits_of_one_rank(runs: Runs, layout: str) -> None:
    got = runs.run("needle", "plain", ROUNDED[layout] | {"deterministic": True})
    # Whole experts are added one by one, and parts of experts part by part: that is the option, not the ranks.
    want = runs.one_rank("needle", "plain", deterministic=True, experts="enable_expert_parallel" in ROUNDED[layout])
    assert (got.token_ids, got.digests) == (want.token_ids, want.digests)


@pytest.mark.parametrize("layout", ["tp4", "dcp2", "tp2-pcp2-dcp4"])
@pytest.mark.parametrize("what", ["mtp", "plain"])
def test_deterministic_sums_of_odd_sizes_give_the_bits_of_one_rank(runs: Runs, what: str, layout: str) -> None:
    got = runs.run("odd", what, ROUNDED[layout] | {"deterministic": True})
    want = runs.one_rank("odd", what, deterministic=True)
    assert (got.token_ids, got.digests) == (want.token_ids, want.digests)


def test_deterministic_sums_are_close_to_the_others(runs: Runs) -> None:
    exact = runs.one_rank("needle/float32", "plain", deterministic=True)
    check_close(exact, runs.one_rank("needle/float32", "plain"))
