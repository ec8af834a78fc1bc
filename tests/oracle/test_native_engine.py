"""An engine on the native indexer against the same engine on the reference: selections, logits and greedy tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longfill.kernels.cpu import isa_names
from tests.native import needs_native
from tests.oracle.native_run import DECODED, record
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parents[2]
K = 16
ROWS = 1000
"""Rows that are scored; the first K select everything."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run in float32 with fp8 index keys: what is left between kernels is the order of sums.

    Many indexer heads: with few, ReLU makes exact zeros, and ties of them.
    """
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(
        folder, "deepseek_v32", dtype=torch.bfloat16, num_hidden_layers=2, index_n_heads=32, index_head_dim=32
    )
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, Any]:
    return record(model, "reference", 0, ROWS + K)


def native(model: Path, isa: str, folder: Path) -> dict[str, Any]:
    """What an engine in a process of its own gives with LONGFILL_ISA set."""
    output = folder / "rows.pt"
    command = [sys.executable, "-m", "tests.oracle.native_run", str(model), "cpu", "0", str(ROWS + K), str(output)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"LONGFILL_ISA": isa, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recorded: dict[str, Any] = torch.load(output)
    return recorded


def kept_by_both(one_TK: Tensor, two_TK: Tensor) -> Tensor:
    """[T]: how many positions of one row are among the other's."""
    found_TKK = (one_TK[:, :, None] == two_TK[:, None, :]) & (one_TK[:, :, None] >= 0)
    return found_TKK.any(-1).sum(-1)


@needs_native
@pytest.mark.parametrize("isa", isa_names())
def test_cpu_01_every_instruction_set_selects_what_the_reference_selects(
    model: Path, reference: dict[str, Any], tmp_path: Path, isa: str
) -> None:
    got = native(model, isa, tmp_path)
    assert all(f"native CPU kernels ({isa})" in path for path in got["kernels"].values())
    assert not any("native" in path for path in reference["kernels"].values())
    assert got["token_ids"] == reference["token_ids"]
    assert got["selected"].keys() == reference["selected"].keys() == {0, 1}
    differs_T = torch.zeros(ROWS + K + DECODED - 1, dtype=torch.bool)
    for layer, want_TK in reference["selected"].items():
        got_TK = got["selected"][layer]
        assert got_TK.shape == want_TK.shape == (ROWS + K + DECODED - 1, K)
        assert kept_by_both(got_TK, want_TK)[K:].sum() >= 0.999 * K * (ROWS + DECODED - 1)
        differs_T |= (got_TK != want_TK).any(-1)
    # Rows up to the first that keeps another key read the same keys.
    same = int(differs_T.int().argmax()) if differs_T.any() else differs_T.numel()
    assert same > ROWS // 2
    error = (got["logits"][:same] - reference["logits"][:same]).abs().max() / reference["logits"].abs().max()
    assert 0 < error < 1e-4


def test_the_overlap_sees_another_key_and_no_padding() -> None:
    one_TK = torch.tensor([[0, 3, 5], [0, 1, -1]], dtype=torch.int32)
    assert kept_by_both(one_TK, one_TK).tolist() == [3, 2]
    assert kept_by_both(one_TK, torch.tensor([[0, 4, 5], [1, 2, -1]], dtype=torch.int32)).tolist() == [2, 1]
