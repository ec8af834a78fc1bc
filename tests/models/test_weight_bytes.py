"""The bytes that the memory plan takes from file headers are the bytes that loading takes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native import needs_native
from tests.tiny import FAMILIES, make_checkpoint

from longfill.kernels.backend import Backend
from longfill.kernels.cpu import NativeBackend
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.models.config import ModelConfig
from longfill.models.loading import load_model
from longfill.models.weight_bytes import weight_bytes

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"fp8": True, "dtype": torch.bfloat16},
    "tied": {"tie_word_embeddings": True},
    "float16": {"dtype": torch.float16},
    "draft layer": {"mtp": 1, "fp8": True, "dtype": torch.bfloat16},
    "biases": {"attention_bias": True, "dtype": torch.bfloat16},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 100, "moe_intermediate_size": 36, "vocab_size": 515},
}


BACKENDS = [ReferenceBackend(), pytest.param(NativeBackend(torch.bfloat16, 1), marks=needs_native)]


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_headers_tell_what_loading_takes(tmp_path: Path, family: str, kind: str, backend: Backend) -> None:
    make_checkpoint(tmp_path, family, **KINDS[kind])
    config = ModelConfig.from_folder(tmp_path)
    for dtype, mtp in itertools.product((torch.float32, torch.bfloat16), {False, config.num_mtp_layers > 0}):
        weights = load_model(tmp_path, config, dtype, backend, mtp=mtp)
        assert weight_bytes(tmp_path, config, dtype, backend, mtp=mtp) == weights.num_bytes


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "native"])
def test_indexers_that_nobody_loads_take_nothing(tmp_path: Path, backend: Backend) -> None:
    """DeepSeek's class stores an indexer in layers that the config marks shared, too."""
    make_checkpoint(tmp_path, "deepseek_v32", indexer_types=["full", "shared", "full", "shared"])
    config = ModelConfig.from_folder(tmp_path)
    weights = load_model(tmp_path, config, torch.bfloat16, backend)
    assert [layer.attention.indexer is None for layer in weights.layers] == [False, True, False, True]
    assert weight_bytes(tmp_path, config, torch.bfloat16, backend) == weights.num_bytes
