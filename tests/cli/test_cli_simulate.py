"""`longfill simulate`: what it prints, what it draws, and that it needs no torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from longfill.cli.simulate import KNOBS
from longfill.config import EngineArgs
from longfill.scheduler import SchedulerConfig
from longfill.simulate.plot import _series

TRACE = [
    {"id": "a", "prompt_tokens": 100, "max_tokens": 3},
    {"id": "b", "prompt_token_ids": [1, 2, 3], "max_tokens": 2, "at_step": 1, "priority": 1, "tenant": "t"},
]
PNG = b"\x89PNG\r\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
    return str(path)


def test_json_has_every_step_and_every_request(longfill, trace):
    clock = ("--step-seconds", "2", "--token-seconds", "0", "--pair-seconds", "0")
    pool = ("--num-pages", "9", "--block-size", "16")
    ran = longfill("simulate", trace, "--json", "--max-num-batched-tokens", "64", *pool, *clock)
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    values = json.loads(ran.out)
    assert values.keys() == {"clock", "cost", "steps", "requests", "summary"}
    assert (values["clock"], values["cost"]["step_seconds"]) == ("virtual", 2.0)
    assert values["steps"] == [
        {
            "step": step, "time_s": 2.0 * step, "seconds": 2.0, "scheduled": scheduled, "prefills": prefills,
            "new": new, "resumed": [], "preempted": [], "finished": finished, "pages_in_use": used, "free_pages": free,
        }
        for step, scheduled, prefills, new, finished, used, free in [
            (0, {"a": 64}, {"a": 64}, ["a"], [], 4, 4),
            (1, {"a": 36, "b": 3}, {"a": 36, "b": 3}, ["b"], [], 8, 0),
            (2, {"a": 1, "b": 1}, {}, [], ["b"], 8, 1),
            (3, {"a": 1}, {}, [], ["a"], 7, 8),
        ]
    ]  # fmt: skip
    assert values["requests"]["b"] == {
        "prompt_tokens": 3, "arrival_s": 2.0, "first_scheduled_s": 2.0, "first_token_s": 4.0, "finished_s": 6.0,
        "first_scheduled_step": 1, "first_token_step": 1, "finished_step": 2, "output_token_ids": [1000, 1001],
        "finish_reason": "length", "message": None, "num_cached_tokens": 0, "num_preemptions": 0,
    }  # fmt: skip
    summary = values["summary"]
    assert (summary["steps"], summary["seconds"], summary["computed_tokens"], summary["output_tokens"]) == (
        4,
        8.0,
        106,
        5,
    )
    assert summary["ttft_s"] == {"mean": 3.0, "p50": 3.0, "p90": 3.8, "p99": 3.98, "max": 4.0}
    assert summary["itl_s"]["max"] == 2.0
    assert (summary["num_pages"], summary["most_pages_in_use"], summary["finish_reasons"]) == (8, 8, {"length": 2})


def test_the_table_says_that_its_times_are_virtual(longfill, trace):
    ran = longfill("simulate", trace)
    assert ran.code == 0
    assert ran.out.startswith("Virtual time: 25 ms a step + 8 us a token + 5 ps a (query, key) pair")
    for text in ("2 (2 length)", "time to first token, p50", "between tokens, p99", "preemptions", "3 of 3"):
        assert text in ran.out


def test_a_refused_request_is_told_with_the_reason(longfill, trace):
    ran = longfill("simulate", trace, "--max-model-len", "50")
    assert ran.code == 0
    assert "1 length, 1 refused" in ran.out
    assert "refused: request a: the prompt has 100 tokens" in ran.out


def test_a_trace_may_come_from_standard_input(longfill, trace, stdin):
    stdin(Path(trace).read_bytes())
    assert longfill("simulate", "-", "--json").out == longfill("simulate", trace, "--json").out


def test_policies_side_by_side(longfill):
    spec = "long=1x40000, short=5x50 at 0.1s"
    ran = longfill("simulate", "--synthetic", spec, "--compare", "prefill-policy=ordered,fair", "--json")
    values = json.loads(ran.out)
    runs = values["runs"]
    assert (values["compare"], [run["name"] for run in runs]) == ("prefill-policy", ["ordered", "fair"])
    alone = json.loads(longfill("simulate", "--synthetic", spec, "--prefill-policy", "fair", "--json").out)
    assert runs[1]["steps"] == alone["steps"] != runs[0]["steps"]
    table = longfill("simulate", "--synthetic", spec, "--compare", "enable-prefix-caching=on,off")
    assert table.code == 0
    assert table.out.splitlines()[1].split() == ["enable-prefix-caching", "on", "off"]


@pytest.mark.parametrize("compare", [[], ["--compare", "prefill-policy=ordered,fair"]], ids=["one", "two"])
@pytest.mark.parametrize("shorts", [5, 100])
def test_a_picture_for_light_and_one_for_dark_pages(longfill, tmp_path, compare, shorts):
    target = tmp_path / "steps.png"
    spec = f"long=1x40000, short={shorts}x50 at 0.1s every 0.5s"
    ran = longfill("simulate", "--synthetic", spec, *compare, "--plot", str(target))
    assert ran.code == 0
    assert [path.read_bytes()[:6] for path in (target, tmp_path / "steps-dark.png")] == [PNG, PNG]
    assert "steps-dark.png" in ran.err


@pytest.mark.parametrize(
    "ids", [("decode", "b"), ("$a_{$b", "$"), ("a\u2028b", "c")], ids=["like the decodes", "not math", "line end"]
)
def test_any_id_can_be_drawn(longfill, tmp_path, ids):
    path, target = tmp_path / "trace.jsonl", tmp_path / "steps.png"
    lines = [json.dumps({"id": name, "prompt_tokens": 500}, ensure_ascii=False) for name in ids]
    path.write_text("\n".join(lines), encoding="utf-8")
    ran = longfill("simulate", str(path), "--plot", str(target))
    assert ran.code == 0
    assert target.read_bytes()[:6] == PNG


def test_a_prompt_may_be_called_like_the_decodes():
    steps = [{"scheduled": {"decode": 9, "b": 1}, "prefills": {"decode": 9}}]
    assert _series({"steps": steps}) == [("decode", [1]), ("decode", [9])]


def test_nothing_but_refused_requests_can_be_drawn(longfill, tmp_path):
    ran = longfill("simulate", "--synthetic", "a=1x500", "--num-pages", "2", "--plot", str(tmp_path / "steps.png"))
    assert ran.code == 0
    assert "1 refused" in ran.out


MISTAKES = [
    ([], "--synthetic"),
    (["x.jsonl", "--synthetic", "a=1x5"], "not both"),
    (["no/such/file"], "no/such/file"),
    (["."], "cannot read ."),
    (["--synthetic", "nonsense"], "nonsense"),
    (["--synthetic", "a=1x5", "--num-pages", "1"], "--num-pages"),
    (["--synthetic", "a=1x5", "--num-pages", "100000001"], "--num-pages"),
    (["--synthetic", "a=1x5 out 99999999999999"], "--max-model-len"),
    (["--synthetic", "a=1x5", "--step-seconds", "-1"], "--step-seconds"),
    (["--synthetic", "a=1x5", "--draft-acceptance", "1.5"], "--draft-acceptance"),
    (["--synthetic", "a=1x5", "--draft-acceptance", "0.5"], "--speculative-config"),
    (["--synthetic", "a=1x5", "--speculative-config", '{"method": "magic"}'], "magic"),
    (["--synthetic", "a=1x5", "--block-size", "0"], "--block-size"),
    (["--synthetic", "a=1x5", "--memory-budget", "1GiB"], "--memory-budget"),
    (["--synthetic", "a=1x5", "--compare", "prefill-policy"], "--compare"),
    (["--synthetic", "a=1x5", "--compare", "dtype=auto"], "--compare"),
    (["--synthetic", "a=1x5", "--compare", "prefill-policy=lucky"], "lucky"),
    (["--synthetic", "a=1x5", "--compare", "max-num-seqs=many"], "--max-num-seqs"),
    (["--synthetic", "a=1x5", "--compare", "async-scheduling=maybe"], "--async-scheduling"),
    (["--synthetic", "a=1x5", "--long-prefill-token-threshold", "100"], "--long-prefill-token-threshold"),
    (["--synthetic", "a=1x5", "--plot", "no/such/folder/x.png"], "no/such/folder"),
]


@pytest.mark.parametrize(("args", "named"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line(longfill, args, named):
    ran = longfill("simulate", *args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert named in ran.err


def test_a_trace_that_is_no_text_is_one_line(longfill, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe")
    ran = longfill("simulate", str(path))
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "trace.jsonl" in ran.err


def test_every_knob_of_the_scheduler_is_a_flag():
    knobs = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {field.name for field in dataclasses.fields(SchedulerConfig)} & knobs <= set(KNOBS)


@pytest.mark.parametrize("args", [["--help"], ["simulate", "--help"], ["simulate", "--synthetic", "a=2x500"]])
def test_no_torch_is_loaded(args):
    program = (
        "import sys\n"
        "from longfill.cli.main import exit_code\n"
        f"assert exit_code({args!r}) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "steps", "seats"),
    [
        ([], EngineArgs().max_num_batched_tokens, EngineArgs().max_num_seqs),
        (["--device-memory", "24GiB"], 8192, 256),
        (["--device-memory", "80GiB"], 16384, 1024),
        (["--device-memory", "180GiB"], 16384, 1024),
        (["--device-memory", "80GiB", "--max-num-batched-tokens", "4096"], 4096, 1024),
        (["--device-memory", "80GiB", "--max-num-seqs", "64"], 16384, 64),
    ],
)
def test_device_memory_gives_the_limits_that_are_not_given(longfill, args, steps, seats):
    groups = "short=1100x1 out 3, long=1x40000"
    values = json.loads(longfill("simulate", "--synthetic", groups, "--json", *args).out)
    assert max(sum(step["scheduled"].values()) for step in values["steps"]) == steps
    assert max(len(step["scheduled"]) for step in values["steps"]) == seats
