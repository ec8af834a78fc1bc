"""PFX-09: each request is told where the prefix cache's match ended and why, and nobody sees another tenant's text."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.running import Running

from longfill.server import cache_report
from longfill.server.cache_report import CachedPrompt, CacheReports, PrefixCacheReport, common_prefix

PAGE = 64


def _reports(**options: Any) -> CacheReports:
    decode = options.pop("decode", lambda ids: " ".join(f"w{token}" for token in ids))
    return CacheReports(page_size=PAGE, decode=decode, **{"enabled": True, **options})


def _prompt(name: str, ids: Any, cached: int = 0, **options: Any) -> CachedPrompt:
    fields = {"tenant": "", "salt": "", "prompt_logprobs": False, **options}
    return CachedPrompt(name, token_ids=np.asarray(ids, np.int64), num_cached_tokens=cached, **fields)


def _after(first: Any, second: Any, cached: int, **options: Any) -> PrefixCacheReport:
    reports = _reports()
    reports.explain(_prompt("1", first))
    return reports.explain(_prompt("2", second, cached, **options))


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_the_common_prefix_is_the_longest_one(a: list[int], b: list[int]) -> None:
    length = common_prefix(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


def test_the_common_prefix_crosses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "_BLOCK", 8)
    a = np.arange(100, dtype=np.int32)
    for at in (0, 7, 8, 9, 63, 64, 99):
        b = a.copy()
        b[at] = -1
        assert common_prefix(a, b) == at
    assert common_prefix(a, a[:50]) == 50


def test_a_prompt_that_was_there_is_a_whole_hit() -> None:
    report = _after(range(200), range(200), 192)
    assert (report.reason, report.cached_tokens, report.common_tokens) == ("whole_prompt", 192, 200)


def test_a_prompt_that_goes_on_ends_at_a_page() -> None:
    report = _after(range(200), range(400), 192)
    assert (report.reason, report.earlier_prompt_tokens) == ("page_not_full", 200)


def test_a_changed_token_is_shown_with_the_text_around_it() -> None:
    changed = list(range(400))
    changed[100] = 7777
    report = _after(range(400), changed, 64)
    assert report.reason == "token_differs"
    assert "position 100" in report.message
    assert "w7777" in report.message
    assert "w100" in report.message


def test_a_new_beginning_and_evicted_pages_are_told_apart() -> None:
    assert _after(range(400), range(1000, 1400), 0).reason == "new_beginning"
    assert _after(range(400), range(400), 64).reason == "evicted"
    assert _after(range(400), range(400), 0, prompt_logprobs=True).reason == "prompt_logprobs"
    assert _reports(enabled=False).explain(_prompt("1", range(400))).reason == "caching_off"


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"salt": "b"}])
def test_no_report_shows_text_of_another_tenant_or_salt(other: dict[str, str]) -> None:
    changed = list(range(400))
    changed[300] = 1
    report = _after(range(400), changed, 0, **other)
    assert (report.reason, report.common_tokens, report.earlier_prompt_tokens) == ("new_beginning", 0, None)


def test_a_conversation_that_loses_its_prefix_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, cache_report.__name__)
    earlier = [(i * i) % 997 for i in range(1000)]
    drifted = [*earlier[:8], 5000, *earlier[8:]]  # an effort line at token 8 moves all behind it
    _after(earlier, drifted, 0)
    (record,) = caplog.records
    assert "position 8" in record.getMessage()


def test_a_good_hit_and_an_unrelated_prompt_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, cache_report.__name__)
    earlier = [(i * i) % 997 for i in range(1000)]
    _after(earlier, [*earlier, 1, 2, 3], 960)
    _after(earlier, [*earlier[:8], *range(2000, 3000)], 0)
    assert not caplog.records


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "MAX_TOKENS", 1000)
    monkeypatch.setattr(cache_report, "MAX_REPORTS", 5)
    reports = _reports()
    for i in range(20):
        reports.explain(_prompt(str(i), range(i * 1000, i * 1000 + 300)))
    assert reports.last("14") is None
    assert reports.last("19") is not None
    assert reports.explain(_prompt("a", range(19_000, 19_300), 256)).common_tokens == 300
    assert reports.explain(_prompt("b", range(300), 0)).reason == "new_beginning"
    with_huge = reports.explain(_prompt("c", range(50_000, 55_000)))
    assert with_huge.prompt_tokens == 5000


def test_the_server_explains_on_request(tiny_server: Running) -> None:
    prompt = [20 + (7 * i * i) % 300 for i in range(500)]
    body = {"max_tokens": 1, "explain_prefix_cache": True, "cache_salt": "explained"}
    first = tiny_server.post("/v1/completions", prompt=prompt, **body).json()
    assert first["prefix_cache"]["reason"] == "new_beginning"
    again = tiny_server.post("/v1/completions", prompt=prompt, **body).json()
    assert again["prefix_cache"]["reason"] == "whole_prompt"
    assert again["prefix_cache"]["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] == 448
    changed = [*prompt[:130], 450, *prompt[131:]]
    options = {"stream_options": {"include_usage": True}}
    last = tiny_server.events("/v1/completions", prompt=changed, **body, **options)[-1]
    assert last["prefix_cache"]["reason"] == "token_differs"
    assert "position 130" in last["prefix_cache"]["message"]
    refused = tiny_server.post("/v1/completions", prompt=prompt, **body, stream=True)
    assert refused.json()["error"]["param"] == "explain_prefix_cache"


def test_the_server_logs_a_conversation_that_lost_its_prefix(tiny_server: Running) -> None:
    history = " ".join(f"word {i * i % 997}" for i in range(150))
    for beginning in ("low", "high"):
        messages = [{"role": "system", "content": beginning}, {"role": "user", "content": history}]
        assert tiny_server.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
    assert "looks like the same conversation: token differs at position" in tiny_server.log


def test_the_same_history_is_rendered_to_the_same_tokens(tiny_server: Running) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answers = [tiny_server.post("/tokenize", messages=messages).json()["tokens"] for _ in range(2)]
    assert answers[0] == answers[1]
    shorter = tiny_server.post("/tokenize", messages=messages[:2], add_generation_prompt=False).json()["tokens"]
    assert answers[0][: len(shorter)] == shorter
