"""The commands over the real engine and a tiny random checkpoint: what the fake cannot show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tests.native import needs_native
from tests.tiny import make_checkpoint

from longfill.kernels import cpu

ENGINE = ["--num-threads", "1", "--memory-budget", "4GiB", "--max-num-batched-tokens", "128"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A glm_moe_dsa folder with top-k 16 and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "glm_moe_dsa", bos_token_id=None, eos_token_id=511)
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = tokenizers.decoders.ByteFallback()
    backend.save(str(Path(folder) / "tokenizer.json"))
    return str(folder)


def test_run_reports_what_the_engine_did(longfill, model):
    ran = longfill("run", model, "--prompt", "x" * 300, "--max-tokens", "3", "--digest", "--json", *ENGINE)
    assert ran.code == 0
    values = json.loads(ran.out)
    assert values["prompt_tokens"] == 300
    assert values["steps"] == 3 + 2
    assert len(values["token_ids"]) == 3
    assert len(values["digest"]) == 64
    assert values["memory"]["reserved"] <= values["memory"]["budget"] == 4 * 2**30
    assert values["stats"]["scored_pairs"] > 0


def test_run_reports_how_often_drafts_were_right(longfill):
    asked = "The access code of amber Kestrel is 48213. What is the access code of amber Kestrel? Answer:"
    args = ["run", "--prompt", asked, "--max-tokens", "8", "--max-model-len", "512", *ENGINE]
    drafts = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']
    spec = json.loads(longfill(*args, *drafts, "--json").out)["stats"]["spec"]
    assert spec["num_draft_tokens"] >= spec["num_accepted_tokens"] == sum(spec["num_accepted_tokens_per_pos"]) > 0
    assert len(spec["acceptance_per_position"]) == 2
    first, second = spec["acceptance_per_position"]
    shares = f"(accepted by position {first:.2f} {second:.2f})"
    assert f"{spec['mean_acceptance_length']:.2f} tokens a step with drafts {shares}" in longfill(*args, *drafts).err
    assert json.loads(longfill(*args, "--json").out)["stats"]["spec"] is None


def test_dsa_11_check_passes_on_the_reference_kernels(longfill, model):
    values = json.loads(longfill("check", model, "--json", *ENGINE).out)
    assert values["ok"] is True
    assert {row["index_topk"] for row in values["comparisons"]} == {16, 264}
    assert max(row["max_difference"] for row in values["comparisons"]) < 1e-4


@needs_native
def test_check_finds_a_native_indexer_that_selects_other_keys(longfill, monkeypatch):
    ok = json.loads(longfill("check", "needle", "--json", *ENGINE).out)
    assert ok["ok"] is True
    assert "top-k lowered" in {row["case"] for row in ok["comparisons"]}
    honest = cpu.NativeBackend.index_topk

    def shifted(self, q_TID, w_TI, cache, chunks, selection_TK, workspace):
        counts = honest(self, q_TID, w_TI, cache, chunks, selection_TK, workspace)
        scored = selection_TK[:, -1] > 64
        selection_TK[scored] = torch.arange(selection_TK.shape[1], dtype=torch.int32)
        return counts

    monkeypatch.setattr(cpu.NativeBackend, "index_topk", shifted)
    ran = longfill("check", "needle", "--json", *ENGINE)
    assert ran.code == 1
    assert {row["case"] for row in json.loads(ran.out)["comparisons"] if not row["ok"]} == {"top-k lowered"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-model-len", "5000"], "--max-model-len"),
        (["--memory-budget", "1MiB"], "--memory-budget"),
        (["--max-model-len", "64"], "300"),
        (["--hf-overrides", '{"index_topk": 0}'], "index_topk"),
        (["--hf-overrides", '{"no_such_field": 3}'], "no_such_field"),
        (["--tokenizer", "no/such-folder-here/at-all"], "no/such-folder-here/at-all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_honoured_is_one_line_and_exit_code_2(longfill, model, flags, named):
    ran = longfill("run", model, "--prompt", "x" * 300, "--json", *ENGINE, *flags)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("longfill: error: ")
    assert named in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_2(longfill):
    ran = longfill("run", "./no-such-model", "--prompt", "x")
    assert ran.code == 2
    assert "no-such-model" in ran.err.splitlines()[-1]
