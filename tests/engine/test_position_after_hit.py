"""After a prefix hit a request goes on at the position where the hit ends, with the tokens of a cold run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.oracle.harness import engine, tokens
from tests.tiny import DSA_FAMILIES, make_checkpoint

from longfill import LLM, SamplingParams

PAGE = 8
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def positions_of(llm: LLM, prompt: list[int]) -> tuple[list[int], Any]:
    """Positions of all rows that a request computes, and its output."""
    decoder = llm.engine.worker.decoder
    forward = decoder.forward
    seen: list[int] = []

    def spy(rows: Any, **given: Any) -> Any:
        seen.extend(rows.attend.positions_T.tolist())
        return forward(rows, **given)

    decoder.forward = spy  # type: ignore[method-assign]
    try:
        return seen, llm.generate(prompt, GREEDY)[0]
    finally:
        decoder.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("family", DSA_FAMILIES)
def test_pfx_06_the_first_new_token_sits_where_the_hit_ends(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    prompt = tokens(60)
    cold, want = positions_of(engine(tmp_path, block_size=PAGE, enable_prefix_caching=False, digest=True), prompt)
    assert want.digest
    assert cold == list(range(64))
    for shared in (0, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 59, 60):
        llm = engine(tmp_path, block_size=PAGE, digest=True)
        if shared:
            llm.generate(prompt[:shared], SamplingParams(temperature=0, max_tokens=1))
        warm, out = positions_of(llm, prompt)
        hit = min(shared, 59) // PAGE * PAGE
        assert out.num_cached_tokens == hit
        assert warm == list(range(hit, 64)), f"after {hit} cached tokens"
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        assert out.digest == want.digest, f"after {hit} cached tokens"


def test_pfx_06_a_hit_on_another_prompts_prefix_stops_where_the_prompts_part(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    mine = tokens(50, seed=1)
    for common in (0, 15, 16, 17, 40):
        other = mine[:common] + tokens(50 - common, seed=2)
        llm = engine(tmp_path, block_size=PAGE, digest=True)
        cold = engine(tmp_path, block_size=PAGE, enable_prefix_caching=False, digest=True)
        want = cold.generate(mine, GREEDY)[0]
        llm.generate(other, GREEDY)
        out = llm.generate(mine, GREEDY)[0]
        assert out.num_cached_tokens == common // PAGE * PAGE
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        assert out.digest == want.digest is not None


def test_two_salts_never_share_a_page(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    llm = engine(tmp_path, block_size=PAGE)
    prompt = tokens(50)
    cached = []
    for salt in ("a", "b", "a", ""):
        out = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)[0]
        cached.append(out.num_cached_tokens)
    assert cached == [0, 0, 48, 0]
