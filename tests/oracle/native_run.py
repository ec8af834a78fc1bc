"""Prefills one prompt and decodes a few tokens, then saves what every row selected and gave.

`python -m tests.oracle.native_run MODEL BACKEND PROMPT_SEED PROMPT_TOKENS OUTPUT`, a process of its own since the
instruction set is one per process, LONGFILL_ISA's. For tests only; imports no transformers, so that it starts fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longfill import LLM, SamplingParams

DECODED = 8


def record(folder: Path, backend: str, seed: int, count: int) -> dict[str, Any]:
    """`selected`: layer -> int32 [L, K]; `logits`: fp32 [L, V]; the greedy `token_ids`, and which `kernel` ran."""
    llm = LLM(
        str(folder), kernel_backend=backend, dtype="float32", indexer_cache_dtype="fp8", skip_tokenizer_init=True,
        max_model_len=count + DECODED,
        memory_budget="4GiB", sparse_indexer_max_logits_mb=8, num_threads=1,
    )  # fmt: skip
    decoder = llm.engine.worker.decoder
    forward = decoder.forward
    logits: list[Tensor] = []
    selected: dict[int, list[Tensor]] = {}

    def every_row(rows: Any) -> Tensor:
        hidden_TC = forward(rows)
        logits.append(decoder.logits(decoder.norm(hidden_TC)))
        return hidden_TC

    decoder.forward = every_row  # type: ignore[method-assign]
    decoder.on_selection = lambda layer, rows_TK: selected.setdefault(layer, []).append(rows_TK.clone())
    prompt = np.random.default_rng(seed).integers(2, 512, count).tolist()
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True))
    return {
        "selected": {layer: torch.cat(parts) for layer, parts in selected.items()},
        "logits": torch.cat(logits),
        "token_ids": output.outputs[0].token_ids,
        "kernels": dict(llm.kernel_paths),
    }


if __name__ == "__main__":
    model, backend, seed, count, output = sys.argv[1:]
    torch.save(record(Path(model), backend, int(seed), int(count)), output)
