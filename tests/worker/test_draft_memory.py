"""What drafts take: a layer of weights, a layer of every page, and their part of a step, all in the plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.allocations import Allocations, count_allocations
from tests.oracle.harness import tokens
from tests.tiny import make_checkpoint
from tests.worker.drafts import speculative
from tests.worker.memory_lines import BACKENDS, MIB, every_backend, plan, set_tiles, started, transient

from longfill import LLM, SamplingParams
from longfill.partition import StepRequest
from longfill.worker.sampler import SampleInput

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", mtp=1, max_position_embeddings=2**20, num_hidden_layers=2)
    return path


def run_step(llm: LLM, parts: list[tuple[int, int, int]]) -> Allocations:
    """One step of requests (tokens cached, rows, drafts among them) that share their pages, and count."""
    worker, page_size = llm.engine.worker, llm.engine.worker.layout.page_size
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, logprobs=64)
    requests = []
    for i, (start, count, drafts) in enumerate(parts):
        pages = np.arange(1, 1 - (-(start + count + K) // page_size), dtype=np.int64)
        ids = np.array(tokens(count, i), dtype=np.int64)
        requests.append(StepRequest(str(i), start, count, pages, ids, True, num_drafts=drafts))
    step = worker.plan(requests)
    inputs = [SampleInput(r.request_id, params, 1, 0) for r in step.requests]
    return count_allocations(lambda: worker.execute(step, inputs))


def granted(llm: LLM) -> int:
    drafts = sum(row.bytes for row in llm.memory.rows if row.name in ("draft layer", "draft logits"))
    return transient(llm.memory) + drafts


@every_backend
@pytest.mark.parametrize("small_tiles", [False, True])
def test_the_worst_step_with_drafts_stays_within_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, small_tiles: bool
) -> None:
    """A prompt's last chunk at the longest context beside as many requests with drafts as may run."""
    if small_tiles:  # so that lines which are planned too small have nothing to hide behind
        set_tiles(monkeypatch, SELECT_TILE=2**13, CONTEXT_TILE=512, ATTENTION_TILE_BYTES=2**17)
    longest, seqs, budget = 1024, 16, 256
    args = speculative(K) | BACKENDS[backend]
    llm = started(folder, longest, max_num_seqs=seqs, max_num_batched_tokens=budget, **args)
    chunk = budget - (seqs - 1) * (1 + K)
    decodes = [(longest - 2 - 2 * K, 1 + K, K)] * (seqs - 1)
    step = run_step(llm, [(longest - 1 - K - chunk, chunk, 0), *decodes])
    assert step.peak <= granted(llm), "more than the plan lists"
    assert step.largest <= 16 * MIB, "a large allocation outside the reserved pools"
    if small_tiles:
        assert step.peak >= 0.3 * granted(llm)


@every_backend
def test_a_first_chunk_with_drafts_stays_within_the_plan(folder: Path, backend: str) -> None:
    for rows in ((0, 512, 0), (8, 504, 0), (0, 4, 3)):
        llm = started(
            folder, 1024, max_num_seqs=1, max_num_batched_tokens=512, **speculative(K), **BACKENDS[backend]
        )  # fmt: skip
        assert run_step(llm, [rows]).peak <= granted(llm)


@every_backend
def test_a_draft_layer_costs_memory_only_where_drafts_are_wanted(folder: Path, tmp_path: Path, backend: str) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", max_position_embeddings=2**20, num_hidden_layers=2)
    args = {"max_model_len": 4096} | BACKENDS[backend]
    without, with_layer, drafting = plan(tmp_path, **args), plan(folder, **args), plan(folder, **args, **speculative(K))
    assert without == with_layer
    assert (without.bytes_per_token, drafting.bytes_per_token) == tuple(
        layers * (without.bytes_per_token // 2) for layers in (2, 3)
    )
    names = {row.name for row in drafting.rows} - {row.name for row in without.rows}
    assert names == {"draft layer", "draft logits"}
    engines = [
        started(path, 64, **speculative(k), **BACKENDS[backend])
        for path, k in ((tmp_path, 0), (folder, 0), (folder, K))
    ]
    plain, unused, loaded = ({r.name: r.bytes for r in llm.memory.rows}["weights"] for llm in engines)
    assert plain == unused < loaded
    for llm, planned in zip(engines, (plain, unused, loaded), strict=True):
        assert llm.engine.worker.decoder.weights.num_bytes == planned


def test_logits_of_every_row_that_is_verified_are_planned(folder: Path) -> None:
    def logits(**args: int | dict[str, object]) -> int:
        made = plan(folder, max_model_len=4096, kernel_backend="reference", **args)
        return next(row.bytes for row in made.rows if row.name == "logits")

    one = 3 * torch.float32.itemsize * 512
    assert logits(max_num_seqs=100) == 100 * one
    assert logits(max_num_seqs=100, **speculative(K)) == 100 * (1 + K) * one
    assert logits(max_num_seqs=100, max_num_batched_tokens=250, **speculative(K)) == 250 * one
    # Of each step more in flight they wait, computed, for the host.
    three = {"async_scheduling": True, "max_concurrent_batches": 3}
    assert 3 * logits(max_num_seqs=100, **three, **speculative(K)) == 5 * 100 * (1 + K) * one
