"""A step whose layers take its rows a few at a time gives the bits of one that takes them all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native import needs_native
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import LLM, SamplingParams
from longfill.worker import memory

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 40, 83)
"""Prompt tokens of requests in one step, around top-k (16): blocks end within requests and within their dense rows."""
SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "paged": ("deepseek_v32", torch.bfloat16, {}, {}),
    "shared selections": ("glm_moe_dsa", torch.float32, SHARED, {}),
    "workspace": ("glm_moe_dsa", torch.float32, {}, {"attention_path": "workspace"}),
    "force mqa": ("deepseek_v32", torch.bfloat16, {}, {"sparse_mla_force_mqa": True}),
    "dense": ("deepseek_v3", torch.bfloat16, {}, {}),
    "reference indexer": ("deepseek_v32", torch.float32, {"index_head_dim": 24}, {}),
    "reference": ("deepseek_v32", torch.float32, {}, {"kernel_backend": "reference"}),
}


def run(folder: Path, args: dict[str, Any]) -> tuple[LLM, list[tuple[list[int], str | None]]]:
    llm = engine(folder, **({"dtype": "auto", "digest": True, "max_num_seqs": 8, "max_num_batched_tokens": 512} | args))
    outputs = llm.generate([tokens(length, seed=i) for i, length in enumerate(LENGTHS)], GREEDY)
    return llm, [(out.outputs[0].token_ids, out.digest) for out in outputs]


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_same_bits_for_every_number_of_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    family, dtype, fields, args = CASES[case]
    make_checkpoint(tmp_path, family, dtype=dtype, **fields)
    llm, want = run(tmp_path, args)
    assert llm.engine.worker.decoder.block_rows >= sum(LENGTHS)
    monkeypatch.setattr(memory, "BLOCK_BYTES", 1)
    for rows in (3, 7):
        monkeypatch.setattr(memory, "MIN_BLOCK_ROWS", rows)
        llm, got = run(tmp_path, args)
        assert llm.engine.worker.decoder.block_rows == (512 if case == "workspace" else rows)
        assert got == want
