"""Prefixes are found in the unit that pages are made of, however many ranks share one (known fault PFX-01)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.native import needs_native
from tests.parallel.layouts import DCP, PCP, TP, prompts

from longfill import LLM, SamplingParams
from longfill.request import RequestOutput

SHARED, BLOCK = 150, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pcp2": {PCP: 2},
    "dcp2": {TP: 2, DCP: 2},
    "dcp4": {TP: 4, DCP: 4},
    "pcp2-dcp2": {PCP: 2, DCP: 2},
}

pytestmark = [needs_native, pytest.mark.usefixtures("forked_ranks")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pfx_01_a_hit_is_no_longer_than_what_prompts_share_and_whole_pages(layout: str) -> None:
    first, second, tail = prompts((190, 200, 60), 600)
    second = first[:SHARED] + [token for token in tail if token != first[SHARED]][:50]
    unit = BLOCK * LAYOUTS[layout].get(DCP, 1)
    warm = generate(LAYOUTS[layout], [first, second])
    cold = generate(LAYOUTS[layout], [second], enable_prefix_caching=False)
    assert warm[1].num_cached_tokens == SHARED // unit * unit
    assert warm[1].outputs[0].token_ids == cold[0].outputs[0].token_ids


def generate(layout: dict[str, Any], asked: list[list[int]], **args: Any) -> list[RequestOutput]:
    """One prompt after the other, in float32: how keys are merged must not decide between tokens."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    common: dict[str, Any] = {
        "dtype": "float32", "block_size": BLOCK, "max_model_len": 512, "memory_budget": "3GiB", "num_threads": 1,
    }  # fmt: skip
    with LLM("needle", **common, **layout, **args) as llm:
        return [llm.generate([prompt], params)[0] for prompt in asked]
