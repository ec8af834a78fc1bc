"""`longfill bench serve` against a real HTTP server with scripted times: what it measures, sends, checks and says."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.bench.scripted_server import Script, content_of, serving

from longfill.cli.bench_serve_progress import LoadProgress
from longfill.cli.main import exit_code


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def values(self) -> dict[str, Any]:
        return json.loads(self.out)

    def check(self, name: str) -> dict[str, str]:
        return next(check for check in self.values["checks"] if check["name"] == name)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def bench(script: Script, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs the command against the scripted server; `--json` unless told otherwise."""
    with serving(script) as address:

        def run(*args: str, as_json: bool = True) -> Ran:
            capsys.readouterr()
            code = exit_code(["bench", "serve", "--base-url", address, *args, *(["--json"] if as_json else [])])
            captured = capsys.readouterr()
            return Ran(code, captured.out, captured.err)

        yield run


SMALL = ("--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "5")
CHAT = ("--endpoint", "/v1/chat/completions")


def test_times_of_a_server_with_known_times_are_found(bench, script):
    script.first, script.gap = 0.4, 0.1
    ran = bench(*SMALL, "--metric-percentiles", "50")
    assert ran.code == 0
    figures = ran.values["overall"]
    assert figures["completed"] == 4
    # Upper limits only where a time that includes another phase would be outside them, however busy the machine is.
    assert 400 <= figures["p50_ttft_ms"] <= figures["mean_e2el_ms"] - 390
    assert 95 <= figures["median_itl_ms"] < 400
    assert 95 <= figures["mean_tpot_ms"] <= (figures["mean_e2el_ms"] - 400) / 4
    assert 800 <= figures["mean_e2el_ms"] <= 1e3 * ran.values["duration"]
    assert figures["max_silence_ms"] >= 395
    assert 0.8 <= ran.values["duration"] < 3.2, "four at a time, not one after another"
    assert figures["max_concurrent_requests"] == script.most_running == 4
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (80, 20)


def test_what_is_sent_is_what_was_asked_for(bench, script):
    ran = bench(
        "--mix", "30:3:1", "--mix", "8:2:3", "--num-prompts", "8", "--random-prefix-len", "5", "--ignore-eos",
        "--temperature", "0.5", "--extra-body", '{"cache_salt": "a"}', "--header", "X-Team=blue", "--api-key", "key",
        "--seed", "7",
    )  # fmt: skip
    assert ran.code == 0
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in script.timed) == [(13, 2)] * 6 + [(35, 3)] * 2
    for body in script.timed:
        assert (body["ignore_eos"], body["temperature"], body["cache_salt"]) == (True, 0.5, "a")
        assert (body["model"], body["stream"]) == ("scripted", True)
        assert all(0 <= token < 1000 for token in body["prompt"])
    assert len({tuple(body["prompt"][:5]) for body in script.timed}) == 1
    assert len({tuple(body["prompt"][5:]) for body in script.timed}) == 8
    for headers in script.headers:
        assert (headers["x-team"], headers["authorization"]) == ("blue", "Bearer key")
    assert {headers["x-request-id"] for headers in script.headers[-8:]} == {f"bench-7-{number}" for number in range(8)}
    assert [group["name"] for group in ran.values["classes"]] == ["30:3", "8:2"]
    assert [group["completed"] for group in ran.values["classes"]] == [2, 6]
    assert "key" not in ran.out.replace("key_", "")


def test_a_seed_repeats_the_prompts_and_without_one_they_are_new(bench, script):
    def prompts(*args: str) -> list[list[int]]:
        script.bodies.clear()
        assert bench(*SMALL, *args).code == 0
        return sorted(body["prompt"] for body in script.timed)

    assert prompts("--seed", "1") == prompts("--seed", "1")
    assert prompts() != prompts()


def test_a_limit_on_requests_in_flight_is_kept_and_reached(bench, script):
    script.first = 0.05
    ran = bench("--num-prompts", "9", "--max-concurrency", "3", "--random-input-len", "4", "--random-output-len", "2")
    assert script.most_running == 3
    assert ran.values["overall"]["max_concurrent_requests"] == 3
    assert ran.values["overall"]["mean_concurrent_requests"] > 2


def test_requests_arrive_at_their_rate(bench):
    ran = bench("--num-prompts", "21", "--request-rate", "40", "--burstiness", "1000", "--random-output-len", "2")
    starts = [request["start"] for request in ran.values["requests"]]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(0.5, abs=0.1)
    assert ran.check("load")["level"] == "ok"


def test_a_load_that_a_limit_holds_back_is_said(bench, script):
    script.first = 0.3
    ran = bench(*SMALL, "--request-rate", "1000", "--max-concurrency", "1", "--percentile-metrics", "client_queue_time")
    assert ran.check("load")["level"] == "warning"
    assert ran.values["overall"]["mean_client_queue_time_ms"] > 200
    assert "warning: load: " in ran.err
    assert ran.code == 0


