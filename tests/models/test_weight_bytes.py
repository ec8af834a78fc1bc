"""The bytes that the memory plan takes from file headers are the bytes that loading takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import FAMILIES, make_checkpoint

from longfill.models.config import ModelConfig
from longfill.models.loading import load_model, weight_bytes

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"fp8": True, "dtype": torch.bfloat16},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_headers_tell_what_loading_takes(tmp_path: Path, family: str, kind: str) -> None:
    make_checkpoint(tmp_path, family, **KINDS[kind])
    config = ModelConfig.from_folder(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_model(tmp_path, config, dtype)
        quantised = [layer.attention.kv_b for layer in weights.layers if layer.attention.kv_b.scale is not None]
        kept = sum(w.weight.numel() * dtype.itemsize for w in quantised)
        assert weight_bytes(tmp_path, dtype) == weights.num_bytes + kept
