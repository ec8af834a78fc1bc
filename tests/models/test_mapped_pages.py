"""What was copied out of a mapped file does not stay in memory beside its copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.native import needs_native
from tests.tiny import make_checkpoint

from longfill.kernels.backend import Backend
from longfill.kernels.cpu import NativeBackend
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.models.config import ModelConfig
from longfill.models.loading import load_model

VOCABULARY = 2**16
SLACK = 2**20
"""Bytes that the kernel reads around small tensors."""


def resident_bytes(path: Path) -> int:
    """Bytes of this process's mappings of files under `path` that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize(
    ("backend", "stored"),
    [
        pytest.param(NativeBackend(torch.bfloat16, 1), torch.bfloat16, marks=needs_native, id="packed"),
        pytest.param(NativeBackend(torch.bfloat16, 1), torch.float16, marks=needs_native, id="converted and packed"),
        pytest.param(ReferenceBackend(), torch.float16, id="converted"),
    ],
)
def test_no_weight_is_in_memory_beside_its_copy(tmp_path: Path, backend: Backend, stored: torch.dtype) -> None:
    """The head and the embedding are 8 MiB each; the embedding, where it is a view, has not been read yet."""
    make_checkpoint(tmp_path, "deepseek_v32", dtype=stored, vocab_size=VOCABULARY, num_hidden_layers=1)
    weights = load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.bfloat16, backend)
    assert resident_bytes(tmp_path) < SLACK
    values = weights.embed.float().sum()
    assert values.isfinite()
    assert resident_bytes(tmp_path) < SLACK + (weights.embed.nbytes if stored == torch.bfloat16 else 0)
