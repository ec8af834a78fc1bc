"""Runs the engine and transformers on the same tiny checkpoint and hands back what both computed for every row.

For tests only; may import transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from longfill import LLM, SamplingParams

BUDGET = "4GiB"
"""Counts what the process already holds, the oracle's leftovers too; the pool takes no more than the limits ask for."""


@dataclass
class Rows:
    """Per position: fp32 logits [L, V] and, by full-indexer layer, the selected positions as sets."""

    logits: Tensor
    selected: dict[int, list[frozenset[int]]] = field(default_factory=dict)


DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "memory_budget": BUDGET,
    "sparse_indexer_max_logits_mb": 1,
    "num_threads": 1,
}


def engine(folder: Path, **args: Any) -> LLM:
    """An engine for exactness: fp32 end to end, small limits."""
    return LLM(str(folder), **(DEFAULTS | args))


def run(llm: LLM, token_ids: Sequence[int]) -> Rows:
    """Prefill one prompt and return what its *computed* rows gave (after a prefix hit: the rest of the prompt)."""
    decoder = llm.engine.worker.decoder
    forward = decoder.forward
    logits: list[Tensor] = []
    selected: dict[int, list[frozenset[int]]] = {}

    def every_row(rows: Any) -> Tensor:
        hidden_TC = forward(rows)
        logits.append(decoder.logits(decoder.norm(hidden_TC)))
        return hidden_TC

    def keep(layer: int, selection_TK: Tensor) -> None:
        selected.setdefault(layer, []).extend(frozenset(row) - {-1} for row in selection_TK.tolist())

    decoder.forward = every_row  # type: ignore[method-assign]
    decoder.on_selection = keep
    try:
        llm.generate(list(token_ids), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    finally:
        decoder.forward = forward  # type: ignore[method-assign]
        decoder.on_selection = None
    return Rows(torch.cat(logits), selected)


@torch.no_grad()
def oracle(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> Rows:
    """The same from transformers, whole prompt at once."""
    selected: dict[int, list[frozenset[int]]] = {}
    hooks = []
    for layer, block in enumerate(model.model.layers):
        indexer = getattr(block.self_attn, "indexer", None)
        if indexer is not None:

            def keep(_module: Any, _args: Any, indices: Tensor, layer: int = layer) -> None:
                rows = indices[0].tolist()
                # It always returns k indices; those beyond a row's own position are masked later.
                selected[layer] = [frozenset(i for i in row if i <= at) for at, row in enumerate(rows)]

            hooks.append(indexer.register_forward_hook(keep))
    try:
        logits = model(torch.tensor([list(token_ids)])).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    return Rows(logits, selected)


def assert_same(got: Rows, want: Rows, *, tolerance: float = 1e-4) -> None:
    """Logits within `tolerance` of the largest, and equal selections; `got` may hold only the last rows."""
    first = want.logits.shape[0] - got.logits.shape[0]
    error = (got.logits - want.logits[first:]).abs().max() / want.logits.abs().max()
    assert error <= tolerance, f"logits differ by {error:.2e}"
    assert got.selected.keys() == want.selected.keys()
    for layer, rows in got.selected.items():
        for position, row in enumerate(rows, first):
            assert row == want.selected[layer][position], f"layer {layer}, position {position}"


def tokens(count: int, seed: int = 0, vocabulary: int = 512) -> list[int]:
    """Random token ids without the first two (bos, eos)."""
    return np.random.default_rng(seed).integers(2, vocabulary, count).tolist()
