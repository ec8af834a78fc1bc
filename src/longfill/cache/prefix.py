"""Names for computed prefixes: a BLAKE3 hash chain over full blocks of token ids (format: docs/prefix_hash.md).

Imports blake3, numpy, units and the layout version. Invariant: a hash depends on nothing but the identity, the salt
and the tokens from the first to the block's last, so every process and machine gives the same one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from blake3 import blake3

from longfill.cache.formats import LAYOUT_VERSION
from longfill.request import TokenIds
from longfill.units import HashBlockSize

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that stand for one full block and everything before it."""


def _frame(field: bytes) -> bytes:
    """A field behind its length: concatenated frames split in one way only."""
    return len(field).to_bytes(8, "little") + field


def _text(field: str) -> bytes:
    # A salt comes from outside and may hold lone surrogates, which plain UTF-8 refuses.
    return _frame(field.encode("utf-8", "surrogatepass"))


_ROOT_DOMAIN = _text("longfill.prefix.root.v1")
_BLOCK_DOMAIN = _text("longfill.prefix.block.v1")


@dataclass(frozen=True, kw_only=True)
class PrefixIdentity:
    """Everything besides the tokens that decides what a page's bytes are: two identities never share a page.

    `rope` holds the rotary settings as config.json gives them (JSON values; the order of keys does not matter).
    `salt`, where the server sets one, replaces whatever salt a request brings.
    """

    model: str
    revision: str
    dtype: str
    cache_format: str
    rope: Mapping[str, Any]
    adapter: str = ""
    salt: str | None = None
    layout_version: int = LAYOUT_VERSION

    def root(self, request_salt: str = "") -> BlockHash:
        """Parent of a first block. The salt's origin is hashed too: a request cannot spell the server's salt."""
        origin, salt = ("request", request_salt) if self.salt is None else ("server", self.salt)
        rope = json.dumps(self.rope, sort_keys=True, separators=(",", ":"))
        fields = [self.model, self.revision, self.dtype, self.cache_format, str(self.layout_version), rope]
        fields += [self.adapter, origin, salt]
        return BlockHash(blake3(_ROOT_DOMAIN + b"".join(map(_text, fields))).digest())


def block_hash(parent: BlockHash, token_ids: TokenIds, extra_keys: Sequence[bytes] = ()) -> BlockHash:
    """Hash of the block that holds `token_ids` (int64 [block size]) behind `parent`.

    `extra_keys` name whatever else the block's content depends on, in order.
    """
    tokens = token_ids.astype("<i8", copy=False).tobytes()
    count = len(extra_keys).to_bytes(8, "little")
    frames = (_BLOCK_DOMAIN, _frame(parent), _frame(tokens), count, *map(_frame, extra_keys))
    return BlockHash(blake3(b"".join(frames)).digest())


class PrefixHashChain:
    """The block hashes of one growing token sequence, each computed once and only when asked for."""

    def __init__(self, root: BlockHash, block_size: HashBlockSize) -> None:
        self._block_size = block_size
        self._hashes = [root]

    def block(self, index: int, token_ids: TokenIds) -> BlockHash:
        """Hash of block `index`; `token_ids` (int64) must fill that block and only ever grow between calls."""
        size = self._block_size
        if (index + 1) * size > token_ids.size:
            raise ValueError(f"block {index} of {size} tokens is not full: there are {token_ids.size} tokens")
        for i in range(len(self._hashes) - 1, index + 1):
            self._hashes.append(block_hash(self._hashes[-1], token_ids[i * size : (i + 1) * size]))
        return self._hashes[index + 1]
