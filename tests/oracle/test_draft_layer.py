"""The draft layer equals transformers' decoder layer over the same inputs, however the prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longfill import LLM, SamplingParams
from tests.oracle.draft_oracle import DraftOracle
from tests.oracle.harness import engine, tokens
from tests.tiny import edit_tensors, make_checkpoint

K = 3
LENGTH = 61
"""Above index_topk (16), so that most rows are sparse; no multiple of a page or a chunk."""
FAMILIES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"index_n_heads": 16},
    "deepseek_v32": {"index_n_heads": 16},
    "deepseek_v3": {},
}


def engine_drafts(llm: LLM, prompt: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """As `DraftOracle.drafts`, from the engine: of a prompt's first step that samples."""
    worker = llm.engine.worker
    layer = worker._drafter._layer
    forward, head, execute = layer.forward, layer.logits, worker.execute
    rows: dict[int, Tensor] = {}
    logits: list[Tensor] = []
    found: list[int] = []

    def keep_rows(step: Any, hidden_TC: Tensor) -> Tensor:
        y_TC = forward(step, hidden_TC)
        rows.update(zip(step.attend.positions_T.tolist(), y_TC.clone(), strict=True))
        return y_TC

    def keep_logits(z_SC: Tensor) -> Tensor:
        logits.append(head(z_SC).clone())
        return logits[-1]

    def keep_tokens(*args: Any) -> Any:
        result = execute(*args)
        for name, sampled in result.sampled.items():
            found.extend([sampled[0].token_id, *result.drafts[name]])
        return result

    layer.forward, layer.logits, worker.execute = keep_rows, keep_logits, keep_tokens
    try:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    finally:
        layer.forward, layer.logits, worker.execute = forward, head, execute
    return found, torch.stack([rows[position] for position in sorted(rows)]), torch.cat([x for x in logits if len(x)])


def start(folder: Path, count: int = K, **args: Any) -> LLM:
    return engine(folder, speculative_config={"method": "mtp", "num_speculative_tokens": count}, **args)


def assert_same(got: tuple[list[int], Tensor, Tensor], want: tuple[list[int], Tensor, Tensor]) -> None:
    assert got[0] == want[0]
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_draft_rows_and_drafts_equal_transformers_however_the_prompt_is_cut(
    tmp_path: Path, family: str, seed: int
) -> None:
    model = make_checkpoint(tmp_path / "model", family, seed, mtp=1, **FAMILIES[family])
    oracle = DraftOracle(tmp_path / "model", model, tmp_path / "oracle")
    prompt = tokens(LENGTH, seed)
    want = oracle.drafts(prompt, K)
    assert want[1].shape[0] == LENGTH + K - 1
    for page, chunk in ((4, 4096), (64, 1), (4, 7), (64, 30), (1, LENGTH - 1)):
        llm = start(tmp_path / "model", block_size=page, max_num_batched_tokens=chunk, max_num_seqs=1)
        assert_same(engine_drafts(llm, prompt), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_layer_that_borrows_embedding_and_head_equals_transformers(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path / "model", family, mtp=1, **FAMILIES[family])
    borrowed = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    own = [f"model.layers.4.{name}.weight" for name in borrowed]
    prompt = tokens(40)
    edit_tensors(tmp_path / "model", remove=own)
    oracle = DraftOracle(tmp_path / "model", model, tmp_path / "oracle")
    for name, lender in zip(own, borrowed.values(), strict=True):
        oracle.tensors[name] = oracle.tensors[f"{lender}.weight"]
    assert_same(engine_drafts(start(tmp_path / "model"), prompt), oracle.drafts(prompt, K))


def test_a_shared_indexer_in_front_of_the_draft_layer_is_not_its_own(tmp_path: Path) -> None:
    types = ["full", "shared", "shared", "shared"]
    model = make_checkpoint(tmp_path / "model", "glm_moe_dsa", mtp=1, index_n_heads=16, indexer_types=types)
    oracle = DraftOracle(tmp_path / "model", model, tmp_path / "oracle")
    prompt = tokens(LENGTH)
    llm = start(tmp_path / "model", max_num_batched_tokens=7)
    assert_same(engine_drafts(llm, prompt), oracle.drafts(prompt, K))


@pytest.mark.parametrize("path", ["paged", "workspace"])
@pytest.mark.parametrize("force_mqa", [False, True])
def test_every_attention_path_gives_the_same_drafts(tmp_path: Path, path: str, force_mqa: bool) -> None:
    model = make_checkpoint(tmp_path / "model", "glm_moe_dsa", mtp=1, index_n_heads=16)
    oracle = DraftOracle(tmp_path / "model", model, tmp_path / "oracle")
    prompt = tokens(LENGTH)
    llm = start(tmp_path / "model", attention_path=path, sparse_mla_force_mqa=force_mqa, max_num_batched_tokens=33)
    assert_same(engine_drafts(llm, prompt), oracle.drafts(prompt, K))