@pytest.mark.parametrize("tokenize", [True, False], ids=["tokenize", "usage"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_text_has_the_length_that_the_server_counts(bench, script, tokenize, endpoint):
    script.template, script.tokenize = 6, tokenize
    del script.model["vocab_size"]
    ran = bench(*SMALL, *(CHAT if endpoint == "chat" else ()))
    assert ran.code == 0
    assert [script.num_tokens(content_of(body)) for body in script.timed] == [26] * 4
    assert [request["prompt_tokens"] for request in ran.values["requests"]] == [26] * 4
    assert ran.check("prompt lengths")["message"] == "as asked for (+6 tokens each from the server's template)"
    assert ran.values["prompts"] == "random words"
    # One request tells whether the route counts as the endpoint does.
    assert (len(script.bodies) - len(script.timed) == 1) is tokenize


def test_plan_05_prompts_of_another_length_than_asked_for_fail_the_run(bench, monkeypatch):
    monkeypatch.setattr(Script, "num_tokens", lambda _self, prompt: min(len(prompt), 18))
    ran = bench(*SMALL)
    assert ran.code == 1
    assert ran.check("prompt lengths")["level"] == "error"
    assert "4 of 4 prompts had other lengths than asked for (-2 tokens)" in ran.err


def test_a_server_that_loses_tokens_of_every_prompt_is_not_measured(bench, script):
    script.lost = 1
    ran = bench(*SMALL)
    assert (ran.code, ran.out) == (2, "")
    assert "counts 15 tokens in a prompt of 16 token ids" in ran.err


def test_plan_05_the_cache_hit_rate_is_printed_and_warned_about(bench, script):
    script.cached = 10
    ran = bench(*SMALL)
    assert ran.code == 0
    assert "50.0% OF PROMPT TOKENS WERE CACHED" in ran.err
    assert bench(*SMALL, "--random-prefix-len", "10").check("prefix cache")["level"] == "ok"
    script.cached = None
    assert "does not say" in bench(*SMALL).check("prefix cache")["message"]


def test_outputs_that_end_early_are_said_and_fail_where_the_end_was_to_be_ignored(bench, script):
    script.stops_after = 3
    ran = bench(*SMALL)
    assert (ran.code, ran.check("output lengths")["level"]) == (0, "warning")
    assert bench(*SMALL, "--ignore-eos").check("output lengths")["message"] == "as asked for"
    script.honours_ignore_eos = False
    ran = bench(*SMALL, "--ignore-eos")
    assert (ran.code, ran.check("output lengths")["level"]) == (1, "error")


def test_a_server_without_usage_is_refused_before_the_run(bench, script):
    script.usage = False
    ran = bench(*SMALL)
    assert (ran.code, ran.out) == (2, "")
    assert "reports no usage" in ran.err


FAILURES = [
    ("busy", "rejected", "too many requests wait"),
    ("refuse", "HTTP 400", "no such field"),
    ("error", "error in the stream", "the engine is gone"),
    ("cut", "cut short", "without [DONE]"),
    ("drop", "disconnected", ""),
    ("abort", "finish reason abort", "gave the output up"),
    ("plain", "bad stream", "application/json"),
    ("babble", "bad stream", "not a chunk: 'what?'"),
]


@pytest.mark.parametrize(("fails", "kind", "message"), FAILURES, ids=[failure[0] for failure in FAILURES])
def test_failures_are_counted_by_kind_and_fail_the_run(bench, script, fails, kind, message):
    script.fails, script.fail_every = fails, 2
    ran = bench(*SMALL)
    assert ran.code == 1
    (failure,) = ran.values["failures"]
    assert (failure["kind"], failure["count"]) == (kind, 2)
    assert message in failure["message"]
    assert (ran.values["overall"]["completed"], ran.values["overall"]["failed"]) == (2, 2)
    assert f"2 failed: {kind}" in ran.err
    # What failed is in no figure.
    assert ran.values["overall"]["total_output_tokens"] == 10


def test_a_request_that_does_not_end_times_out(bench, script):
    script.fails, script.fail_every = "hang", 4
    ran = bench(*SMALL, "--timeout", "1.5")
    assert ran.code == 1
    assert [(f["kind"], f["count"]) for f in ran.values["failures"]] == [("timeout", 1)]


def test_when_everything_fails_there_are_no_figures_but_the_reason(bench, script, tmp_path):
    script.fails = "refuse"
    ran = bench(*SMALL, "--plot", str(tmp_path / "run.png"), as_json=False)
    assert ran.code == 1
    assert (tmp_path / "run.png").exists()
    assert "| HTTP 400 |" in ran.out
    assert "| TTFT | all" in ran.out


def test_warm_ups_do_not_count_and_share_nothing_with_the_run(bench, script):
    ran = bench(*SMALL, "--num-warmups", "3", "--random-prefix-len", "4")
    assert ran.values["overall"]["completed"] == 4
    prompts = [tuple(body["prompt"]) for body in script.timed]
    assert len(prompts) == len(set(prompts)) == 7
    assert not {prompt[:4] for prompt in prompts[:3]} & {prompt[:4] for prompt in prompts[3:]}
    script.fails = "refuse"
    ran = bench(*SMALL, "--num-warmups", "1")
    assert (ran.code, ran.out) == (2, "")
    assert "a warm-up request failed: HTTP 400: no such field" in ran.err


def test_the_table_shows_every_class_and_the_report_gives_it_again(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "run.json"
    ran = bench(
        "--mix", "30:3", "--mix", "8:2", "--num-prompts", "6", "--goodput", "ttft:10000 e2el:10000", "--save-result",
        "--result-filename", str(saved), "--save-detailed", "--plot", str(tmp_path / "run.png"), as_json=False,
    )  # fmt: skip
    assert ran.code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows if row[0] in ("30:3", "8:2", "all")] == ["30:3", "8:2", "all"]
    assert [row[:2] for row in rows if row[0] == "TTFT"] == [["TTFT", "30:3"], ["TTFT", "8:2"], ["TTFT", "all"]]
    assert "goodput/s" in ran.out
    assert "- prompt lengths: as asked for" in ran.out
    values = json.loads(saved.read_text())
    assert [len(request["itls"]) for request in values["requests"]] == [r["output_len"] - 1 for r in values["requests"]]
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.png", "run-dark.png"}
    assert exit_code(["bench", "report", str(saved), "--plot", str(tmp_path / "again.png")]) == 0
    assert capsys.readouterr().out == ran.out
    assert (tmp_path / "again-dark.png").read_bytes()[:4] == b"\x89PNG"


def test_a_result_without_a_name_is_saved_under_one(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(*SMALL, "--save-result").code == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("infqps-scripted-")
    assert json.loads(path.read_text())["request_rate"] is None


def test_progress_is_on_stderr(bench):
    ran = bench(*SMALL)
    assert "longfill: sending 4 requests to http://127.0.0.1:" in ran.err
    assert "4 of 4 requests · 0 in flight" in ran.err


def test_progress_on_a_terminal_is_one_live_line(capsys):
    from rich.console import Console

    from longfill.bench.serve_metrics import Answer
    from longfill.bench.serve_plan import Job

    now = 0.0
    console = Console(force_terminal=True, width=120)
    with LoadProgress(console, 2, clock=lambda: now) as progress:
        progress.on_answer(None)
        progress.on_answer(None)
        now = 2.0
        progress.on_answer(Answer(Job(0, 0, 100, 1, 0.0), prompt_tokens=100, failure="rejected"))
        assert progress.line() == "1 of 2 requests · 1 in flight · 1 failed · 50 tokens/s · 2.0 s"
    assert "1 of 2 requests" in capsys.readouterr().out


MISTAKES = [
    (["--endpoint", "/v1/embeddings"], "--endpoint /v1/embeddings"),
    (["--request-rate", "0"], "--request-rate 0"),
    (["--request-rate", "nan"], "--request-rate nan"),
    (["--burstiness", "inf"], "--burstiness inf"),
    (["--mix", "8"], "--mix 8"),
    (["--mix", "8:2", "--random-input-len", "4"], "give one"),
    (["--mix", "8:2:1", "--mix", "4:2:9999"], "--num-prompts 1000 leaves none"),
    (["--vocab-size", "9", *CHAT], "--vocab-size"),
    (["--random-range-ratio", "1"], "--random-range-ratio"),
    (["--percentile-metrics", "ttft,p99"], "--percentile-metrics p99"),
    (["--metric-percentiles", "101"], "--metric-percentiles 101"),
    (["--goodput", "itl:5"], "--goodput itl:5"),
    (["--goodput", "ttft:soon"], "--goodput ttft:soon"),
    (["--header", "x"], "--header x"),
    (["--extra-body", "[]"], "--extra-body"),
    (["--extra-body", "{"], "--extra-body"),
    (["--result-filename", "a.json"], "without --save-result"),
    (["--save-result", "--result-filename", "no/such/folder/a.json"], "no/such/folder"),
    (["--plot", "no/such/folder/a.png"], "no/such/folder"),
    (["--model", "other", *SMALL], "--model other: the server has scripted"),
    (["--random-input-len", "99999"], "requests of 99999:128 take up to 100,127 tokens, more than the server's limit"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "named"), MISTAKES, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_mistake_is_exit_code_2_before_anything_is_sent(bench, script, args, named):
    ran = bench(*args)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err.splitlines()[-1]
    assert script.bodies == []


def test_a_server_that_is_not_there_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert exit_code(["bench", "serve", "--port", str(port)]) == 2
    assert f"cannot reach http://127.0.0.1:{port}/v1/models" in capsys.readouterr().err


def test_a_base_url_may_end_in_v1_and_slashes(bench, capsys):
    address = bench(*SMALL).values["base_url"]
    assert exit_code(["bench", "serve", "--base-url", f"{address}/v1/", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base_url"] == address


def test_the_client_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from longfill.cli.main import exit_code\n"
        "assert exit_code(['bench', 'serve', '--port', '9', '--num-prompts', '1']) == 2\n"
        "assert 'httpx' in sys.modules and 'torch' not in sys.modules and 'longfill.server' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
