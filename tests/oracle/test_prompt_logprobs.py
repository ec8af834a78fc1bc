"""Log-probabilities of prompts equal the log-softmax of transformers' logits, however the prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longfill import SamplingParams
from tests.oracle.harness import engine, oracle, tokens
from tests.tiny import FAMILIES, make_checkpoint

NUM = 4
TOLERANCE = 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_equal_transformers(tmp_path: Path, family: str) -> None:
    prompt = tokens(70)
    # Many heads: with few, ReLU makes exact zeros, which transformers breaks as torch.topk happens to.
    heads = {"index_n_heads": 16} if family in ("glm_moe_dsa", "deepseek_v32") else {}
    logits_TV = oracle(make_checkpoint(tmp_path, family, **heads), prompt).logits
    want_TV = torch.log_softmax(logits_TV.double(), -1)
    for chunk in (1, 7, 64):
        llm = engine(tmp_path, max_num_batched_tokens=chunk, max_num_seqs=1)
        [out] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM))
        assert out.prompt_logprobs is not None
        first, *others = out.prompt_logprobs
        assert first is None
        for want_V, token, entry in zip(want_TV, prompt[1:], others, strict=False):
            assert entry is not None
            assert {k: v.logprob for k, v in entry.items()} == pytest.approx(
                {k: float(want_V[k]) for k in entry}, abs=TOLERANCE
            )
            # Tokens that are as likely as the tolerance may stand in either order.
            likelier = int((want_V > want_V[token] + TOLERANCE).sum())
            assert likelier < entry[token].rank <= 1 + int((want_V >= want_V[token] - TOLERANCE).sum())
            best = sorted(entry.values(), key=lambda each: each.rank)[:NUM]
            assert [each.logprob for each in best] == pytest.approx(want_V.topk(NUM).values.tolist(), abs=TOLERANCE)
        assert len(others) == len(prompt) - 1
