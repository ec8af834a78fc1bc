"""The parts of the weights that ranks hold: together they are the whole, and their bytes are known beforehand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.native import needs_native
from tests.tiny import make_checkpoint

from longfill.config import DETERMINISTIC_SLICES, EngineArgs
from longfill.errors import ConfigError
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.kernels.select import choose_kernels, make_backends
from longfill.models.config import ModelConfig
from longfill.models.loading import load_model
from longfill.models.shards import WeightShards, check_heads
from longfill.models.weight_bytes import weight_bytes
from longfill.models.weights import MoeWeights


def ranks(size: int, **given: Any) -> list[WeightShards]:
    return [WeightShards(tp_rank=rank, tp_size=size, ep_rank=rank, ep_size=size, **given) for rank in range(size)]


@given(width=st.integers(1, 100), size=st.sampled_from([1, 2, 3, 4, 8]), deterministic=st.booleans())
def test_parts_of_all_ranks_are_the_whole_in_order(width: int, size: int, deterministic: bool) -> None:
    if deterministic and DETERMINISTIC_SLICES % size:
        deterministic = False
    every = ranks(size, deterministic=deterministic)
    assert [i for shards in every for i in shards.outputs(width)] == list(range(width))
    slices = [part for shards in every for part in shards.slices(width)]
    assert [i for part in slices for i in part] == list(range(width))
    if deterministic:
        assert slices == WeightShards(deterministic=True).slices(width), "whatever the number of ranks"


@given(experts=st.integers(1, 40), size=st.integers(1, 8))
def test_experts_of_all_ranks_are_all_experts(experts: int, size: int) -> None:
    held = [shards.experts(experts) for shards in ranks(size, expert_parallel=True)]
    assert [e for part in held for e in part] == list(range(experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert all(a.stop == b.start for a, b in pairwise(held))


def test_heads_that_cannot_be_split_evenly_are_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4: the model has 6 heads .* give one of 1, 2, 3, 6"):
        check_heads(6, 4)


MODELS: dict[str, dict[str, Any]] = {
    "glm": {"family": "glm_moe_dsa", "mtp": 1, "moe_intermediate_size": 21, "n_routed_experts": 7},
    "fp8 that shards cut": {"family": "deepseek_v32", "fp8": True, "intermediate_size": 120},
    "tied": {"family": "deepseek_v3", "tie_word_embeddings": True},
    "bfloat16": {"family": "glm_moe_dsa", "dtype": torch.bfloat16},
}
CUTS: dict[str, list[WeightShards]] = {
    "one": ranks(1),
    "deterministic": ranks(1, deterministic=True),
    "tp2": ranks(2),
    "tp4": ranks(4),
    "tp4 deterministic": ranks(4, deterministic=True),
    "ep3": [WeightShards(ep_rank=rank, ep_size=3, expert_parallel=True) for rank in range(3)],
    "tp2 ep": ranks(2, expert_parallel=True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "reference"])
def test_a_ranks_bytes_are_known_from_the_headers(tmp_path: Path, name: str, cut: str, native: bool) -> None:
    fields = dict(MODELS[name])
    make_checkpoint(tmp_path, fields.pop("family"), **fields)
    config, mtp = ModelConfig.from_folder(tmp_path), "mtp" in fields
    dtype = getattr(torch, config.dtype)
    backend = ReferenceBackend()
    if native:
        args = EngineArgs(model=str(tmp_path), kernel_backend="cpu")
        choice = choose_kernels(args, dtype=config.dtype, topk=None, index_format=None, index_head_dim=0)
        backend, _ = make_backends(choice, dtype, 1)  # type: ignore[assignment]
    held = []
    for shards in CUTS[cut]:
        weights = load_model(tmp_path, config, dtype, backend, mtp=mtp, shards=shards)
        size = weight_bytes(tmp_path, config, dtype, backend, mtp=mtp, shards=shards)
        if native:  # parts that are views of one file share bytes with each other
            assert size == weights.num_bytes
        moe = weights.layers[-1].mlp
        assert isinstance(moe, MoeWeights)
        held.append(sum(len(part.experts) for part in moe.slices if part is not None))
        assert len(weights.layers[0].attention.o) == len(shards.slices(config.num_heads))
    if "ep" in cut:
        assert config.moe is not None
        assert sum(held) == config.moe.num_experts
