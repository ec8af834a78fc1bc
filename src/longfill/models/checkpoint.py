"""A folder of safetensors files as one strict, memory-mapped table of tensors.

May import torch and safetensors. Invariant: a tensor is taken at most once, has the shape that was asked for, and
`finish` refuses a checkpoint that holds anything nobody took; nothing is copied.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from longfill.errors import ModelError

_libc = ctypes.CDLL(None)
INDEX_NAME = "model.safetensors.index.json"
_DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_DTYPE_BITS |= {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: bytes `[begin, end)` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """A safetensors file's own table of contents, with the header bytes as stored."""

    file: Path
    text: bytes
    num_bytes: int
    tensors: Mapping[str, TensorEntry]


class Checkpoint:
    """Tensors by name, each handed out once; made by `open`."""

    def __init__(self, folder: Path, shards: Sequence[ShardHeader]) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self._entries = _merge(shards)
        self._files: dict[Path, Any] = {}
        self._taken: set[str] = set()

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of a single file, of shards with an index, or of shards without one.

        Raises `ModelError` for a truncated or malformed file, a missing shard, a tensor stored twice, or an index that
        names a tensor which its file does not hold; the text names file and tensor.
        """
        folder = Path(folder)
        index = _read_index(folder)
        files = sorted({folder / name for name in index.values()}) if index else _files_without_index(folder)
        shards = [read_header(file) for file in files]
        held = {shard.file: shard.tensors for shard in shards}
        for tensor, name in index.items():
            if tensor not in held[folder / name]:
                raise ModelError(f"{folder / INDEX_NAME} says that {tensor} is in {name}, but it is not there")
        return cls(folder, shards)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Where `name` lies; `ModelError` if the checkpoint lacks it."""
        try:
            return self._entries[name]
        except KeyError:
            files = f"{len(self.shards)} safetensors file{'s' if len(self.shards) != 1 else ''}"
            raise ModelError(f"{self.folder}: tensor {name} is missing from its {files}") from None

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name` as a memory-mapped view in its stored dtype; `ModelError` unless it has `shape`."""
        entry = self.entry(name)
        if entry.shape != tuple(shape):
            raise ModelError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        if name in self._taken:
            raise ModelError(f"{entry.file}: tensor {name} would fill two parameters")
        self._taken.add(name)
        tensor: Tensor = self._open_file(entry.file).get_tensor(name)
        return tensor

    def release(self, name: str) -> None:
        """Give the pages of a tensor's mapping back. Its views stay valid and read the file again.

        For tensors that were taken and then copied: the page cache keeps the file as long as memory allows.
        """
        entry = self.entry(name)
        tensor = self._open_file(entry.file).get_tensor(name)
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    def finish(self, skip: Iterable[str] = ()) -> tuple[str, ...]:
        """Names that match a regular expression of `skip` and stay unused; `ModelError` for any other unused tensor."""
        patterns = [re.compile(pattern) for pattern in skip]
        unused = sorted(self._entries.keys() - self._taken)
        stray = [name for name in unused if not any(p.fullmatch(name) for p in patterns)]
        if stray:
            more = f" and {len(stray) - 1} more" if len(stray) > 1 else ""
            raise ModelError(
                f"{self._entries[stray[0]].file}: tensor {stray[0]}{more} would be left unused; "
                "the checkpoint does not match its config.json"
            )
        return tuple(unused)

    def _open_file(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
        return self._files[file]


def read_header(file: Path) -> ShardHeader:
    """Read and check one file's header: every tensor's dtype, size and place must fit the file."""
    try:
        with file.open("rb") as stream:
            total = file.stat().st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, total - 8):
                raise ModelError(f"{file} is not a whole safetensors file: its header is cut off at {total} bytes")
            text = stream.read(length)
        raw = json.loads(text)
        data = 8 + length
        entries = [_entry(file, name, item, data) for name, item in raw.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; download the checkpoint again") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is not a valid safetensors file: {error!r}") from error
    end_before = data
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin < end_before:
            raise ModelError(f"{file}: tensor {entry.name} overlaps the tensor before it")
        if entry.end > total:
            raise ModelError(
                f"{file} is truncated: tensor {entry.name} ends at byte {entry.end:,}, the file has {total:,}"
            )
        end_before = entry.end
    return ShardHeader(file, text, total, {entry.name: entry for entry in entries})


def _entry(file: Path, name: str, item: Mapping[str, Any], data: int) -> TensorEntry:
    begin, end = item["data_offsets"]
    shape, dtype = tuple(item["shape"]), item["dtype"]
    if dtype not in _DTYPE_BITS:
        raise ModelError(f"{file}: tensor {name} has dtype {dtype}, which longfill does not read")
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)):
        raise ModelError(f"{file}: tensor {name} has shape {list(shape)} at bytes {begin} to {end}")
    if (end - begin) * 8 != math.prod(shape) * _DTYPE_BITS[dtype]:
        raise ModelError(f"{file}: tensor {name} has {end - begin} bytes, too many or few for {dtype} {list(shape)}")
    return TensorEntry(name, file, dtype, shape, data + begin, data + end)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file name from the index; empty where the folder has none."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(tensor): str(name) for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a valid index of tensors: {error!r}") from error
    outside = [name for name in index.values() if Path(name).name != name]
    if outside:
        raise ModelError(f"{path} names {outside[0]!r}, which is not a file of its folder")
    lacking = sorted(name for name in set(index.values()) if not (folder / name).is_file())
    if lacking:
        tensor = next(t for t, name in index.items() if name == lacking[0])
        raise ModelError(f"{folder / lacking[0]} is missing ({path.name} expects {tensor} there); download it again")
    single = folder / "model.safetensors"
    if single.is_file() and single.name not in index.values():
        raise ModelError(f"{folder} holds both {single.name} and {path.name}, which does not mention it; remove one")
    return index


def _files_without_index(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file")
    numbered = [m for m in (re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", f.name) for f in files) if m]
    for m in numbered:
        for number in range(1, int(m[4]) + 1):
            name = f"{m[1]}{number:0{len(m[2])}}{m[3]}{m[4]}{m[5]}"
            if not (folder / name).is_file():
                raise ModelError(f"{folder / name} is missing; download the checkpoint again")
    return files


def _merge(shards: Sequence[ShardHeader]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            if name in entries:
                raise ModelError(f"tensor {name} is stored twice: in {entries[name].file} and in {entry.file}")
            entries[name] = entry
    return entries
