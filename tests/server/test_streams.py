"""Deltas of one request, however late they are taken: the same output in fewer pieces."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.errors import EngineDeadError
from longfill.request import Logprob, SamplingParams
from longfill.server.messages import AddRequest, CompletionDelta, OutputDelta, RequestProgress
from longfill.server.streams import RequestStream

N = 3


def stream(prompt: int = 10) -> tuple[RequestStream, list[str]]:
    aborted: list[str] = []
    return RequestStream(AddRequest(request_id="a", params=SamplingParams()), prompt, aborted.append), aborted


def delta(parts: dict[int, str], *, finished: bool = False) -> OutputDelta:
    completions = [
        CompletionDelta(
            index=index,
            text=text,
            token_ids=[ord(char) for char in text],
            logprobs=[{ord(char): Logprob(-1.0, 1)} for char in text],
            finish_reason="stop" if finished else None,
        )
        for index, text in sorted(parts.items())
    ]
    return OutputDelta(request_id="a", completions=completions, finished=finished)


@given(
    given_parts=st.lists(st.dictionaries(st.integers(0, N - 1), st.text(max_size=3), min_size=1), max_size=12),
    takes=st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_taken_late_or_at_once_the_output_is_the_same(given_parts: list[dict[int, str]], takes: list[bool]) -> None:
    async def run() -> None:
        source, _ = stream()
        texts, ids, count = dict.fromkeys(range(N), ""), {index: [] for index in range(N)}, 0
        every = [*given_parts, dict.fromkeys(range(N), "")]
        for position, (parts, take) in enumerate(zip(every, takes, strict=False)):
            last = position == len(every) - 1
            source.put(delta(parts, finished=last))
            if not (take or last):
                continue
            got = await source.next()
            assert [part.index for part in got.completions] == sorted({part.index for part in got.completions})
            for part in got.completions:
                texts[part.index] += part.text
                ids[part.index] += part.token_ids
                assert part.logprobs is not None
                assert len(part.logprobs) == len(part.token_ids)
                count += len(part.token_ids)
            assert got.finished == last
        wanted = {index: "".join(parts.get(index, "") for parts in every) for index in range(N)}
        assert texts == wanted
        assert {index: "".join(map(chr, tokens)) for index, tokens in ids.items()} == wanted
        assert source.num_output_tokens == count
        assert source.finished

    asyncio.run(run())


def test_an_error_comes_after_the_deltas_that_wait_and_every_time() -> None:
    async def run() -> None:
        source, _ = stream()
        source.put(delta({0: "ab"}))
        source.fail(EngineDeadError("gone"))
        got = await source.next()
        assert got.completions[0].text == "ab"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await source.next()

    asyncio.run(run())


def test_leaving_the_context_ends_a_request_unless_it_has_ended() -> None:
    source, aborted = stream()
    with source:
        pass
    assert aborted == ["a"]
    source, aborted = stream()
    with source:
        source.put(delta({0: "a"}, finished=True))
    assert aborted == []


def test_a_waiter_gets_the_next_delta_and_is_not_woken_by_progress() -> None:
    async def run() -> None:
        source, _ = stream(1000)
        waits = asyncio.create_task(source.next())
        await asyncio.sleep(0)
        source.observe(RequestProgress("a", 100, 1000, 1000, 100))
        await asyncio.sleep(0)
        assert not waits.done()
        assert source.state == "prefill"
        assert source.num_computed_prompt_tokens == 100
        source.put(delta({0: "ab"}))
        assert (await asyncio.wait_for(waits, 10)).completions[0].text == "ab"
        assert source.state == "decode"

    asyncio.run(run())


def test_the_cached_part_of_a_prompt_is_known_from_its_first_step_on() -> None:
    source, _ = stream(1000)
    assert source.num_cached_tokens is None
    for computed in (740, 840):
        source.observe(RequestProgress("a", computed, 1000, 1000, 100, 640))
        assert source.num_cached_tokens == 640


def test_the_estimate_shrinks_as_the_prompt_goes_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 100 tokens whose time grows from 1 s to 3 s, as tokens with many before them cost more."""
    now = 0.0
    monkeypatch.setattr("longfill.server.streams.time.monotonic", lambda: now)
    source, _ = stream(1000)
    seconds = [1 + 2 * (chunk + 0.5) / 10 for chunk in range(10)]
    assert source.estimated_prefill_seconds is None
    for chunk in range(9):
        now += seconds[chunk]
        source.observe(RequestProgress("a", 100 * (chunk + 1), 1000, 1000, 100))
        if chunk:
            estimate = source.estimated_prefill_seconds
            assert estimate == pytest.approx(sum(seconds[chunk + 1 :]), rel=0.01)
    now += 1
    source.observe(RequestProgress("a", 100, 1000, 1000, 100))  # preempted, and begun anew
    assert source.estimated_prefill_seconds is None
