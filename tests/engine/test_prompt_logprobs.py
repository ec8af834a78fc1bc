"""Log-probabilities of prompts: the same bits however the work is cut, ordered, cached, overlapped or interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small_tokenizers import gpt2
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.request import Logprob, RequestOutput
from longfill.worker.prompt_logprobs import PromptInput

Entries = list[dict[int, Logprob] | None]

NUM = 3
"""Likeliest tokens that are asked for."""
WANTED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=NUM)
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LENGTHS = (1, 2, 9, 17, 33, 41, 58, 64)
PROMPTS = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    gpt2().save(str(path / "tokenizer.json"))
    return path


def start(folder: Path, depth: int = 1, drafts: int = 0, **args: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "max_num_seqs": 6, "digest": True}
    overlap = {"async_scheduling": depth > 1, "max_concurrent_batches": depth}
    speculative = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    return engine(folder, **(defaults | overlap | {"speculative_config": speculative} | args))


def entries_of(output: RequestOutput) -> Entries:
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def drive(core: LLMEngine, before_step: Callable[[int], None] = lambda _: None) -> dict[str, RequestOutput]:
    """Run to the end. An output has all of its prompt's log-probabilities or, before it has a token, none."""
    done: dict[str, RequestOutput] = {}
    step = 0
    while core.has_unfinished_requests:
        before_step(step)
        for out in core.step():
            if out.prompt_logprobs is not None:
                assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
            if out.finished:
                done[out.request_id] = out
        step += 1
    core.cache.check()
    return done


