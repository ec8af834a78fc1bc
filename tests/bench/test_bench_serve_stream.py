"""Streams of servers: events whole however they are cut, and only what was generated counts as a token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.bench.serve_stream import EventParser, Stream, StreamError, error_message, shows_tokens

LINES = st.sampled_from(
    [
        "data: one",
        "data:two",
        "data",
        "data: ",
        ": comment",
        "event: prefill_progress",
        "id: 7",
        "retry: 1",
        "",
        ":",
        "é: x",
    ]
)


def events(pieces: list[bytes]) -> list[tuple[str, str]]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(LINES), st.sampled_from(["\n", "\r\n"]), st.data())
def test_a_stream_cut_anywhere_gives_the_same_events(lines, end, data):
    whole = "".join(line + end for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected, event, collected = [], "", []
    for line in lines:
        name, _, value = line.partition(":")
        if line == "":
            if collected:
                expected.append((event, "\n".join(collected)))
            event, collected = "", []
        elif name == "data":
            collected.append(value.strip())
        elif name == "event":
            event = value.strip()
    assert events(pieces) == events([whole]) == expected


def test_events_have_names_and_lines_of_data_are_joined():
    text = b": hello\n\nevent: a\ndata: 1\ndata: 2\n\ndata: 3\n\n"
    assert events([text]) == [("a", "1\n2"), ("", "3")]


def data(*values: object) -> bytes:
    return b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values)


def text(shown: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": shown, "finish_reason": reason}]}


def delta(reason: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_times_are_of_tokens_alone():
    stream = Stream(1.0)
    stream.feed(b": waiting\n\n", 1.5)
    stream.feed(b'event: prefill_progress\ndata: {"choices": [], "done": 5}\n\n', 2.0)
    stream.feed(data(delta(role="assistant", content="")), 2.5)
    stream.feed(data(delta(content="a")), 5.0)
    stream.feed(data(delta(reasoning_content="b"), delta(content="c")), 6.0)
    stream.feed(data(delta("length")), 6.5)
    stream.feed(data(USAGE, b"[DONE]"), 7.0)
    assert (stream.first_token, stream.token_times, stream.finished) == (5.0, [5.0, 6.0, 6.0], 6.5)
    assert (stream.finish_reason, stream.done, stream.error) == ("length", True, None)
    assert (stream.count("prompt_tokens"), stream.count("completion_tokens"), stream.cached_tokens) == (9, 3, 4)
    assert stream.longest_silence == 2.5


def test_a_token_that_shows_no_text_is_seen_when_the_output_ends():
    stream = Stream(0.0)
    stream.feed(data(text("", "stop"), USAGE), 3.0)
    assert (stream.first_token, stream.token_times) == (3.0, [])
    empty = Stream(0.0)
    empty.feed(data(text("", "stop"), {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}), 3.0)
    assert empty.first_token is None


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, False),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": "", "token_ids": [3]}, True),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}, True),
        ({"delta": {"reasoning": "hm"}}, True),
        ({"delta": {"content": "", "token_ids": [3]}}, False),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_only_what_was_generated_counts(choice, shown):
    assert shows_tokens(choice) is shown


def test_an_error_in_a_stream_is_kept_and_usage_in_every_chunk_is_read():
    stream = Stream(0.0)
    stream.feed(data(text("a") | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}), 1.0)
    stream.feed(b"event: error\n" + data({"error": {"message": "no\nroom", "code": 500}}) + data(b"[DONE]"), 2.0)
    assert (stream.error, stream.done, stream.count("completion_tokens")) == ("no room", True, 1)


@pytest.mark.parametrize("junk", [b"data: nothing\n\n", b"data: [1]\n\n"])
def test_junk_is_not_a_chunk(junk):
    with pytest.raises(StreamError, match="not a chunk"):
        Stream(0.0).feed(junk, 1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"message": "c"}, "c"),
        ({"detail": [{"msg": "d"}]}, "[{'msg': 'd'}]"),
        ({"other": 1}, '{"other": 1}'),
        ("e\nf", "e f"),
        ("x" * 400, "x" * 297 + "..."),
    ],
)
def test_messages_of_errors_are_one_short_line(body, message):
    assert error_message(body) == message


def test_counts_that_are_no_numbers_are_none():
    stream = Stream(0.0)
    stream.feed(data({"choices": [], "usage": {"prompt_tokens": None, "prompt_tokens_details": None}}), 1.0)
    assert (stream.count("prompt_tokens"), stream.cached_tokens) == (None, None)
    assert Stream(0.0).cached_tokens is None
