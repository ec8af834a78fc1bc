"""Bodies into token ids: every list of ids is read exactly, in pieces, or refused; lanes keep short work quick."""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.server import prompts
from longfill.server.errors import ApiError
from longfill.server.prompts import Lanes, read_body, read_ids, read_prompts

VOCABULARY = 1000


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=200), st.integers(1, 40), st.booleans())
def test_ids_are_read_in_pieces_as_they_are(ids: list[int], piece: int, spaced: bool) -> None:
    text = json.dumps(ids, indent=1 if spaced else None).encode()
    before, prompts._PIECE_BYTES = prompts._PIECE_BYTES, piece
    try:
        got = read_ids(msgspec.Raw(text), VOCABULARY)
    finally:
        prompts._PIECE_BYTES = before
    assert got.dtype == np.int64
    assert got.tolist() == ids


@pytest.mark.parametrize(
    "value", [[], [-1], [VOCABULARY], [2**63], [10**30], [1, "2"], [1, None], [1, 2.0], [True], [[1]], {}, "1", 1, None]
)
@pytest.mark.parametrize("piece", [1, 64 * 1024])
def test_what_is_no_list_of_ids_is_refused(value: object, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_PIECE_BYTES", piece)
    with pytest.raises(ApiError) as refused:
        read_ids(_raw(value), VOCABULARY)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_prompts_of_all_four_forms_are_told_apart() -> None:
    assert read_prompts(_raw("a"), VOCABULARY) == ["a"]
    assert read_prompts(_raw(["a", "b"]), VOCABULARY) == ["a", "b"]
    for value, want in ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]):
        got = read_prompts(_raw(value), VOCABULARY)
        assert [each.tolist() for each in got if isinstance(each, np.ndarray)] == want


def test_a_long_space_before_a_list_changes_nothing() -> None:
    fields = read_body(b'{"prompt":' + b" " * 200 + b"[1, 2]}")
    (ids,) = read_prompts(fields["prompt"], VOCABULARY)
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == [1, 2]


def test_short_work_passes_long_work() -> None:
    async def both() -> None:
        lanes, release = Lanes(), threading.Event()
        try:
            long = [asyncio.ensure_future(lanes.run(2**20, release.wait, 30)) for _ in range(8)]
            await asyncio.wait_for(lanes.run(10, lambda: None), 20)
            assert not any(work.done() for work in long)
        finally:
            release.set()
            await asyncio.gather(*long)
            lanes.close()

    asyncio.run(both())


def test_work_of_a_client_that_left_does_not_begin() -> None:
    async def leave() -> list[int]:
        lanes, release, begun = Lanes(threads=1), threading.Event(), list[int]()
        blocking = asyncio.ensure_future(lanes.run(10, release.wait, 30))
        waiting = asyncio.ensure_future(lanes.run(10, begun.append, 1))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.sleep(0.05)
        release.set()
        await blocking
        await lanes.run(10, lambda: None)
        lanes.close()
        return begun

    assert asyncio.run(leave()) == []
