"""The bundled model answers exactly, however its prompt is cut, and needs every part of the architecture to do so."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from longfill import LLM
from longfill.cli.needle_task import ANSWER_PARAMS, is_exact, prompt_for, text_with_facts
from longfill.kernels.interface import LatentCache, StepRows
from longfill.needle.haystack import Fact, Haystack

CONTEXT = 4096


def needle(**args: Any) -> LLM:
    defaults: dict[str, Any] = {"max_model_len": CONTEXT + 16, "memory_budget": "4GiB", "num_threads": 1}
    return LLM("needle", **(defaults | {"sparse_indexer_max_logits_mb": 16} | args))


def haystack(llm: LLM, seed: int = 1) -> tuple[Haystack, list[Fact]]:
    text = text_with_facts(llm, CONTEXT, seed=seed)
    return text, list(text.facts)[:8]


def exact_answers(llm: LLM, text: Haystack, facts: list[Fact]) -> int:
    outputs = llm.generate([prompt_for(text, fact) for fact in facts], ANSWER_PARAMS)
    return sum(is_exact(output, fact) for output, fact in zip(outputs, facts, strict=True))


def test_it_uses_the_whole_architecture() -> None:
    config = needle().model_config
    assert config.model_type == "glm_moe_dsa"
    assert config.max_position_embeddings == 1_048_576
    assert config.indexer is not None
    assert config.indexer.topk <= 64
    assert set(config.indexer.types) == {"full", "shared"}
    assert sum(config.moe_layers) >= 3


def test_it_holds_a_draft_layer_that_shares_embedding_and_head() -> None:
    weights = needle(speculative_config={"method": "mtp", "num_speculative_tokens": 1}).engine.worker.decoder.weights
    draft = weights.mtp
    assert draft is not None
    assert draft.layer.attention.indexer is not None
    assert draft.embed is weights.embed
    assert draft.head is weights.lm_head


def test_it_answers_exactly_at_every_depth() -> None:
    llm = needle()
    text, facts = haystack(llm)
    prompt = llm.engine.tokenizer.encode(prompt_for(text, facts[0]))  # type: ignore[union-attr]
    assert len(prompt) == CONTEXT
    assert exact_answers(llm, text, facts) == len(facts)


def test_the_answer_is_lost_without_the_shared_layers() -> None:
    llm = needle()
    text, facts = haystack(llm)
    decoder = llm.engine.worker.decoder
    attend = decoder.attend
    indexer = llm.model_config.indexer
    assert indexer is not None
    shared = [decoder.caches.latent[i] for i, kind in enumerate(indexer.types) if kind == "shared"]

    class WithoutShared:
        begin = staticmethod(attend.begin)
        select = staticmethod(attend.select)

        def __call__(self, q_THX: Tensor, cache: LatentCache, block: StepRows, span: slice, out_THR: Tensor) -> None:
            attend(q_THX, cache, block, span, out_THR)
            if any(cache is layer for layer in shared):
                out_THR.zero_()

    decoder.attend = WithoutShared()  # type: ignore[assignment]
    assert exact_answers(llm, text, facts) == 0


@pytest.mark.parametrize("budget", [64, 333, 4096, 16384])
def test_the_same_tokens_for_every_step_budget(budget: int) -> None:
    llm = needle(max_num_batched_tokens=budget, digest=True)
    text, facts = haystack(llm, seed=2)
    [output] = llm.generate(prompt_for(text, facts[0]), ANSWER_PARAMS)
    [again] = needle(digest=True).generate(prompt_for(text, facts[0]), ANSWER_PARAMS)
    assert output.outputs[0].token_ids == again.outputs[0].token_ids
    assert output.digest == again.digest
    assert is_exact(output, facts[0])
