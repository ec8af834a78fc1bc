"""`bench serve`: load on a running OpenAI-compatible server, as asked for, and what came of every request.

Imports the other serve_* files, never longfill's own server. Invariant: what is sent is made before the clock starts,
and how late this client's own loop was is measured beside what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longfill.bench.serve_client import Connection, Target
from longfill.bench.serve_metrics import Answer
from longfill.bench.serve_plan import Job, Workload
from longfill.bench.serve_prompts import PromptMaker, TokenIds, ask_for_words, make_prompt
from longfill.errors import ConfigError

LAG_INTERVAL = 0.01
PROBE_LENGTH = 16
WARMUP_SEED = 2**32
"""Added to the seed of warm-up requests, so that none of the run's prompts is in the server's cache after them."""
MOST_ADDED_TO_IDS = 4
"""Tokens that a server may add to token ids: a beginning and an end."""


@dataclass(frozen=True)
class LoadPlan:
    """What is sent, where, and how many at a time."""

    target: Target
    workload: Workload
    max_concurrency: int | None = None
    num_warmups: int = 0
    vocab_size: int | None = None


@dataclass
class Load:
    """What came of it."""

    model: str
    prompts: PromptMaker
    answers: list[Answer]
    lags: array[float]
    """Seconds by which the client's loop was late, every few milliseconds."""
    cpu_share: float
    """Processor time of this process over the time that passed."""


def run_load(plan: LoadPlan, on_stage: Callable[[str], None], on_answer: Callable[[Answer | None], None]) -> Load:
    """Ask the server what it serves, warm up, then send everything.

    `on_stage` gets a word about what happens before the run, `on_answer` every answer, and None for each request that
    is sent. Raises ConfigError for a server that cannot be reached or refuses a first short request.
    """
    return asyncio.run(_run(plan, on_stage, on_answer))


async def _run(plan: LoadPlan, on_stage: Callable[[str], None], on_answer: Callable[[Answer | None], None]) -> Load:
    connection = Connection(plan.target)
    async with contextlib.aclosing(connection):
        on_stage("asking the server what it serves")
        entry = _choose(await connection.models(), plan.target)
        connection.target = target = dataclasses.replace(plan.target, model=str(entry["id"]))
        _check_lengths(plan.workload, entry.get("max_model_len"))
        maker = await _prompt_maker(connection, plan.vocab_size or _vocab_size(entry), on_stage)
        if plan.num_warmups:
            on_stage(f"warming up with {plan.num_warmups:,} requests")
            await _warm_up(connection, plan, maker)
        on_stage("making prompts")
        jobs, seed = plan.workload.jobs(), plan.workload.seed
        bodies = [target.body(make_prompt(maker, job, plan.workload.prefix_len, seed), job.output_len) for job in jobs]
        on_stage(f"sending {len(jobs):,} requests to {target.base_url}{target.endpoint}")
        with _watch_lag() as lags:
            busy, began = time.process_time(), time.perf_counter()
            answers = await _send_all(connection, jobs, bodies, plan.max_concurrency, f"bench-{seed}", on_answer)
            share = (time.process_time() - busy) / (time.perf_counter() - began)
        return Load(target.model, maker, answers, lags, share)


async def _send_all(
    connection: Connection,
    jobs: Sequence[Job],
    bodies: Sequence[bytes],
    max_concurrency: int | None,
    name: str,
    on_answer: Callable[[Answer | None], None],
) -> list[Answer]:
    """Each request when it is due and there is a place for it, in that order; the answers in the order of the jobs."""
    places = asyncio.Semaphore(max_concurrency or len(jobs))
    start = time.perf_counter()

    async def send(job: Job, body: bytes) -> Answer:
        async with places:
            on_answer(None)
            answer = await connection.send(job, body, start, f"{name}-{job.number}")
        on_answer(answer)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = []
        for job, body in zip(jobs, bodies, strict=True):
            wait = start + job.due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(job, body)))
    return [task.result() for task in tasks]


@contextlib.contextmanager
def _watch_lag() -> Iterator[array[float]]:
    """Measure beside what runs inside how late the loop wakes a sleeper."""
    lags = array("d")

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL)
            lags.append(max(0.0, time.perf_counter() - before - LAG_INTERVAL))

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield lags
    finally:
        watcher.cancel()


async def _warm_up(connection: Connection, plan: LoadPlan, maker: PromptMaker) -> None:
    """Other prompts of the same lengths; raises ConfigError where one fails."""
    classes = plan.workload.classes
    seed = plan.workload.seed + WARMUP_SEED
    workload = dataclasses.replace(
        plan.workload, num_prompts=max(plan.num_warmups, len(classes)), seed=seed, request_rate=math.inf,
        classes=tuple(dataclasses.replace(group, weight=1.0) for group in classes),
    )  # fmt: skip
    jobs = workload.jobs()[: plan.num_warmups]
    bodies = [
        connection.target.body(make_prompt(maker, job, workload.prefix_len, seed), job.output_len) for job in jobs
    ]
    answers = await _send_all(connection, jobs, bodies, plan.max_concurrency, "warmup", lambda _answer: None)
    for answer in answers:
        if answer.failure is not None:
            raise ConfigError(f"a warm-up request failed: {answer.failure}: {answer.message}")


def _choose(entries: Sequence[dict[str, Any]], target: Target) -> dict[str, Any]:
    """The entry of the model that is asked for, or the first one."""
    names = [str(entry.get("id")) for entry in entries]
    if not entries:
        raise ConfigError(f"{target.base_url} serves no model")
    if target.model and target.model not in names:
        raise ConfigError(f"--model {target.model}: the server has {', '.join(names)}")
    return entries[names.index(target.model)] if target.model else entries[0]


def _vocab_size(entry: dict[str, Any]) -> int | None:
    """As longfill and llama.cpp list it; other servers do not say."""
    meta = entry.get("meta")
    size = entry.get("vocab_size") or (meta.get("n_vocab") if isinstance(meta, dict) else None)
    return size if isinstance(size, int) and size > 0 else None


def _check_lengths(workload: Workload, limit: Any) -> None:
    """Raise ConfigError for requests that the server would refuse."""
    for group in workload.classes:
        most = workload.most_tokens(group)
        if isinstance(limit, int) and most > limit:
            raise ConfigError(
                f"requests of {group.name} take up to {most:,} tokens, more than the server's limit of {limit:,}"
            )


async def _prompt_maker(connection: Connection, vocab_size: int | None, on_stage: Callable[[str], None]) -> PromptMaker:
    """Token ids where the endpoint takes them and the vocabulary is known, else words that the server counts."""
    if not connection.target.chat and vocab_size is not None:
        probe = TokenIds(vocab_size).make(np.random.default_rng(0), PROBE_LENGTH)
        added = await connection.count(probe) - PROBE_LENGTH
        if not 0 <= added <= MOST_ADDED_TO_IDS:
            raise ConfigError(
                f"the server counts {PROBE_LENGTH + added} tokens in a prompt of {PROBE_LENGTH} token ids, so that "
                "nothing can be said about longer ones"
            )
        return TokenIds(vocab_size, added)
    on_stage("asking the server which words are one token")
    by_route = await connection.tokenize("the")
    by_usage = await connection.count("the")

    async def tokenized(prompt: str) -> int:
        count = await connection.tokenize(prompt)
        if count is None:
            raise ConfigError(f"{connection.target.base_url}/tokenize answers now and then only")
        return count

    # A route that leaves out the template, or what the template says of this endpoint, would give other lengths.
    return await ask_for_words(tokenized if by_route == by_usage else connection.count)
