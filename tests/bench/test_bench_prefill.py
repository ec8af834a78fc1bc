"""Prefill against peers: one checkpoint and prompt for all, fresh processes, and every way that a peer can fail."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from longfill.bench import prefill as bench
from longfill.bench.checkpoints import preset_config, write_checkpoint
from longfill.bench.child import ChildRequest, peak_rss_bytes, reset_peak, rss_bytes
from longfill.bench.prefill import LONGFILL, PEERS, Contender, PrefillPlan, PrefillResult, run_prefills
from longfill.bench.process import Outcome, run_child
from longfill.config import EngineArgs
from longfill.errors import ConfigError

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_topk": 16,
    # Many indexer heads: with few, ReLU makes whole rows of scores zero and the selection a tie.
    "index_n_heads": 16,
}
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_checkpoint(folder, preset_config("toy", TINY))
    return folder


def plan(folder: Path, *peers: str, lengths: tuple[int, ...] = (64,), **changes: object) -> PrefillPlan:
    fields = {"threads": 1, "chunk": 24, "repeats": 2, "scratch": folder.parent}
    fields["engine"] = EngineArgs(memory_budget="2GiB")
    return PrefillPlan(folder=folder, lengths=lengths, peers=peers, **(fields | changes))


def run(plan: PrefillPlan) -> list[PrefillResult]:
    return list(run_prefills(plan, lambda _who, _length: None))


def test_longfill_and_both_modes_of_transformers_do_the_same_work(folder):
    started: list[tuple[str, int]] = []
    results = list(run_prefills(plan(folder, "transformers"), lambda who, n: started.append((who.label, n))))
    assert started == [("longfill", 64), ("transformers, one-shot", 64), ("transformers, chunked", 64)]
    assert [result.status for result in results] == ["ok"] * 3, results
    own, *peers = results
    for result in results:
        assert result.tokens_per_s == pytest.approx(64 / result.seconds)
        assert result.runs == 2
        assert 50 * MIB < result.loaded_rss_bytes <= result.peak_rss_bytes + 8 * MIB
    for peer in peers:
        assert peer.largest_difference < 1e-3
        assert peer.same_token
    assert own.ratio == pytest.approx(own.tokens_per_s / max(peer.tokens_per_s for peer in peers))
    assert own.figures["stage_seconds"]["step"] <= own.seconds
    if own.figures["peak_flops_per_s"] is not None:
        assert 0 < own.figures["share_of_peak"] < 1
    assert "answer" not in own.to_json()


def done(seconds: float, **answer: object) -> Outcome:
    run = {"seconds": seconds, "peak_rss_bytes": 7}
    return Outcome("ok", loaded_rss_bytes=5, peak_rss_bytes=7, runs=[run], answer=answer)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], Outcome]:
    """What processes say instead of being started, by mode ("" is longfill) and length."""
    found: dict[tuple[str, int], Outcome] = {}

    def say(_module: str, request: ChildRequest, **_limits: object) -> Outcome:
        return found[request.mode, len(request.token_ids)]

    monkeypatch.setattr(bench, "run_child", say)
    return found


def test_a_peer_beyond_its_memory_is_not_tried_again_and_longfill_goes_on_alone(folder, outcomes):
    for length in (32, 64, 128):
        outcomes["", length] = done(1.0, logprobs={"1": -0.1})
    outcomes["one-shot", 32], outcomes["chunked", 32] = done(2.0), done(4.0)
    outcomes["one-shot", 64], outcomes["chunked", 64] = Outcome("out of memory", "too much"), done(8.0)
    outcomes["chunked", 128] = Outcome("timed out")
    results = run(plan(folder, "transformers", lengths=(128, 32, 64)))
    assert [result.status for result in results] == [
        "ok", "ok", "ok", "ok", "out of memory", "ok", "ok", "out of memory", "timed out",
    ]  # fmt: skip
    assert [result.message for result in results if result.mode == "one-shot"] == [
        "", "too much", "not tried: out of memory at 64",
    ]  # fmt: skip
    # Against the faster mode, then against the one that is left, then against none.
    assert [result.ratio for result in results if result.engine == "longfill"] == [2.0, 8.0, None]


def test_answers_are_compared_as_log_probabilities(folder, outcomes):
    outcomes["", 32] = done(1.0, logprobs={"0": math.log(0.5), "2": math.log(0.25)})
    # A constant added to all logits changes nothing.
    outcomes["one-shot", 32] = done(1.0, logits=[7 + math.log(p) for p in (0.5, 0.25, 0.25)])
    outcomes["chunked", 32] = done(1.0, logits=[math.log(p) for p in (0.25, 0.5, 0.25)])
    _, same, other = run(plan(folder, "transformers", lengths=(32,)))
    assert (same.largest_difference, same.same_token) == (pytest.approx(0.0, abs=1e-12), True)
    assert (other.largest_difference, other.same_token) == (pytest.approx(math.log(2)), False)


def test_the_share_is_of_the_best_run_and_the_highest_peak(folder, outcomes):
    runs = [
        {"seconds": seconds, "peak_rss_bytes": None, "flops": {"a": 3, "b": 1}, "peak_flops_per_s": peak}
        for seconds, peak in ((0.5, 16.0), (1.0, 20.0))
    ]
    outcomes["", 32] = Outcome("ok", runs=runs)
    [result] = run(plan(folder, lengths=(32,)))
    assert (result.figures["share_of_peak"], result.figures["peak_flops_per_s"]) == (4 / 0.5 / 20, 20.0)


def fake_peer(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A module that answers, and its folder on the path that child processes inherit."""
    name = f"fake_peer_{abs(hash(body))}"
    (folder / f"{name}.py").write_text(
        "from longfill.bench.child import serve\n"
        "class Engine:\n"
        "    def __init__(self, request): pass\n"
        "    def figures(self): return {}\n"
        "    def answer(self): return {'logits': [0.0, 1.0]}\n"
        f"    def prefill(self, token_ids):\n        {body}\n"
        "if __name__ == '__main__':\n    serve(Engine, 'no_such_package')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return name


REQUEST = ChildRequest(folder=".", token_ids=[3, 4], mode="", threads=1, repeats=3, warm_up=1)


def test_what_a_process_prints_does_not_disturb_the_protocol(tmp_path, monkeypatch):
    outcome = run_child(fake_peer(tmp_path, monkeypatch, "print('loading', flush=True)"), REQUEST)
    assert (outcome.status, len(outcome.runs), outcome.answer) == ("ok", 3, {"logits": [0.0, 1.0]})
    assert outcome.seconds == min(run["seconds"] for run in outcome.runs)


def test_memory_is_watched_from_outside(tmp_path, monkeypatch):
    module = fake_peer(tmp_path, monkeypatch, "self.kept = bytearray(400 * 2**20); import time; time.sleep(60)")
    outcome = run_child(module, REQUEST, memory_limit=200 * MIB, timeout=30)
    assert outcome.status == "out of memory"
    assert "209,715,200 bytes" in outcome.message


def test_memory_that_the_system_refuses_is_reported_by_the_process(tmp_path, monkeypatch):
    module = fake_peer(tmp_path, monkeypatch, "bytearray(2**40)")
    assert run_child(module, REQUEST).status == "out of memory"


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    outcome = run_child(fake_peer(tmp_path, monkeypatch, "import time; time.sleep(60)"), REQUEST, timeout=0.5)
    assert outcome.status == "timed out"


def test_a_process_that_the_system_kills_ran_out_of_memory(tmp_path, monkeypatch):
    outcome = run_child(fake_peer(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)"), REQUEST)
    assert (outcome.status, outcome.message) == ("out of memory", "ended by the system")


def test_a_process_that_fails_says_why(tmp_path, monkeypatch):
    outcome = run_child(fake_peer(tmp_path, monkeypatch, "raise ValueError('no such layer')"), REQUEST)
    assert (outcome.status, outcome.message) == ("failed", "ValueError: no such layer")


def test_an_engine_that_is_not_installed_says_so(tmp_path, monkeypatch):
    outcome = run_child(fake_peer(tmp_path, monkeypatch, "import no_such_package"), REQUEST)
    assert (outcome.status, outcome.message) == ("not installed", "no_such_package is missing")


def test_peers_that_are_not_there_are_no_reason_to_stop(folder, outcomes, monkeypatch):
    monkeypatch.setitem(bench.PEERS, "transformers", (Contender("transformers", "one-shot", "no_such_package.peer"),))
    outcomes["", 16] = outcomes["", 17] = done(1.0)
    results = run(plan(folder, "transformers", lengths=(16, 17)))
    assert [result.status for result in results] == ["ok", "not installed"] * 2
    assert [result.message for result in results if result.engine == "transformers"] == [
        "pip install 'longfill[bench]'"
    ] * 2


def test_a_module_that_a_peer_lacks_by_mistake_is_a_failure(tmp_path, monkeypatch):
    assert run_child(fake_peer(tmp_path, monkeypatch, "import another_package"), REQUEST).status == "failed"


def test_the_peak_starts_anew():
    if not reset_peak():
        pytest.skip("this system does not reset the peak")
    block = bytearray(b"x" * (100 * MIB))
    high = peak_rss_bytes()
    assert high >= rss_bytes() >= len(block)
    del block
    assert reset_peak()
    assert peak_rss_bytes() < high - 50 * MIB


def test_prompts_of_one_seed_begin_alike_and_leave_out_special_tokens():
    assert bench.prompt(10, 50) == bench.prompt(30, 50)[:10]
    assert bench.prompt(30, 50) != bench.prompt(30, 50, seed=1)
    assert min(bench.prompt(1000, 5)) == 2
    assert max(bench.prompt(1000, 5)) == 4


def test_engine_arguments_are_kept_but_for_what_the_measurement_needs(folder):
    engine = EngineArgs(memory_budget="3GiB", max_num_batched_tokens=128, kernel_backend="reference")
    args = EngineArgs(**bench._engine_options(plan(folder, engine=engine), 100))
    assert (args.max_model_len, args.num_threads, args.enable_prefix_caching) == (101, 1, False)
    assert (args.memory_budget, args.max_num_batched_tokens, args.kernel_backend) == ("3GiB", 128, "reference")


def test_unknown_peers_are_refused():
    assert bench.check_peers(["transformers", "transformers"]) == ("transformers",)
    with pytest.raises(ConfigError, match=r"--against vllm.*transformers, llama\.cpp"):
        bench.check_peers(["vllm"])


def test_no_peer_is_imported_by_longfill():
    assert LONGFILL.module.startswith("longfill.")
    assert all(peer.module.startswith("longfill_peers.") for peers in PEERS.values() for peer in peers)
    assert "longfill_peers" not in sys.modules


def test_a_checkpoint_is_the_same_for_the_same_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, preset_config("toy", TINY), seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
