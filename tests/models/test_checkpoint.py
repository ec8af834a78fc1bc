"""A checkpoint is whole, unambiguous and memory-mapped, or it is refused with the names of file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.tiny import write_tensors
from torch import Tensor

from longfill.errors import ModelError
from longfill.models.checkpoint import Checkpoint

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.zeros(4, 2, dtype=torch.float8_e4m3fn),
}
LAYOUTS = {"single": {}, "sharded": {"shards": 3}, "sharded without index": {"shards": 3, "index": False}}


def read_all(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    tensors = {name: checkpoint.take(name, tensor.shape) for name, tensor in TENSORS.items()}
    assert checkpoint.finish() == ()
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str, tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, **LAYOUTS[layout])
    for name, tensor in read_all(tmp_path).items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor.float(), TENSORS[name].float())


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    save_file({"big": torch.ones(4 << 20)}, tmp_path / "model.safetensors")
    tensor = Checkpoint.open(tmp_path).take("big", (4 << 20,))
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1
    low, high = (int(end, 16) for end in mapped[0][0].split("-"))
    assert low <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= high


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_truncated_file_is_refused_with_the_tensor_that_is_cut(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(2), "last": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated: tensor last"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 30])
def test_a_file_cut_within_its_header_is_refused(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        Checkpoint.open(tmp_path)


def _with_header(path: Path, header: object, data: int = 64) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "tensor x has 8 bytes"),
        ({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, "tensor x has dtype F4"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "tensor x has shape"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "not a valid safetensors file"),
        ([], "not a valid safetensors file"),
        (
            {
                "x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "y": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            "tensor y overlaps",
        ),
    ],
)
def test_a_header_that_lies_is_refused(header: object, message: str, tmp_path: Path) -> None:
    _with_header(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(tmp_path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    _with_header(tmp_path / "model.safetensors", {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 17)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Checkpoint.open(tmp_path).take("x", (4,))


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(index: bool, tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3, index=index)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused_with_both_files(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3, index=False)
    save_file({"a": TENSORS["a"]}, tmp_path / "extra.safetensors")
    with pytest.raises(ModelError, match=r"tensor a is stored twice: in .*extra\.safetensors and in .*00001-of-00003"):
        Checkpoint.open(tmp_path)


def _edit_index(folder: Path, **weight_map: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= weight_map
    path.write_text(json.dumps(index))


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3)
    _edit_index(tmp_path, d="model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"says that d is in model-00001-of-00003\.safetensors, but it is not there"):
        Checkpoint.open(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3)
    _edit_index(tmp_path, d="../other.safetensors")
    with pytest.raises(ModelError, match="not a file of its folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not a valid index"):
        Checkpoint.open(tmp_path)


def test_an_index_beside_a_single_file_that_it_does_not_mention_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS, shards=3)
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(ModelError, match="remove one"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        Checkpoint.open(tmp_path)


def test_load_01_each_tensor_is_taken_once_with_its_shape_and_none_is_left(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor a has shape \[2, 3\], .* asks for \[3, 2\]"):
        checkpoint.take("a", (3, 2))
    with pytest.raises(ModelError, match="tensor z is missing"):
        checkpoint.take("z", (1,))
    checkpoint.take("a", (2, 3))
    with pytest.raises(ModelError, match="tensor a would fill two parameters"):
        checkpoint.take("a", (2, 3))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor b and 1 more would be left unused"):
        checkpoint.finish()
    with pytest.raises(ModelError, match="tensor c would be left unused"):
        checkpoint.finish(["b"])
    assert checkpoint.finish(["b", "c.*"]) == ("b", "c")
