"""A prefix hash names everything that decides a page's content, and is the same in every process."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from longfill.cache.prefix import PrefixHashChain, PrefixIdentity, block_hash
from longfill.units import HashBlockSize

DOC = Path(__file__).parents[2] / "docs" / "prefix_hash.md"
IDENTITY = PrefixIdentity(
    model="m", revision="r", dtype="bfloat16", cache_format="bfloat16+fp8", rope={"rope_theta": 1e4, "factor": 2}
)


def chain_of(tokens: list[int], size: int, identity: PrefixIdentity = IDENTITY, salt: str = "") -> list[bytes]:
    chain = PrefixHashChain(identity.root(salt), HashBlockSize(size))
    return [chain.block(i, np.array(tokens, dtype=np.int64)) for i in range(len(tokens) // size)]


def published_cases() -> tuple[dict, list[dict]]:
    vectors = json.loads(re.search(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)[1])
    return vectors["identity"], vectors["cases"]


def hash_by_the_book(identity: dict, case: dict) -> tuple[str, list[str]]:
    """The format as the page describes it, written without a look at the implementation."""

    def frame(field: bytes) -> bytes:
        return len(field).to_bytes(8, "little") + field

    fields = {"layout_version": 1, "adapter": ""} | identity | case["identity_changes"]
    origin, salt = ("server", fields["salt"]) if "salt" in fields else ("request", case["request_salt"])
    rope = json.dumps(fields["rope"], sort_keys=True).replace(": ", ":").replace(", ", ",")
    names = ["model", "revision", "dtype", "cache_format", "layout_version"]
    texts = ["longfill.prefix.root.v1", *(str(fields[n]) for n in names), rope, fields["adapter"], origin, salt]
    parent = root = blake3(b"".join(frame(t.encode()) for t in texts)).digest()
    extra = [bytes.fromhex(e) for e in case["extra_keys_hex"]]
    blocks, size, tokens = [], case["block_size"], case["token_ids"]
    for i in range(len(tokens) // size):
        ids = b"".join(t.to_bytes(8, "little", signed=True) for t in tokens[i * size : (i + 1) * size])
        keys = len(extra).to_bytes(8, "little") + b"".join(map(frame, extra))
        parent = blake3(frame(b"longfill.prefix.block.v1") + frame(parent) + frame(ids) + keys).digest()
        blocks.append(parent.hex())
    return root.hex(), blocks


@pytest.mark.parametrize("case", published_cases()[1], ids=lambda case: case["case"])
def test_pfx_03_hashes_equal_the_published_vectors(case: dict) -> None:
    base = published_cases()[0]
    parent = PrefixIdentity(**base | case["identity_changes"]).root(case["request_salt"])
    assert parent.hex() == case["root"]
    extra = [bytes.fromhex(e) for e in case["extra_keys_hex"]]
    size = case["block_size"]
    for i, want in enumerate(case["blocks"]):
        tokens = np.array(case["token_ids"][i * size : (i + 1) * size], dtype=np.int64)
        parent = block_hash(parent, tokens, extra)
        assert parent.hex() == want
    assert hash_by_the_book(base, case) == (case["root"], case["blocks"])


def test_pfx_03_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "import sys, numpy as np\n"
        "from longfill.cache.prefix import PrefixHashChain, PrefixIdentity\n"
        "keys = ['factor', 'rope_theta'] if sys.argv[1] == '1' else ['rope_theta', 'factor']\n"
        "rope = {k: {'rope_theta': 1e4, 'factor': 2}[k] for k in keys}\n"
        "identity = PrefixIdentity(model='m', revision='r', dtype='bfloat16', cache_format='bfloat16+fp8', rope=rope)\n"
        "chain = PrefixHashChain(identity.root('salt'), 4)\n"
        "print(chain.block(2, np.arange(12)).hex(), hash('probe'))\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, seed],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0][1] != outputs[1][1], "the seeds made no difference, so this test proves nothing"
    assert outputs[0][0] == outputs[1][0] == chain_of(list(range(12)), 4, salt="salt")[2].hex()


def test_pfx_02_equal_last_blocks_behind_different_first_blocks_differ() -> None:
    a = chain_of([1, 2, 3, 4, 5, 6, 7, 8], 4)
    b = chain_of([9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert len(a) == len(b) == 2
    assert set(a).isdisjoint(b)


def test_pfx_02_every_field_of_the_identity_changes_the_hash() -> None:
    variants = [
        IDENTITY,
        replace(IDENTITY, model="m2"),
        replace(IDENTITY, revision="r2"),
        replace(IDENTITY, dtype="float32"),
        replace(IDENTITY, cache_format="fp8+fp8"),
        replace(IDENTITY, rope={"rope_theta": 1e4, "factor": 3}),
        replace(IDENTITY, rope={"rope_theta": 1e4}),
        replace(IDENTITY, adapter="a"),
        replace(IDENTITY, salt="s"),
        replace(IDENTITY, salt=""),
        replace(IDENTITY, layout_version=2),
    ]
    assert len({identity.root() for identity in variants}) == len(variants)


def test_pfx_02_moving_text_between_fields_changes_the_hash() -> None:
    roots = {
        replace(IDENTITY, model=model, revision=revision, adapter=adapter).root(salt)
        for model, revision, adapter, salt in [
            ("ab", "c", "", ""),
            ("a", "bc", "", ""),
            ("abc", "", "", ""),
            ("", "abc", "", ""),
            ("", "", "abc", ""),
            ("", "", "a", "bc"),
            ("", "", "ab", "c"),
            ("", "", "", "abc"),
        ]
    }
    assert len(roots) == 8
    tokens = np.arange(4)
    parent = IDENTITY.root()
    hashes = {block_hash(parent, tokens, keys) for keys in ([], [b""], [b"abc"], [b"a", b"bc"], [b"ab", b"c"])}
    assert len(hashes) == 5
    assert len({block_hash(parent, np.array(ids)) for ids in ([1, 2], [1, 2, 0], [258], [2, 1], [1 | 2 << 32])}) == 5


def test_pfx_02_the_servers_salt_overrides_the_requests() -> None:
    salted = replace(IDENTITY, salt="server")
    assert salted.root("x") == salted.root("y") == salted.root()
    assert IDENTITY.root("x") != IDENTITY.root("y")
    assert IDENTITY.root("server") != salted.root(), "a request must not be able to spell the server's salt"


def test_a_salt_with_lone_surrogates_is_hashed_like_any_other() -> None:
    assert IDENTITY.root("\ud800") != IDENTITY.root("\ud801")


def test_hashes_do_not_depend_on_how_the_sequence_grew() -> None:
    tokens = np.arange(23)
    whole = chain_of(tokens.tolist(), 4)
    grown = PrefixHashChain(IDENTITY.root(), HashBlockSize(4))
    for length in range(4, 24):
        assert grown.block(length // 4 - 1, tokens[:length]) == whole[length // 4 - 1]


@pytest.mark.parametrize("length", [0, 3, 7])
def test_a_partial_block_has_no_hash(length: int) -> None:
    chain = PrefixHashChain(IDENTITY.root(), HashBlockSize(4))
    with pytest.raises(ValueError, match="not full"):
        chain.block(length // 4, np.arange(length))


def test_a_million_tokens_hash_in_well_under_a_second_and_once_only() -> None:
    tokens = np.arange(1 << 20)
    chain = PrefixHashChain(IDENTITY.root(), HashBlockSize(64))
    start = time.process_time()
    chain.block((1 << 14) - 1, tokens)
    first = time.process_time() - start
    start = time.process_time()
    chain.block((1 << 14) - 1, tokens)
    assert first < 0.8
    assert time.process_time() - start < 0.01
