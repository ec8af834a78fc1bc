"""`longfill bench parallel`: flags, mistakes, and the values that its commands print."""

from __future__ import annotations

import json

import pytest
from tests.native import needs_native

MISTAKES = [
    (["bench", "parallel"], "Missing command"),
    (["prefill", "--layouts", "1,ep2"], "--layouts: 'ep2' is no layout"),
    (["prefill", "--layouts", "dcp2"], "--layouts: dcp2"),
    (["prefill", "--layouts", "1,tp8"], "--tensor-parallel-size 8: the model has 4 heads"),
    (["prefill", "--lengths", "1k"], "--lengths"),
    (["prefill", "--lengths", "2000000", "--layouts", "1"], "2,000,000 tokens and 1 behind it are more than"),
    (["prefill", "--lengths", "64", "--tokens-measured", "65"], "of 64 tokens 65 cannot be measured"),
    (["prefill", "--lengths", "1000", "--tokens-measured", "8"], "a context of 992 tokens"),
    (["prefill", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
    (["prefill", "--plot", "no/such/folder/a.png"], "no/such/folder"),
    (["decode", "--context", "100", "--layouts", "1"], "a context of 100 tokens"),
    (["decode", "--context", "1048576", "--layouts", "1"], "1,048,577 tokens and 17 behind it are more than"),
    (["decode", "--speculative-config", "{}"], "--speculative-config"),
    (["decode", "--repeats", "0"], "--repeats"),
    (["balance", "--split", "zigzag,even"], "--split even"),
    (["balance", "--ranks", "0"], "--ranks"),
    (["balance", "--plot", "no/such/folder/a.png"], "no/such/folder"),
]


@pytest.mark.parametrize(("args", "named"), MISTAKES, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_mistake_is_one_line_and_exit_code_2(longfill, args, named):
    ran = longfill(*(args if args[0] == "bench" else ["bench", "parallel", *args]))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert named in ran.err


def test_balance_prints_one_object_and_report_its_table(longfill, tmp_path):
    args = ["bench", "parallel", "balance", "--length", "8192", "--chunk", "1024", "--topk", "64"]
    ran = longfill(*args, "--split", "zigzag,contiguous", "--json", "--plot", str(tmp_path / "a.png"))
    values = json.loads(ran.out)
    assert values.keys() == {"parallel", "length", "chunk", "topk", "results"}
    assert [(result["split"], result["ranks"]) for result in values["results"]] == [
        ("zigzag", 2), ("contiguous", 2), ("zigzag", 4), ("contiguous", 4),
    ]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a-dark.png"}
    (tmp_path / "balance.json").write_text(ran.out)
    report = longfill("bench", "report", str(tmp_path / "balance.json"), "--plot", str(tmp_path / "b.png"))
    assert report.code == 0
    assert "| zigzag" in report.out
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "a.png").read_bytes()


@needs_native
def test_prefill_and_decode_print_one_object_each(longfill, tmp_path):
    layouts = ["--layouts", "1,pcp2", "--repeats", "1", "--json", "--preset", "toy", "--keep", str(tmp_path)]
    small = [*layouts, "--hf-overrides", '{"vocab_size": 128, "hidden_size": 64}', "--memory-budget", "3GiB"]
    common = {"machine", "load_average", "model", "threads", "repeats", "layouts", "parallel", "results"}
    common |= {"machine_scaling"}

    ran = longfill("bench", "parallel", "prefill", *small, "--lengths", "192", "--tokens-measured", "128")
    prefill = json.loads(ran.out)
    assert prefill.keys() == common | {"tokens_measured", "chunk"}
    assert (prefill["model"], prefill["threads"], prefill["tokens_measured"]) == ("toy", 1, 128)
    assert [(found["layout"], found["filled"]) for found in prefill["results"]] == [("1", 64), ("pcp2", 64)]
    assert "pcp2, 192 tokens:" in ran.err

    ran = longfill("bench", "parallel", "decode", *small, "--context", "128", "--max-tokens", "2")
    decode = json.loads(ran.out)
    assert decode.keys() == common | {"context", "decoded"}
    assert [found["same_bits"] for found in (*prefill["results"], *decode["results"])] == [None, True, None, True]
    assert [found["steps"] for found in decode["results"]] == [2, 2]
