"""Cases of `index_topk` over what the bundled model's own layers ask of it, with the int8 screen and without.

May import the engine and the bundled model. Invariant: queries and keys are those of the last rows of a prefill that
really ran; random data says nothing about how many keys pass a screen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from longfill.bench.cases_index import index_work
from longfill.bench.work import Case, Setting, Work
from longfill.engine.llm import LLM
from longfill.kernels.interface import ScoredRows, ScreenCounts
from longfill.needle.haystack import build_haystack
from longfill.request import SamplingParams

STEP = 2048
"""Rows of a step, and of a case."""


class _Recorder:
    """An index backend that keeps what each full-indexer layer was last asked with several rows."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls: dict[int, tuple[Any, ...]] = {}

    def index_topk(self, q_TID: Any, w_TI: Any, cache: Any, chunks: Any, *rest: Any) -> ScreenCounts:
        if q_TID.shape[0] > 1:
            self.calls[cache.values_NBX.data_ptr()] = (q_TID.clone(), w_TI.clone(), cache, chunks)
        counts: ScreenCounts = self.backend.index_topk(q_TID, w_TI, cache, chunks, *rest)
        return counts


def needle_case(tokens: int, layer: int, screen: str, setting: Setting) -> Work:
    """Full-indexer layer number `layer` in the last whole step of a `tokens` long text."""
    length = setting.size(tokens, least=2 * STEP)
    # The default budget: what this process holds already counts, and other cases have left much behind.
    llm = LLM(
        "needle",
        max_model_len=length,
        max_num_batched_tokens=STEP,
        max_num_seqs=1,
        num_threads=setting.threads,
        kernel_backend="cpu",
    )
    attend = llm.engine.worker.decoder.attend
    recorder = _Recorder(attend.index_backend)
    attend.index_backend = recorder  # type: ignore[assignment]
    llm.generate([_prompt(llm, length)], SamplingParams(temperature=0, max_tokens=1))
    q_TID, w_TI, cache, chunks = list(recorder.calls.values())[layer]
    spans: list[ScoredRows] = [rows for chunk in chunks for rows in chunk]
    scored = ScoredRows(spans[0].request, 0, q_TID.shape[0], spans[0].first_position)
    pages = scored.request.pages
    keys_NBD = cache.values_NBX[pages].view(torch.float8_e4m3fn).float() * cache.scales_NB[pages][..., None]
    keys_bf16 = keys_NBD.flatten(0, 1)[: scored.first_position + scored.num_rows].bfloat16()
    topk = llm.engine.worker.kernels.topk
    assert topk is not None
    return index_work(q_TID, w_TI, cache, scored, keys_bf16, topk, screen, setting)


def _prompt(llm: LLM, length: int) -> list[int]:
    """The first `length` - 1 tokens of a text of facts and filler."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    text = build_haystack(length - 16, seed=0, count=count, reserve=1)
    return [int(i) for i in tokenizer.encode(text.text + text.question(text.facts[0]))][: length - 1]


def _cases(tokens: int) -> list[Case]:
    return [
        Case(
            "index_topk",
            f"needle's own, {tokens:,} tokens, layer {layer}, {note}",
            partial(needle_case, tokens, layer, screen),
        )
        for layer in (0, 1)
        for screen, note in (("off", "no screen"), ("auto", "screen auto"))
    ]


CASES = (*_cases(65_536), *_cases(131_072))
