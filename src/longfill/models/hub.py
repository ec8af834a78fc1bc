"""From what the user typed to a folder on disk, and the identity of the weights in it.

May import huggingface_hub (only when a hub id is given). Invariant: the folder that is returned holds config.json, and
its `weights_revision` is the same on every machine that has the same files.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from longfill.errors import ModelError
from longfill.models.checkpoint import Checkpoint

BUNDLED = "needle"
BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "needle" / "model"
"""Beside the code in every kind of installation; an editable one spreads the package over two folders."""
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
]
_SAMPLE_BYTES = 64


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model: the bundled one (`needle`), a local folder, or a Hugging Face hub id (downloaded).

    A local folder wins over a hub id of the same spelling. Raises `ModelError` when `name` is none of them, the folder
    has no config.json, the hub cannot be reached, or a `revision` is given for what is not on the hub.
    """
    folder = BUNDLED_FOLDER if name == BUNDLED else Path(name).expanduser()
    if name == BUNDLED or folder.is_dir():
        if revision is not None:
            raise ModelError(f"--revision {revision} applies to hub ids only, and {name} is a local folder")
        return _with_config(folder)
    if folder.exists():
        raise ModelError(f"{name} is a file; give the folder that holds config.json and *.safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ModelError(
            f"{name} does not exist; give a model folder, a hub id such as deepseek-ai/DeepSeek-V3.2, or {BUNDLED}"
        )
    return _with_config(_download(name, revision))


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json; a model folder holds config.json and *.safetensors")
    return folder


def _download(repo_id: str, revision: str | None) -> Path:
    # Importing the hub client takes a noticeable part of a second, and most runs are on a local folder.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    at = f" at revision {revision}" if revision else ""
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repo_id}{at} is neither a folder here nor in the hub's cache, and the hub cannot be reached: {error}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"{repo_id}{at} is not a folder here and cannot be downloaded from the hub: {error}"
        ) from error


def weights_revision(folder: str | Path) -> str:
    """Hex identity of a model's weights, for the prefix cache: equal files give equal strings on every machine.

    Covers config.json, each safetensors file's name, size and header, and a few bytes of each tensor: two fine-tunes
    of one model have the same headers, and must not share cached keys and values.
    """
    folder = Path(folder)
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    add(_with_config(folder).joinpath("config.json").read_bytes())
    for shard in sorted(Checkpoint.open(folder).shards, key=lambda s: s.file.name):
        add(shard.file.name.encode())
        add(str(shard.num_bytes).encode())
        add(shard.text)
        with shard.file.open("rb") as stream:
            for entry in sorted(shard.tensors.values(), key=lambda e: e.begin):
                middle = (entry.begin + entry.end - _SAMPLE_BYTES) // 2
                begin = max(entry.begin, middle)
                add(os.pread(stream.fileno(), min(_SAMPLE_BYTES, entry.end - begin), begin))
    return digest.hexdigest()
