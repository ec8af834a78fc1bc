"""Random engines under random traffic: whatever is combined, every request gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint

from longfill import SamplingParams
from longfill.engine.engine import LLMEngine
from longfill.request import RequestOutput

Request = tuple[list[int], SamplingParams, dict[str, Any]]
Result = tuple[list[int], str | None, str | None, Any]
"""Token ids, digest, finish reason, log-probabilities of the prompt."""
FAST, ALL = 12, 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "glm_moe_dsa", num_hidden_layers=2, mtp=1)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLMEngine:
    return engine(
        folder, max_model_len=120, max_num_batched_tokens=128, enable_prefix_caching=False, digest=True
    ).engine


def random_engine(folder: Path, rng: random.Random) -> LLMEngine:
    drafts = rng.choice([0, 1, 2, 4])
    args: dict[str, Any] = {
        "max_model_len": 120,
        "max_num_batched_tokens": rng.choice([8, 13, 40, 128]),
        "max_num_seqs": rng.choice([1, 3, 8]),
        "block_size": rng.choice([1, 4, 16]),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.7,
        "max_concurrent_batches": rng.choice([1, 2, 3]),
        "split_mixed_batch": rng.random() < 0.3,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "prefill_policy": rng.choice(["ordered", "fair"]),
        "long_prefill_token_threshold": rng.choice([0, 5]),
        "prefill_schedule_interval": rng.choice([1, 3]),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
    }
    args["num_gpu_blocks_override"] = 2 + rng.choice([130, 200, 300]) // args["block_size"] + drafts
    return engine(folder, digest=True, **args).engine


def random_requests(rng: random.Random) -> list[Request]:
    shared = tokens(40, seed=1)
    requests: list[Request] = []
    for seed in range(rng.randint(4, 12)):
        own = tokens(rng.randint(1, 50), seed=100 + seed)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=seed,
            ignore_eos=True,
            max_tokens=rng.randint(1, 20),
            stop_token_ids=rng.choice([None, list(range(0, 512, 40))]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.0]),
            min_tokens=rng.choice([0, 1]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        prompt = [*shared[: rng.randint(0, 40)], *own]
        requests.append((prompt, params, {"priority": rng.randint(0, 2), "tenant": rng.choice(["", "x"])}))
    return requests


def results(outputs: Sequence[RequestOutput]) -> dict[str, Result]:
    return {
        o.request_id: (o.outputs[0].token_ids, o.digest, o.outputs[0].finish_reason, o.prompt_logprobs) for o in outputs
    }


def run_alone(core: LLMEngine, requests: Sequence[Request]) -> dict[str, Result]:
    done: list[RequestOutput] = []
    for index, (prompt, params, _) in enumerate(requests):
        core.add_request(f"r{index}", prompt, params)
        while core.has_unfinished_requests:
            done += [out for out in core.step() if out.finished]
    return results(done)


@pytest.mark.parametrize(
    "seeds", [range(FAST), pytest.param(range(FAST, ALL), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_every_request_gets_what_it_gets_alone(folder: Path, alone: LLMEngine, seeds: range) -> None:
    drafted = preempted = 0
    for seed in seeds:
        rng = random.Random(seed)
        core, requests = random_engine(folder, rng), random_requests(rng)
        want = run_alone(alone, requests)
        waiting, aborted, done = list(enumerate(requests)), set(), []
        for _ in range(2000):
            while waiting and rng.random() < 0.5:
                index, (prompt, params, options) = waiting.pop(0)
                core.add_request(f"r{index}", prompt, params, **options)
            if core.scheduler.running and rng.random() < 0.08:
                core.scheduler.preempt(rng.choice(core.scheduler.running).request_id)
            if core.scheduler.requests and rng.random() < 0.03:
                name = rng.choice(sorted(core.scheduler.requests))
                out = core.abort_request(name)
                assert out is not None
                assert out.outputs[0].token_ids == want[name][0][: len(out.outputs[0].token_ids)]
                aborted.add(name)
            done += [out for out in core.step() if out.finished]
            core.cache.check()
            if not waiting and not core.has_unfinished_requests:
                break
        core.step()
        assert core.cache.num_free_pages == core.cache.num_usable_pages
        assert results(done) == {name: result for name, result in want.items() if name not in aborted}, f"seed {seed}"
        drafted += core.stats.spec.num_drafts
        preempted += core.stats.preemptions
        core.close()
    assert drafted > 0
    assert preempted > 0
