"""The bundled model answers long chats over the API, and the client sees how far its prompt is."""

from __future__ import annotations

import time

import httpx
import pytest
from tests.server.running import Running

from longfill import LLM
from longfill.needle.haystack import Haystack, build_haystack


@pytest.fixture(scope="module")
def count() -> object:
    """Tokens of a text, as the bundled model counts them."""
    tokenizer = LLM("needle", max_model_len=256).tokenizer
    assert tokenizer is not None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _haystack(count: object, context: int) -> Haystack:
    assert callable(count)
    return build_haystack(context, seed=11, count=count, reserve=1, depth=0.4)


@pytest.mark.parametrize("context", [8192, pytest.param(131_072, marks=pytest.mark.slow)])
def test_a_fact_is_found_in_a_long_chat_with_progress_on_the_way(
    needle_server: Running, count: object, context: int
) -> None:
    haystack = _haystack(count, context)
    fact = haystack.facts[0]
    stream = (
        needle_server.client()
        .with_options(timeout=500)
        .chat.completions.create(
            model="needle",
            messages=[{"role": "user", "content": haystack.text + haystack.chat_question(fact)}],
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stream_options": {"include_usage": True, "prefill_progress": True}},
        )
    )
    text, done, usage = "", [], None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        progress = (chunk.model_extra or {}).get("prefill_progress")
        if progress:
            assert not text, "the prompt is done before the first word"
            done.append(progress["tokens_done"])
        usage = chunk.usage or usage
    assert fact.code in text.replace(" ", "")
    assert done == sorted(set(done))
    assert len(done) >= (3 if context > 100_000 else 1)  # a short prompt may be done between two frames
    assert usage is not None
    assert done[-1] == usage.prompt_tokens == context


def test_a_second_turn_finds_the_first_in_the_cache(needle_server: Running, count: object) -> None:
    haystack = _haystack(count, 8192)
    # Its first part alone belongs to both turns: what follows it is another question each time.
    for turn, fact in enumerate(haystack.facts[:2]):
        answer = needle_server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": haystack.text + haystack.chat_question(fact)}],
            temperature=0,
            max_tokens=16,
            cache_salt="turns",
            explain_prefix_cache=True,
        ).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answer["prefix_cache"]["cached_tokens"] == cached
        assert cached == 0 if turn == 0 else cached > 8000
        assert fact.code in answer["choices"][0]["message"]["content"].replace(" ", "")


def test_a_raw_client_gets_its_headers_at_once(needle_server: Running, count: object) -> None:
    body = {
        "messages": [{"role": "user", "content": _haystack(count, 65_536).text}],
        "stream": True,
        "max_tokens": 1,
        "cache_salt": "raw",
    }
    began = time.monotonic()
    with httpx.stream("POST", f"{needle_server.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        # A second is promised; making the request on a busy machine takes some of it.
        assert time.monotonic() - began < 2
        first = next(response.iter_lines())
    assert first.startswith(":")
    needle_server.wait_until_idle()
