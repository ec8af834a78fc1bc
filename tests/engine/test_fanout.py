"""Several completions of one prompt: each as if it were alone, the prompt computed once, one output for all."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.oracle.harness import engine, tokens
from tests.tiny import edit_tensors, make_checkpoint

from longfill import LLM, SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.errors import RequestError
from longfill.request import Request, RequestOutput

PROMPT = tokens(41, seed=1)
N = 3
PARAMS = SamplingParams(n=N, temperature=1.0, seed=2**64 - 2, max_tokens=5, ignore_eos=True)
"""Its seeds are the last two of 64 bits and the first."""
POISON = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    return path


def start(folder: Path, **args: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 100, "digest": True}
    return engine(folder, **(defaults | args))


def singly(folder: Path, params: SamplingParams = PARAMS, **args: Any) -> list[RequestOutput]:
    """The completions as requests of their own, one after the other."""
    assert params.seed is not None
    alone = [dataclasses.replace(params, n=1, seed=(params.seed + i) % 2**64) for i in range(params.n)]
    return [start(folder, **args).generate([PROMPT], each)[0] for each in alone]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def run(core: LLMEngine, before_step: Callable[[], object] = lambda: None) -> list[RequestOutput]:
    """All outputs until nothing is unfinished."""
    outputs = []
    while core.has_unfinished_requests:
        before_step()
        outputs += core.step()
    return outputs


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 64},
        {"async_scheduling": True, "max_concurrent_batches": 3},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        {"num_gpu_blocks_override": 14, "max_model_len": 52},
    ],
    ids=str,
)
def test_each_completion_is_what_it_is_alone(folder: Path, args: dict[str, Any]) -> None:
    want = singly(folder)
    llm = start(folder, **args)
    [got] = llm.generate([PROMPT], dataclasses.replace(PARAMS, logprobs=2))
    assert (got.request_id, got.finished) == ("0", True)
    assert got.prompt_token_ids.tolist() == PROMPT
    assert [completion.index for completion in got.outputs] == list(range(N))
    assert tokens_of(got) == [each.outputs[0].token_ids for each in want]
    assert len({tuple(each) for each in tokens_of(got)}) == N
    assert [completion.finish_reason for completion in got.outputs] == ["length"] * N
    assert [len(completion.logprobs or ()) for completion in got.outputs] == [5] * N
    assert got.digest == hashlib.sha256("".join(str(each.digest) for each in want).encode()).hexdigest()
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages
    assert (llm.stats.preemptions > 0) == ("num_gpu_blocks_override" in args)
    assert got.metrics.num_preemptions == llm.stats.preemptions


def test_the_prompt_is_computed_once(folder: Path) -> None:
    core = start(folder).engine
    core.add_request("x", PROMPT, PARAMS)
    queued: list[set[str]] = []
    run(core, lambda: queued.append(set(core.scheduler.requests)))
    first = {"0_x"}
    # Three steps for 41 tokens; with the last of them the first token is there.
    assert queued[:4] == [first, first, first, {"0_x", "1_x", "2_x"}]
    whole_pages = 40
    assert core.stats.tokens == len(PROMPT) + (N - 1) * (len(PROMPT) - whole_pages) + N * (PARAMS.max_tokens - 1)  # type: ignore[operator]


def test_without_a_prefix_cache_all_are_queued_at_once(folder: Path) -> None:
    core = start(folder, enable_prefix_caching=False).engine
    core.add_request("x", PROMPT, PARAMS)
    assert set(core.scheduler.requests) == {"0_x", "1_x", "2_x"}
    run(core)


def test_there_is_one_output_a_step_with_all_completions_by_index(folder: Path) -> None:
    core = start(folder).engine
    core.add_request("x", PROMPT, dataclasses.replace(PARAMS, logprobs=0))
    core.add_request("other", PROMPT[:9], dataclasses.replace(PARAMS, n=1))
    seen: list[RequestOutput] = []
    while core.has_unfinished_requests:
        outputs = core.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        assert {output.request_id for output in outputs} <= {"x", "other"}
        seen += [output for output in outputs if output.request_id == "x"]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert tokens_of(seen[0])[1:] == [[], []]
    assert [(c.text, c.logprobs, c.cumulative_logprob) for c in seen[0].outputs[1:]] == [("", [], 0.0)] * 2
    for before, after in itertools.pairwise(seen):
        assert [c.index for c in after.outputs] == [0, 1, 2]
        for old, new in zip(tokens_of(before), tokens_of(after), strict=True):
            assert new[: len(old)] == old
    metrics = seen[-1].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert seen[0].metrics.finished_time is None
    assert seen[-1].metrics.first_token_time == seen[0].metrics.first_token_time


def test_unseeded_completions_differ_and_repeat_and_the_first_is_that_of_one_alone(folder: Path) -> None:
    params = dataclasses.replace(PARAMS, seed=None)
    [got] = start(folder).generate([PROMPT], params)
    [again] = start(folder).generate([PROMPT], params)
    [alone] = start(folder).generate([PROMPT], dataclasses.replace(params, n=1))
    assert tokens_of(got) == tokens_of(again)
    assert len({tuple(each) for each in tokens_of(got)}) == N
    assert tokens_of(got)[0] == tokens_of(alone)[0]


def test_prompts_with_and_without_completions_in_one_batch(folder: Path) -> None:
    other = dataclasses.replace(PARAMS, n=1, seed=5)
    want = [start(folder).generate([PROMPT], PARAMS)[0], start(folder).generate([PROMPT[:20]], other)[0]]
    got = start(folder).generate([PROMPT, PROMPT[:20], PROMPT], [PARAMS, other, PARAMS])
    assert [tokens_of(each) for each in got] == [tokens_of(want[i]) for i in (0, 1, 0)]
    assert [each.digest for each in got] == [want[i].digest for i in (0, 1, 0)]


def test_a_stop_in_one_completion_leaves_the_others_alone(folder: Path) -> None:
    [free] = start(folder).generate([PROMPT], PARAMS)
    stop = free.outputs[1].token_ids[2]
    assert all(stop not in free.outputs[i].token_ids for i in (0, 2))
    [got] = start(folder).generate([PROMPT], dataclasses.replace(PARAMS, stop_token_ids=[stop]))
    assert [(c.finish_reason, c.stop_reason) for c in got.outputs] == [
        ("length", None),
        ("stop", stop),
        ("length", None),
    ]
    assert tokens_of(got)[1] == free.outputs[1].token_ids[:3]


def poisoned(folder: Path, **args: Any) -> LLM:
    """A model that cannot go on after `POISON`."""
    make_checkpoint(folder, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    embed[POISON] = float("nan")
    edit_tensors(folder, add={"model.embed_tokens.weight": embed})
    return start(folder, **args)


def test_an_error_ends_the_completion_that_it_is_in(tmp_path: Path) -> None:
    llm = poisoned(tmp_path)
    params = dataclasses.replace(PARAMS, n=6, seed=1, max_tokens=6, logit_bias={POISON: 4.5})
    [got] = llm.generate([PROMPT], params)
    reasons = [completion.finish_reason for completion in got.outputs]
    assert set(reasons) == {"error", "length"}
    for completion in got.outputs:
        assert POISON not in completion.token_ids[:-1]
        hit = completion.token_ids[-1] == POISON and len(completion.token_ids) < 6
        assert completion.finish_reason == ("error" if hit else "length")
        assert hit == ("NaN" in str(completion.stop_reason))
    assert llm.engine.cache.num_free_pages == llm.engine.cache.num_usable_pages
    # The same with `POISON` for a draft, which is right behind the first token of some: the walk ends before its row.
    assert any(completion.finish_reason == "error" and len(completion.token_ids) > 1 for completion in got.outputs)
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    guessing = poisoned(tmp_path, speculative_config=speculative)
    tails = guessing.engine.worker.tails
    book = tails.book
    tails.book = lambda request, sampled, drafts: book(request, sampled, [POISON] * len(drafts))  # type: ignore[method-assign]
    [same] = guessing.generate([PROMPT], params)
    assert guessing.stats.spec.num_drafts > 0
    assert [(c.token_ids, c.finish_reason) for c in same.outputs] == [
        (c.token_ids, c.finish_reason) for c in got.outputs
    ]
    assert same.digest == got.digest


def test_an_error_before_the_first_token_is_one_of_each_completion(tmp_path: Path) -> None:
    llm = poisoned(tmp_path)
    [got] = llm.generate([[*PROMPT, POISON]], PARAMS)
    assert [completion.finish_reason for completion in got.outputs] == ["error"] * N
    assert tokens_of(got) == [[]] * N
    assert not llm.engine.has_unfinished_requests


PHASES: dict[str, Callable[[LLMEngine], bool]] = {
    "queued": lambda core: core.stats.steps == 0,
    "in the prompt": lambda core: core.stats.steps == 2,
    "with the first token": lambda core: core.stats.steps == 3,
    "decoding": lambda core: core.stats.steps == 5,
    "the first one done": lambda core: "0_x" not in core.scheduler.requests,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("args", [{}, {"enable_prefix_caching": False}, {"async_scheduling": True}], ids=str)
def test_an_abort_ends_all_completions(folder: Path, phase: str, args: dict[str, Any]) -> None:
    [whole] = start(folder, **args).generate([PROMPT], PARAMS)
    [other] = start(folder, **args).generate([PROMPT[:30]], dataclasses.replace(PARAMS, n=1))
    core = start(folder, **args).engine
    core.add_request("x", PROMPT, PARAMS)
    core.add_request("other", PROMPT[:30], dataclasses.replace(PARAMS, n=1))
    aborted = None
    while core.has_unfinished_requests:
        if aborted is None and PHASES[phase](core):
            aborted = core.abort_request("x")
            assert aborted is not None
            assert set(core.scheduler.requests) <= {"other"}
            core.cache.check()
        for output in core.step():
            if output.request_id == "other":
                last = output
            else:
                assert (output.request_id, aborted) == ("x", None)
    assert aborted is not None
    assert (aborted.request_id, aborted.finished, len(aborted.outputs)) == ("x", True, N)
    for completion, all_tokens in zip(aborted.outputs, tokens_of(whole), strict=True):
        assert completion.token_ids == all_tokens[: len(completion.token_ids)]
        assert completion.finish_reason == ("length" if completion.token_ids == all_tokens else "abort")
    assert "abort" in [completion.finish_reason for completion in aborted.outputs]
    assert last.digest == other.digest
    assert core.cache.num_free_pages == core.cache.num_usable_pages
    assert core.abort_request("x") is None


@pytest.mark.parametrize("at_step", range(8))
def test_an_abort_while_the_step_runs_delivers_nothing(folder: Path, at_step: int) -> None:
    core = start(folder).engine
    execute = core.worker.execute

    def interrupted(*args: Any) -> Any:
        result = execute(*args)
        if core.stats.steps == at_step:
            core.abort_request("x")
        return result

    core.worker.execute = interrupted  # type: ignore[method-assign]
    core.add_request("x", PROMPT, PARAMS)
    outputs = run(core)
    assert all(not output.finished for output in outputs)
    assert core.cache.num_free_pages == core.cache.num_usable_pages
    core.worker.execute = execute  # type: ignore[method-assign]
    core.add_request("x", PROMPT, PARAMS)
    assert run(core)[-1].finished


def test_names_that_are_taken_are_refused_until_all_has_ended(folder: Path) -> None:
    core = start(folder).engine
    one = dataclasses.replace(PARAMS, n=1)
    core.add_request("x", PROMPT, PARAMS)
    # Also those of the completions that wait.
    for name, params in (("x", PARAMS), ("x", one), ("0_x", one), ("2_x", one), ("2_x", PARAMS)):
        with pytest.raises(RequestError, match=f"request {name}: another request with this id"):
            core.add_request(name, PROMPT, params)
    core.add_request("3_x", PROMPT, one)
    core.add_request("2_y", PROMPT, one)
    with pytest.raises(RequestError, match="request 2_y: another"):
        core.add_request("y", PROMPT, PARAMS)
    core.add_request("y", PROMPT, dataclasses.replace(PARAMS, n=2))
    assert {output.request_id for output in run(core) if output.finished} == {"x", "3_x", "2_y", "y"}
    core.add_request("2_x", PROMPT, one)
    assert [output.request_id for output in run(core) if output.finished] == ["2_x"]


def test_a_refused_prompt_leaves_no_name_taken(folder: Path) -> None:
    core = start(folder).engine
    with pytest.raises(RequestError, match="100 tokens"):
        core.add_request("x", [5] * 100, PARAMS)
    assert not core.has_unfinished_requests
    core.add_request("x", PROMPT, PARAMS)
    assert run(core)[-1].finished


def test_a_completion_cannot_be_ended_by_a_name_that_nobody_gave_it(folder: Path) -> None:
    core = start(folder).engine
    core.add_request("x", PROMPT, PARAMS)
    core.step()
    for name in ("0_x", "1_x", "3_x"):
        assert core.abort_request(name) is None
    assert [completion.finish_reason for completion in run(core)[-1].outputs] == ["length"] * N


def test_completions_are_requests_of_the_same_caller_and_only_the_first_scores_the_prompt(folder: Path) -> None:
    core = start(folder).engine
    seen: list[Request] = []
    add = core.scheduler.add_request

    def keep(request: Request) -> None:
        seen.append(request)
        add(request)

    core.scheduler.add_request = keep  # type: ignore[method-assign]
    params = dataclasses.replace(PARAMS, prompt_logprobs=1)
    prompt = np.array(PROMPT)
    core.add_request("x", prompt, params, cache_salt="s", priority=4, tenant="t")
    prompt[:] = 3
    run(core)
    assert [(r.cache_salt, r.priority, r.tenant) for r in seen] == [("s", 4, "t")] * N
    assert len({request.arrival_time for request in seen}) == 1
    assert [request.params.prompt_logprobs for request in seen] == [1, None, None]
    assert [request.token_ids[: request.num_prompt_tokens].tolist() for request in seen] == [PROMPT] * N


def test_siblings_share_the_prompt_until_they_sample() -> None:
    first = Request("x", PROMPT, PARAMS)
    second, third = first.sibling("y", PARAMS), first.sibling("z", PARAMS)
    assert np.shares_memory(first.token_ids, third.token_ids)
    for request, token in ((first, 7), (second, 8), (second, 9), (third, 10)):
        request.append_output(token)
    assert [r.output_token_ids.tolist() for r in (first, second, third)] == [[7], [8, 9], [10]]
    late = second.sibling("late", PARAMS)
    assert (late.token_ids.tolist(), late.num_prompt_tokens, late.num_output_tokens) == (PROMPT, len(PROMPT), 0)
