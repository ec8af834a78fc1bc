"""`longfill bench`: flags, mistakes, and the values that its commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.native import needs_native

from longfill.cli import bench
from longfill.kernels.cpu import available

MISTAKES = [
    (["bench"], "Missing command"),
    (["bench", "prefill", "--lengths", "1k"], "--lengths"),
    (["bench", "prefill", "--lengths", "64,0"], "--lengths"),
    (["bench", "prefill", "--lengths", "2000000"], "--lengths"),
    (["bench", "prefill", "--against", "vllm"], "--against vllm"),
    (["bench", "prefill", "--preset", "huge"], "--preset huge"),
    (["bench", "prefill", "some/model", "--preset", "toy"], "give one"),
    (["bench", "prefill", "--peer-memory-limit", "many"], "--peer-memory-limit"),
    (["bench", "prefill", "--dtype", "float32"], "--dtype"),
    (["bench", "prefill", "--hf-overrides", '{"index_topk": 8}'], "--hf-overrides"),
    (["bench", "prefill", "--plot", "no/such/folder/a.png"], "no/such/folder"),
    (["bench", "prefill", "--repeats", "0"], "--repeats"),
    (["bench", "decode", "--depths", "0,1"], "--depths"),
    (["bench", "decode", "--depths", "1,9"], "--depths: 9 is more than 8"),
    (["bench", "decode", "--drafts", "-1"], "--drafts"),
    (["bench", "decode", "--drafts", "9"], "--drafts: 9 is more than 8"),
    (["bench", "decode", "--text", "news"], "--text news"),
    (["bench", "decode", "--async-scheduling"], "--async-scheduling"),
    (["bench", "decode", "--preset", "toy", "--text", "haystack"], "--text haystack: a preset"),
    (["bench", "decode", "--plot", "no/such/folder/a.png"], "no/such/folder"),
    (["bench", "report", "no/such/file"], "no/such/file"),
]
if available():
    MISTAKES += [
        (["bench", "kernels", "--kernel", "softmax"], "--kernel softmax"),
        (["bench", "kernels", "--case", "no such"], "--case no such"),
        (["bench", "kernels", "--threads", "one"], "--threads"),
        (["bench", "kernels", "--isa", "mmx"], "--isa mmx"),
    ]


@pytest.mark.parametrize(("args", "named"), MISTAKES, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_mistake_is_one_line_and_exit_code_2(longfill, args, named):
    ran = longfill(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert named in ran.err


@needs_native
def test_kernels_prints_one_object_and_report_its_tables(longfill, monkeypatch, tmp_path):
    monkeypatch.setattr("longfill.bench.ceilings.BUFFER_BYTES", 2**20)
    monkeypatch.setattr(bench, "QUICK", 512)
    ran = longfill(
        "bench", "kernels", "--kernel", "index_topk", "--case", "1 row x", "--threads", "1,2", "--quick",
        "--repeats", "1", "--cpu-time", "--json", "--plot", str(tmp_path / "roofline.png"),
    )  # fmt: skip
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values.keys() == {"machine", "isa", "quick", "cpu_time", "ceilings", "kernels"}
    assert [roofs["threads"] for roofs in values["ceilings"]] == [1, 2]
    assert [case["threads"] for case in values["kernels"]] == [1] * 2 + [2] * 2
    assert all(case["torch_ratio"] > 0 and case["of_ceiling"] > 0 for case in values["kernels"])
    assert {path.name for path in tmp_path.iterdir()} == {"roofline.png", "roofline-dark.png"}
    saved = tmp_path / "kernels.json"
    saved.write_text(ran.out)
    report = longfill("bench", "report", str(saved), "--plot", str(tmp_path / "again.png"))
    assert report.code == 0
    assert "| `index_topk` |" in report.out
    assert (tmp_path / "again-dark.png").exists()


@needs_native
def test_kernels_can_leave_torch_out(longfill, monkeypatch):
    monkeypatch.setattr("longfill.bench.ceilings.BUFFER_BYTES", 2**20)
    monkeypatch.setattr(bench, "QUICK", 4096)
    args = ("--kernel", "index_topk", "--case", "1 row", "--threads", "1", "--quick", "--repeats", "1", "--no-torch")
    ran = longfill("bench", "kernels", *args)
    assert ran.code == 0
    assert "| `index_topk` | GLM-5, 1 row x 131,072 keys" in ran.out


TINY = {
    "num_hidden_layers": 1, "mlp_layer_types": ["dense"], "indexer_types": ["full"], "hidden_size": 64,
    "vocab_size": 128, "index_topk": 16,
}  # fmt: skip


def prefill(longfill: Any, *args: str) -> Any:
    return longfill(
        "bench", "prefill", "--preset", "toy", "--hf-overrides", json.dumps(TINY), "--against", "none",
        "--repeats", "1", "--num-threads", "1", "--memory-budget", "2GiB", *args,
    )  # fmt: skip


def test_prefill_prints_one_object_and_keeps_the_checkpoint(longfill, tmp_path: Path):
    ran = prefill(longfill, "--lengths", "24", "--keep", str(tmp_path), "--json", "--plot", str(tmp_path / "p.png"))
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values.keys() == {"machine", "model", "threads", "chunk", "peer_memory_limit", "results"}
    assert (values["model"], values["threads"]) == ("toy", 1)
    assert [result["length"] for result in values["results"]] == [24]
    assert {result["status"] for result in values["results"]} == {"ok"}
    assert json.loads((tmp_path / "toy-0" / "config.json").read_text())["hidden_size"] == 64
    assert (tmp_path / "p-dark.png").exists()


def test_a_kept_checkpoint_is_used_again_and_written_anew_for_other_fields(longfill, tmp_path: Path, monkeypatch):
    from longfill.bench.checkpoints import write_checkpoint

    written: list[Path] = []

    def write(folder: Path, *args: Any) -> None:
        written.append(folder)
        write_checkpoint(folder, *args)

    monkeypatch.setattr("longfill.bench.checkpoints.write_checkpoint", write)
    monkeypatch.setattr(bench, "_run_prefills", lambda _plan: [])
    for _ in range(2):
        assert prefill(longfill, "--keep", str(tmp_path)).code == 0
    assert len(written) == 1
    monkeypatch.setitem(TINY, "index_topk", 8)
    assert prefill(longfill, "--keep", str(tmp_path)).code == 0
    assert len(written) == 2


def test_longfill_itself_failing_is_exit_code_1(longfill, monkeypatch):
    from longfill.bench.prefill import PrefillResult

    failed = PrefillResult("longfill", "", 24, "failed", "the budget is too small")
    monkeypatch.setattr("longfill.bench.prefill.run_prefills", lambda _plan, _on_start: iter([failed]))
    ran = prefill(longfill, "--lengths", "24")
    assert ran.code == 1
    assert "failed" in ran.out
    assert "the budget is too small" in ran.err


def test_a_length_at_the_models_limit_leaves_room_for_the_token(longfill, monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "_run_prefills", lambda plan: plans.append(plan) or [])
    assert longfill("bench", "prefill", "needle", "--against", "none", "--lengths", "64,1048576").code == 0
    assert plans[0].lengths == (64, 1_048_575)
    assert plans[0].contenders == (plans[0].contenders[0],)


def test_a_file_of_something_else_is_a_mistake(longfill, tmp_path):
    for number, text in enumerate(("{", "[]", '{"machine": {}}')):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        ran = longfill("bench", "report", str(path))
        assert (ran.code, ran.err.count("\n")) == (2, 1)


def decode(longfill: Any, *args: str) -> Any:
    return longfill(
        "bench", "decode", "--preset", "toy", "--hf-overrides", json.dumps(TINY), "--context", "20", "--prompts", "2",
        "--max-tokens", "6", "--repeats", "1", "--num-threads", "1", "--memory-budget", "2GiB", *args,
    )  # fmt: skip


def test_decode_prints_one_object_and_report_its_table_and_picture(longfill, tmp_path):
    ran = decode(longfill, "--depths", "2,1", "--json", "--plot", str(tmp_path / "decode.png"))
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values.keys() == {
        "machine", "model", "threads", "text", "random_tokens", "description", "context", "prompts", "rounds",
        "repeats", "max_tokens", "temperature", "decodes",
    }  # fmt: skip
    assert (values["model"], values["text"], values["random_tokens"], values["threads"]) == ("toy", "random", True, 1)
    settings = [(result["drafts"], result["depth"]) for result in values["decodes"]]
    assert settings == [(drafts, depth) for drafts in range(4) for depth in (1, 2)]
    assert (tmp_path / "decode-dark.png").exists()
    saved = tmp_path / "decode.json"
    saved.write_text(ran.out)
    report = longfill("bench", "report", str(saved), "--plot", str(tmp_path / "again.png"))
    assert report.code == 0
    assert "| accepted by position |" in report.out
    assert "Text: random tokens" in report.out
    assert (tmp_path / "again-dark.png").exists()


def test_decode_without_drafts_writes_no_draft_layer(longfill, tmp_path):
    assert decode(longfill, "--depths", "1", "--drafts", "0", "--keep", str(tmp_path)).code == 0
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "toy-0" / "config.json").read_text())


def test_drafts_of_a_model_without_a_draft_layer_are_a_mistake(longfill, monkeypatch):
    monkeypatch.setitem(TINY, "num_nextn_predict_layers", 0)
    ran = decode(longfill, "--drafts", "0,1")
    assert (ran.code, ran.out) == (2, "")
    assert "the model has no draft layer" in ran.err
    assert decode(longfill, "--depths", "1").code == 0


def test_the_bundled_model_answers_the_questions_of_a_text(longfill):
    ran = longfill(
        "bench", "decode", "--text", "answers", "--context", "1100", "--prompts", "3", "--depths", "1,2",
        "--drafts", "0", "--repeats", "1", "--json",
    )  # fmt: skip
    assert ran.code == 0
    values = json.loads(ran.out)
    assert (values["model"], values["random_tokens"], values["max_tokens"]) == ("needle", False, 8)
    # Five digits and the end of the text, of which the first step gave one.
    assert {result["tokens"] for result in values["decodes"]} == {15}


def test_outputs_that_differ_are_exit_code_1(longfill, monkeypatch):
    from longfill.bench.decode import OutputsDifferError

    def differ(*_args: Any) -> Any:
        raise OutputsDifferError("prompt 0: other tokens")

    monkeypatch.setattr("longfill.bench.decode.run_decodes", differ)
    ran = decode(longfill)
    assert (ran.code, ran.out) == (1, "")
    assert "other tokens" in ran.err