def add_all(core: LLMEngine, prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Every other request asks for nothing."""
    for i, prompt in enumerate(prompts):
        core.add_request(f"w{i}", prompt, WANTED)
        core.add_request(f"p{i}", prompt, PLAIN)


Result = dict[str, tuple[list[int], str | None, Entries | None]]


def results(done: dict[str, RequestOutput]) -> Result:
    return {name: (out.outputs[0].token_ids, out.digest, out.prompt_logprobs) for name, out in done.items()}


@pytest.fixture(scope="module")
def want(folder: Path) -> Result:
    """Each prompt alone, in one step, with nothing cached."""
    llm = start(folder, max_num_batched_tokens=128, enable_prefix_caching=False)
    found: Result = {}
    for i, prompt in enumerate(PROMPTS):
        for name, params in ((f"w{i}", WANTED), (f"p{i}", PLAIN)):
            [out] = llm.generate([prompt], params)
            found[name] = (out.outputs[0].token_ids, out.digest, out.prompt_logprobs)
    return found


def test_entries_are_the_prompts_tokens_then_the_likeliest(want: Result) -> None:
    for i, prompt in enumerate(PROMPTS):
        entries = want[f"w{i}"][2]
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == len(prompt)
        for token, entry in zip(prompt[1:], entries[1:], strict=True):
            assert entry is not None
            assert next(iter(entry)) == token
            assert {logprob.rank for logprob in entry.values()} >= {1, 2, 3}
            assert len(entry) == (NUM if entry[token].rank <= NUM else 1 + NUM)
        assert want[f"p{i}"][2] is None
    assert want["w3"][:2] == want["p3"][:2], "asking changes the output"


def test_a_token_has_the_bits_in_a_prompt_that_it_had_as_an_output(folder: Path) -> None:
    llm = start(folder)
    prompt = PROMPTS[4]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=NUM)
    [out] = llm.generate([prompt], params)
    whole = [*prompt, *out.outputs[0].token_ids]
    [scored] = llm.generate([whole], WANTED)
    assert entries_of(scored)[len(prompt) :] == out.outputs[0].logprobs


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("args", [{}, {"split_mixed_batch": True}, {"block_size": 1}, {"prefill_policy": "fair"}])
def test_the_same_bits_for_every_cut(folder: Path, want: Result, chunk: int, args: dict[str, Any]) -> None:
    core = start(folder, max_num_batched_tokens=chunk, max_num_seqs=min(6, chunk), **args).engine
    add_all(core)
    assert results(drive(core)) == want


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_same_bits_with_steps_in_flight_and_drafts(folder: Path, want: Result, depth: int, drafts: int) -> None:
    for chunk in (7, 32):
        core = start(folder, depth, drafts, max_num_batched_tokens=chunk).engine
        add_all(core)
        assert results(drive(core)) == want


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_same_bits_when_preempted_at_random_steps(folder: Path, want: Result, depth: int, drafts: int) -> None:
    core = start(folder, depth, drafts, max_num_batched_tokens=16).engine
    for seed in range(4):
        rng = random.Random(seed)

        def preempt(_: int, rng: random.Random = rng) -> None:
            running = core.scheduler.running
            if running and rng.random() < 0.3:
                for request in rng.sample(running, rng.randint(1, len(running))):
                    core.scheduler.preempt(request.request_id)

        add_all(core)
        done = drive(core, preempt)
        assert results(done) == want, f"seed {seed}"
        hit = [out for name, out in done.items() if name.startswith("w") and out.metrics.num_preemptions]
        assert len(hit) > 2, "hardly any request was preempted"


def test_pfx_04_the_same_bits_in_every_order_with_and_without_the_cache(folder: Path) -> None:
    """Prompts share prefixes of many lengths, and half of the requests ask for nothing and so use the cache."""
    base, rng = tokens(70, seed=50), random.Random(4)
    prompts = [base[: 4 * i + 3] + tokens(1 + 3 * (i % 5), seed=60 + i) for i in range(16)]
    params = [WANTED, PLAIN] * 8
    cold = start(folder, enable_prefix_caching=False)
    want = [cold.generate([prompt], WANTED)[0].prompt_logprobs for prompt in prompts]
    for llm in (start(folder), start(folder, depth=2, drafts=1)):
        for _ in range(5):
            order = rng.sample(range(16), 16)
            rng.shuffle(params)
            outputs = llm.generate([prompts[i] for i in order], params)
            for i, asked, out in zip(order, params, outputs, strict=True):
                assert out.prompt_logprobs == (want[i] if asked is WANTED else None)
                assert not (out.num_cached_tokens and asked is WANTED)
            assert sum(out.num_cached_tokens > 0 for out in outputs) > 4, "the cache was hardly used"


def test_the_same_bits_for_every_block_of_rows_and_never_more_rows_than_planned(folder: Path, want: Result) -> None:
    for planned in (1, 5, 6, 64):
        core = start(folder, max_num_batched_tokens=128).engine
        worker, taken = core.worker, []
        if planned != 64:
            worker._logits_rows = planned
        head = worker.decoder.head

        def counted(hidden: Tensor, weight: Any, head: Any = head, taken: list[int] = taken) -> Tensor:
            taken.append(hidden.shape[0])
            rows: Tensor = head(hidden, weight)
            return rows

        worker.decoder.head = counted  # type: ignore[method-assign]
        add_all(core)
        assert results(drive(core)) == want
        assert max(taken) == max(planned, 6)  # sampled rows may be 6


@pytest.mark.parametrize("depth", [1, 3])
def test_places_that_are_booked_are_not_computed_again(folder: Path, depth: int) -> None:
    core = start(folder, depth, max_num_batched_tokens=16).engine
    execute, asked = core.worker.execute, []

    def counted(plan: Any, inputs: Any, prompts: Sequence[PromptInput]) -> Any:
        asked.extend(place for given in prompts for place in range(given.first, given.first + given.token_ids.size))
        return execute(plan, inputs, prompts)

    core.worker.execute = counted  # type: ignore[assignment]
    core.add_request("a", PROMPTS[-1], WANTED)

    def preempt(_: int) -> None:
        request = core.scheduler.requests["a"]
        if request.num_output_tokens == 2 and request.num_preemptions == 0:
            core.scheduler.preempt("a")

    done = drive(core, preempt)
    assert done["a"].metrics.num_preemptions == 1
    assert asked == list(range(1, len(PROMPTS[-1])))


@pytest.mark.parametrize("caching", [True, False])
def test_only_the_first_of_several_completions_has_the_prompt_computed_for_it(
    folder: Path, want: Result, caching: bool
) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, prompt_logprobs=NUM)
    core = start(folder, enable_prefix_caching=caching).engine
    execute, asked = core.worker.execute, set()

    def counted(plan: Any, inputs: Any, prompts: Sequence[PromptInput]) -> Any:
        asked.update(given.request_id for given in prompts)
        return execute(plan, inputs, prompts)

    core.worker.execute = counted  # type: ignore[assignment]
    core.add_request("a", PROMPTS[5], params)
    done = drive(core)
    assert asked == {"0_a"}
    assert done["a"].prompt_logprobs == want["w5"][2]
    assert len({tuple(each.token_ids) for each in done["a"].outputs}) == 3


@pytest.mark.parametrize("depth", [1, 3])
def test_there_are_none_before_the_whole_prompt_is_computed_then_all_on_every_output(folder: Path, depth: int) -> None:
    core = start(folder, depth, max_num_batched_tokens=16).engine
    core.add_request("a", PROMPTS[-1], WANTED)
    core.step()
    core.step()
    aborted = core.abort_request("a")
    assert aborted is not None
    assert aborted.prompt_logprobs is None
    core.add_request("b", PROMPTS[-1], WANTED)
    seen = []
    while core.has_unfinished_requests:
        seen += [out.prompt_logprobs for out in core.step() if out.request_id == "b"]
    assert len(seen) == 5
    assert all(entries == seen[0] and entries is not None for entries in seen)


def test_a_request_gets_nothing_of_an_earlier_one_with_its_name(folder: Path, want: Result) -> None:
    for steps in range(1, 7):
        core = start(folder, depth=3, max_num_batched_tokens=16).engine
        core.add_request("w7", PROMPTS[6], WANTED)
        for _ in range(steps):
            core.step()
        assert core.abort_request("w7") is not None
        core.add_request("w7", PROMPTS[7], WANTED)
        assert results(drive(core))["w7"] == want["w7"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failing", range(6))
def test_a_step_that_raises_is_taken_back(folder: Path, want: Result, failing: int, depth: int) -> None:
    core = start(folder, depth, max_num_batched_tokens=16).engine
    execute, calls = core.worker.execute, 0

    def fail_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise MemoryError
        return execute(*args)

    core.worker.execute = fail_once  # type: ignore[method-assign]
    core.add_request("w7", PROMPTS[7], WANTED)
    with pytest.raises(MemoryError):
        drive(core)
    assert results(drive(core))["w7"] == want["w7"]


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", [1, 20, 63])
def test_a_prompt_token_behind_a_row_without_numbers_ends_its_request_alone(
    folder: Path, want: Result, place: int, depth: int, drafts: int
) -> None:
    core = start(folder, depth, drafts, max_num_batched_tokens=16).engine
    execute, head = core.worker.execute, core.worker.decoder.head
    broken: list[int] = []

    def find(plan: Any, inputs: Any, prompts: Sequence[PromptInput]) -> Any:
        places = [p for given in prompts for p in range(given.first, given.first + given.token_ids.size)]
        broken[:] = [row for row, p in enumerate(places) if p == place and prompts[0].request_id == "w7"][:1]
        result = execute(plan, inputs, prompts)
        assert not result.failed.keys() & (result.sampled.keys() | result.prompt_logprobs.keys() | result.drafts.keys())
        return result

    def spoil(hidden: Tensor, weight: Any) -> Tensor:
        rows = head(hidden, weight)
        assert rows is not None
        if broken:
            rows[broken.pop()] = torch.nan
        return rows

    core.worker.execute = find  # type: ignore[assignment]
    core.worker.decoder.head = spoil  # type: ignore[method-assign]
    core.add_request("w7", PROMPTS[7], WANTED)
    core.add_request("w4", PROMPTS[4], WANTED)
    core.add_request("p7", PROMPTS[7], PLAIN)
    done = drive(core)
    failed = done.pop("w7")
    assert failed.outputs[0].finish_reason == "error"
    assert f"prompt_logprobs of prompt token {place}: the model's logits contain NaN" in str(
        failed.outputs[0].stop_reason
    )
    assert failed.prompt_logprobs is None
    assert failed.outputs[0].token_ids == []
    assert results(done) == {name: want[name] for name in done}
    assert core.cache.num_free_pages == core.cache.num_usable_pages


def test_tokens_are_decoded_one_by_one(folder: Path) -> None:
    llm = start(folder, skip_tokenizer_init=False)
    assert llm.tokenizer is not None
    [out] = llm.generate([PROMPTS[3]], WANTED)
    for entry in entries_of(out)[1:]:
        assert entry is not None
        for token, logprob in entry.items():
            assert logprob.decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)


def test_their_time_is_counted_where_they_are_asked_for(folder: Path) -> None:
    llm = start(folder)
    llm.generate([PROMPTS[3]], PLAIN)
    assert "logprobs" not in llm.stats.seconds
    llm.generate([PROMPTS[3]], WANTED)
    assert llm.stats.seconds["logprobs"] > 0


def test_a_hole_is_an_error_and_what_is_there_already_is_passed_over(folder: Path) -> None:
    core = start(folder, max_num_batched_tokens=16).engine
    core.add_request("a", PROMPTS[-1], WANTED)
    core.step()
    live = core._live["a"]
    with pytest.raises(ValueError, match="prompt token 18 came before those of 17"):
        live.append_prompt_logprobs({18: {5: Logprob(-1.0, 1)}})
    live.append_prompt_logprobs({3: {5: Logprob(-1.0, 1)}})
    [out] = drive(core).values()
    assert entries_of(out)[3] != {5: Logprob(-1.0, 1)}
