"""`longfill bench serve` against the real server: its counts are the server's own, and the cache is found out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.server.running import Running

from longfill.cli.main import exit_code


@pytest.fixture
def bench(needle_server: Running, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*args: str) -> tuple[dict[str, Any], str]:
        code = exit_code(["bench", "serve", "--base-url", needle_server.url, *args, "--ignore-eos", "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out), captured.err

    return run


def counted(server: Running) -> dict[str, int]:
    text = server.http.get("/metrics").text
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "time_to_first_token_seconds_count")
    found = {name: re.search(rf"^vllm:{name}(?:_total)?{{[^}}]*}} (\S+)$", text, re.M) for name in names}
    return {name: int(float(match[1])) for name, match in found.items() if match}


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_plan_05_tokens_are_those_that_the_server_counts(needle_server, bench, endpoint):
    before = counted(needle_server)
    values, _ = bench("--mix", "3000:4:1", "--mix", "200:20:4", "--num-prompts", "10", "--endpoint", endpoint)
    after = counted(needle_server)
    grown = {name: after[name] - before[name] for name in before}
    overall, (long, short) = values["overall"], values["classes"]
    assert (long["completed"], short["completed"], overall["failed"]) == (2, 8, 0)
    assert overall["total_output_tokens"] == 2 * 4 + 8 * 20
    added = (overall["total_input_tokens"] - (2 * 3000 + 8 * 200)) / 10
    assert 0 <= added < 10
    assert added == int(added)
    # What was asked before the run (which words are one token) is one short prompt each.
    asked = grown["time_to_first_token_seconds_count"] - 10
    assert asked >= 1
    assert 0 <= grown["prompt_tokens"] - overall["total_input_tokens"] <= 200 * asked
    assert grown["generation_tokens"] - overall["total_output_tokens"] == asked
    checks = {check["name"]: check for check in values["checks"]}
    assert (
        checks["prompt lengths"]["level"]
        == checks["output lengths"]["level"]
        == checks["prefix cache"]["level"]
        == "ok"
    )
    assert "chunks" not in checks or endpoint == "/v1/completions"


def test_plan_05_a_seed_that_the_server_has_seen_is_warned_about(bench):
    load = ("--num-prompts", "4", "--random-input-len", "1000", "--random-output-len", "4", "--seed", "11")
    first, said_first = bench(*load)
    second, said_second = bench(*load)
    assert "CACHED" not in said_first
    assert "OF PROMPT TOKENS WERE CACHED" in said_second
    assert sum(request["cached_tokens"] for request in second["requests"]) > 3000
    assert not any(request["cached_tokens"] for request in first["requests"])
