"""A model name becomes a folder or a clear refusal, and a folder's identity changes with its weights only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tests.tiny import edit_config, write_tensors

from longfill.errors import ModelError
from longfill.models.hub import resolve_model, weights_revision

TENSORS = {"a": torch.arange(4096, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa"}))
    write_tensors(folder, TENSORS)
    return folder


def test_a_local_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model") == Path("model")
    assert resolve_model("./model") == Path("model")


def test_needle_is_the_bundled_folder() -> None:
    folder = resolve_model("needle")
    assert folder.parts[-3:] == ("longfill", "needle", "model")
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "none", "a/b/c", "~nobody/x", "", "not a repo/at all"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"does not exist|holds no config\.json"):
        resolve_model(name)


def test_a_file_or_a_folder_without_config_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(str(folder / "config.json"))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(folder))


def test_a_revision_of_a_local_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="applies to hub ids only"):
        resolve_model(str(folder), "main")


def test_a_hub_id_is_downloaded_without_foreign_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo_id, revision))
        assert not any(pattern in ("*", "*.json", "*.py", "*.bin") for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("zai-org/GLM-5.2", "abc") == folder
    assert calls == [("zai-org/GLM-5.2", "abc")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("disk"), ConnectionError("down")])
def test_a_hub_that_cannot_be_reached_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"zai-org/GLM-5\.2 at revision abc .*the hub"):
        resolve_model("zai-org/GLM-5.2", "abc")


def test_equal_files_have_equal_identity_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    assert weights_revision(copy) == weights_revision(folder)


def test_identity_changes_with_config_layout_and_values(folder: Path) -> None:
    seen = {weights_revision(folder)}
    edit_config(folder, rms_norm_eps=1e-5)
    seen.add(weights_revision(folder))
    # A fine-tune: same names, shapes and sizes, other values.
    write_tensors(folder, TENSORS | {"a": TENSORS["a"] + 1})
    seen.add(weights_revision(folder))
    write_tensors(folder, TENSORS | {"b": torch.full((3,), 2.0, dtype=torch.bfloat16)})
    seen.add(weights_revision(folder))
    write_tensors(folder, TENSORS | {"d": torch.ones(1)})
    seen.add(weights_revision(folder))
    (folder / "model.safetensors").unlink()
    write_tensors(folder, TENSORS, shards=2)
    seen.add(weights_revision(folder))
    assert len(seen) == 6
