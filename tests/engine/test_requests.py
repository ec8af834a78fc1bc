"""What a request gets back: errors for what cannot be served, stops, lengths and log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.oracle.harness import engine, oracle, run, tokens
from tests.tiny import edit_tensors, make_checkpoint

from longfill import LLM, SamplingParams
from longfill.errors import ConfigError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POISON = 500
"""A token whose embedding is NaN in the poisoned model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder, max_model_len=100)


def clean(count: int, seed: int) -> list[int]:
    return tokens(count, seed, vocabulary=POISON)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        ([5] * 100, ["100 tokens", "max_model_len 100", "99"]),
        ([5] * 5000, ["5,000 tokens"]),
        ([3, 512], ["token id 512", "vocabulary of 512"]),
        ([-1, 3], ["token id -1"]),
        ([2**40], ["token id"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_numbers(
    llm: LLM, prompt: list[int], words: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.engine.add_request("bad", prompt, GREEDY)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert not llm.engine.has_unfinished_requests
    assert len(llm.generate(clean(20, 0), GREEDY)[0].outputs[0].token_ids) == 8


def test_one_refused_prompt_stops_the_batch_before_it_runs(llm: LLM) -> None:
    steps = llm.stats.steps
    with pytest.raises(RequestError):
        llm.generate([clean(10, 0), [999]], GREEDY)
    assert llm.stats.steps == steps
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages


def test_stop_ids_outside_the_vocabulary_and_text_without_a_tokenizer_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="512"):
        llm.generate([5], SamplingParams(stop_token_ids=[512]))
    with pytest.raises(ConfigError, match="tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ConfigError, match="tokenizer"):
        llm.generate([5], SamplingParams(stop="x"))


def poisoned(folder: Path, family: str = "glm_moe_dsa", **args: Any) -> LLM:
    make_checkpoint(folder, family, num_hidden_layers=2)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    embed[POISON] = float("nan")
    edit_tensors(folder, add={"model.embed_tokens.weight": embed})
    defaults = {"max_num_batched_tokens": 40, "block_size": 4, "digest": True, "max_model_len": 100}
    return engine(folder, **(defaults | args))


def test_nan_ends_only_the_request_that_meets_it(tmp_path: Path) -> None:
    good = [clean(40, 1), clean(33, 2)]
    llm = poisoned(tmp_path)
    want = [llm.generate(p, GREEDY)[0].digest for p in good]
    outs = llm.generate([good[0], [*clean(30, 3), POISON], good[1]], GREEDY)
    bad = outs[1].outputs[0]
    assert bad.finish_reason == "error"
    assert "NaN" in str(bad.stop_reason)
    assert bad.token_ids == []
    assert [outs[0].digest, outs[2].digest] == want
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages
    # Its pages, full of NaN, are used again.
    for _ in range(3):
        assert [llm.generate(p, GREEDY)[0].digest for p in good] == want
        llm.engine.cache.reset_prefix_cache()


CLEAN = 24
"""Tokens before the poisoned one: whole pages of 4."""


@pytest.mark.parametrize("page_formats", [{}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_ds_mla"}])
@pytest.mark.parametrize(
    ("family", "topk"), [("deepseek_v3", 0), ("glm_moe_dsa", 16), ("glm_moe_dsa", CLEAN), ("glm_moe_dsa", 64)]
)
def test_pages_before_a_poisoned_token_are_as_good_as_new(
    tmp_path: Path, family: str, topk: int, page_formats: dict[str, str]
) -> None:
    """A prompt that shares only clean tokens with a poisoned one is answered alike from its pages and without."""
    overrides = {"hf_overrides": {"index_topk": topk}} if topk else {}
    args = overrides | page_formats
    shared = clean(CLEAN, 1)
    prompt = [*shared, *clean(9, 2)]
    cold = poisoned(tmp_path, family, **args).generate(prompt, GREEDY)[0]
    llm = poisoned(tmp_path, family, **args)
    # It fails at its end: the step before, with the first poisoned token, leaves its pages to be found.
    [bad] = llm.generate([[*shared, POISON, *clean(20, 3), POISON]], GREEDY)
    assert bad.outputs[0].finish_reason == "error"
    warm = llm.generate(prompt, GREEDY)[0]
    assert warm.num_cached_tokens == CLEAN
    assert warm.digest == cold.digest
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_model_full_of_nan_errors_every_request_and_lives(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", num_hidden_layers=2)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    edit_tensors(tmp_path, add={"lm_head.weight": torch.full_like(head, float("nan"))})
    llm = engine(tmp_path)
    outs = llm.generate([clean(10, 1), clean(40, 2)], GREEDY)
    assert [out.outputs[0].finish_reason for out in outs] == ["error", "error"]
    assert [o.outputs[0].finish_reason for o in llm.generate(clean(5, 3), GREEDY)] == ["error"]


def test_a_damaged_norm_is_refused_at_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", num_hidden_layers=2)
    name = "model.layers.1.self_attn.kv_a_layernorm.weight"
    norm = load_file(tmp_path / "model.safetensors")[name]
    edit_tensors(tmp_path, add={name: norm * float("inf")})
    with pytest.raises(ModelError, match="kv_a_layernorm"):
        engine(tmp_path)


def test_a_stop_id_ends_the_request_and_is_its_reason(llm: LLM) -> None:
    prompt = clean(30, 7)
    free = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    stop = free[3]
    cut = free.index(stop) + 1
    out = llm.generate(prompt, dataclasses.replace(GREEDY, stop_token_ids=[stop]))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[:cut], "stop", stop)


def test_max_tokens_and_the_longest_context_end_a_request_with_length(llm: LLM) -> None:
    for count, max_tokens, want in ((30, 3, 3), (97, None, 3), (99, 8, 1), (98, 2, 2)):
        params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
        out = llm.generate(clean(count, 8), params)[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (want, "length")


def test_the_end_of_sequence_token_ends_a_request_unless_ignored(folder: Path) -> None:
    prompt = clean(30, 9)
    first = engine(folder).generate(prompt, GREEDY)[0].outputs[0].token_ids[0]
    llm = engine(folder, hf_overrides={"eos_token_id": first})
    out = llm.generate(prompt, dataclasses.replace(GREEDY, ignore_eos=False))[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == ([first], "stop")
    assert len(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) == 8


def test_logprobs_are_the_log_softmax_of_the_models_logits(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "glm_moe_dsa", num_hidden_layers=2)
    llm = engine(tmp_path)
    prompt = clean(40, 11)
    out = llm.generate(prompt, dataclasses.replace(GREEDY, logprobs=3))[0].outputs[0]
    rows = oracle(model, prompt + out.token_ids[:-1]).logits[len(prompt) - 1 :].log_softmax(-1)
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids) == 8
    for token, given, row in zip(out.token_ids, out.logprobs, rows, strict=True):
        assert set(given) == set(row.topk(3).indices.tolist())
        assert given[token].rank == 1
        for index, logprob in given.items():
            assert math.isclose(logprob.logprob, float(row[index]), abs_tol=1e-3)
    total = sum(given[token].logprob for token, given in zip(out.token_ids, out.logprobs, strict=True))
    assert out.cumulative_logprob == pytest.approx(total)


def test_asking_for_logprobs_changes_no_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    plain = llm.generate(clean(20, 12), params)[0].outputs[0]
    with_logprobs = llm.generate(clean(20, 12), dataclasses.replace(params, logprobs=5))[0].outputs[0]
    assert plain.token_ids == with_logprobs.token_ids
    assert plain.logprobs is None


def test_the_harness_sees_every_row(llm: LLM) -> None:
    assert run(llm, clean(90, 13)).logits.shape[0] == 90


def test_a_step_that_only_ends_requests_is_no_standstill(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.engine

    def end_one() -> list[Any]:
        core.last_step = None
        return [core.abort_request(name) for name in list(core.scheduler.requests)[:1]]

    monkeypatch.setattr(core, "step", end_one)
    outs = llm.generate([clean(5, 1), clean(6, 2)], GREEDY, on_step=lambda _: pytest.fail("there was no step"))
    assert [out.outputs[0].finish_reason for out in outs] == ["abort", "abort"]


@pytest.mark.parametrize("depth", [1, 3])
def test_penalties_count_tokens_for_running_requests_only_and_again_after_a_preemption(
    folder: Path, depth: int
) -> None:
    """The memory plan has room for what the prompts of `max_num_seqs` requests hold, however many wait."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=2.0)
    want = [out.outputs[0].token_ids for out in engine(folder, max_model_len=100).generate([clean(9, 3)] * 8, params)]
    core = engine(
        folder, max_model_len=100, max_num_seqs=2, scheduling_policy="priority", async_scheduling=depth > 1,
        max_concurrent_batches=depth,
    ).engine  # fmt: skip
    counted, done = 0, {}
    for number in range(8):
        core.add_request(str(number), clean(9, 3), params, priority=-number)
        for _ in range(2 * depth if number < 7 else 500):
            done |= {out.request_id: out.outputs[0].token_ids for out in core.step() if out.finished}
            held = len(core._pipeline._compute._pasts)
            counted = max(counted, held)
    assert [done[str(number)] for number in range(8)] == want
    assert core.stats.preemptions >= 4
    assert 1 <= counted <= 2
