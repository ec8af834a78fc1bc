"""The native kernels are there wherever they can be built, and are chosen for what they can do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.native import needs_native, obstacles_to_building

from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.kernels import select
from longfill.kernels.cpu import available, describe, selected_isa
from longfill.kernels.select import KernelChoice, choose_kernels


def choose(backend: str, **shapes: object) -> KernelChoice:
    model = {"dtype": "bfloat16", "topk": 16, "index_format": "fp8", "index_head_dim": 128} | shapes
    return choose_kernels(EngineArgs(kernel_backend=backend), **model)  # type: ignore[arg-type]


def test_where_they_can_be_built_they_are_there() -> None:
    """Without this, an installation whose build failed would skip every native test and look green."""
    lacking = obstacles_to_building()
    if lacking and not available():
        pytest.skip(f"native kernels cannot be built here: no {' and no '.join(lacking)}")
    assert available(), f"{describe()}; build them as docs/native_kernels.md says"


def test_a_compiler_is_found_by_its_name_in_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler" in obstacles_to_building()
    compiler = tmp_path / "my-cxx"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert shutil.which("my-cxx") == str(compiler)
    monkeypatch.setenv("CXX", "my-cxx")
    assert "C++ compiler" not in obstacles_to_building()


@needs_native
def test_auto_is_native_wherever_the_kernels_can_compute_the_model() -> None:
    native = f"native CPU kernels ({selected_isa()})"
    for backend in ("auto", "cpu"):
        for dtype, keys in (("bfloat16", "fp8"), ("float32", "float32")):
            choice = choose(backend, dtype=dtype, index_format=keys)
            assert choice.native
            assert choice.native_index
            assert all(path.startswith(native) for path in choice.paths.values())
    chosen = choose("reference")
    assert not chosen.native
    assert not chosen.native_index
    assert all(path.startswith("reference") for path in chosen.paths.values())


@needs_native
def test_auto_takes_the_reference_for_what_the_kernels_cannot_compute_and_says_why() -> None:
    half = choose("auto", dtype="float16")
    assert not half.native
    assert half.paths["linear"] == "reference (no native kernels for float16)"
    assert half.native_index
    odd = choose("auto", index_head_dim=24)
    assert odd.native
    assert not odd.native_index
    dense = choose("auto", topk=None, index_format=None, index_head_dim=0)
    assert dense.native
    assert not dense.native_index


@needs_native
def test_insisting_on_native_names_the_shape_in_the_way() -> None:
    with pytest.raises(ConfigError, match=r"--kernel-backend cpu: .*index_head_dim 24 is no multiple of 16"):
        choose("cpu", index_head_dim=24)


def test_without_the_extension_auto_is_the_reference_and_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "available", lambda: False)
    monkeypatch.setattr(select, "describe", lambda: "this installation has no native ones")
    assert not choose("auto").native
    assert not choose("auto").native_index
    assert "this installation has no native kernels" in choose("auto").paths["linear"]
    with pytest.raises(ConfigError, match=r"--kernel-backend cpu: .*this installation has no native ones"):
        choose("cpu")
