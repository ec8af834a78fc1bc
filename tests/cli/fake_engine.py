"""A fake engine with the real one's surface: the commands are tested without a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from longfill.config import EngineArgs
from longfill.engine.stats import EngineStats, RequestShare, StepStats
from longfill.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from longfill.worker.memory import MemoryPlan

MODEL_LIMIT = 20_000


@dataclass
class FakeRow:
    name: str
    bytes: int
    note: str


@dataclass
class FakePlan:
    budget: int = 1_000_000
    rows: tuple[FakeRow, ...] = (FakeRow("weights", 3_000, "3 tensors [bf16]"), FakeRow("KV pages", 640_000, "10"))
    num_pages: int = 10
    page_bytes: int = 64_000
    bytes_per_token: int = 1_000
    max_model_len: int = 4_096

    total = MemoryPlan.total
    report = MemoryPlan.report


def step_stats(**changes: Any) -> StepStats:
    """A plausible step, with the fields that a test cares about replaced."""
    step = StepStats(
        step=1, num_tokens=10, num_prompt_tokens=10, num_running=1, num_waiting=0, pages_used=3, pages_cached=0,
        pages_total=9, indexer_chunks=4, scored_pairs=55, screened_pairs=40, screen_survivors=2, gathered_rows=6,
        seconds={}, progress={"0": (10, 10)}, shares={"0": RequestShare(10, 10, 0)}, preempted=(), rss_bytes=500_000,
    )  # fmt: skip
    return replace(step, **changes)


class FakeTokenizer:
    """One token per word or punctuation mark, and one in front of every text."""

    eos_token_ids = (1,)

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray[Any, np.dtype[np.int64]]:
        pieces = re.findall(r"[A-Za-z]+|\S", text)
        ids = [2 + sum(piece.encode()) % 500 for piece in pieces]
        return np.array(([0] if add_special_tokens else []) + ids, dtype=np.int64)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + (
            "<assistant>" if add_generation_prompt else ""
        )


@dataclass
class FakeIndexer:
    topk: int = 64


@dataclass
class FakeConfig:
    vocab_size: int = 500
    dtype: str = "float32"
    indexer: FakeIndexer | None = field(default_factory=FakeIndexer)


class FakeLLM:
    """Answers each prompt with `answer(prompt)`; remembers what it was asked."""

    def __init__(
        self, args: EngineArgs, answer: Callable[[Any], str], logprob_shift: float, finish: str, last_finish: str | None
    ) -> None:
        self.args = args
        self.finish = finish
        self.last_finish = last_finish
        self.answer = answer
        self.logprob_shift = logprob_shift
        self.model_name = args.model
        self.memory = FakePlan(max_model_len=args.max_model_len or MODEL_LIMIT)
        self.kernel_paths = {"index_topk": "reference"}
        self.model_config = FakeConfig()
        self.tokenizer = None if args.skip_tokenizer_init else FakeTokenizer()
        self.stats = EngineStats(steps=2, tokens=10, indexer_chunks=4, scored_pairs=55, gathered_rows=6)
        self.asked: list[Any] = []
        self.params: SamplingParams | None = None

    def generate(
        self, prompts: list[Any], params: SamplingParams, on_step: Callable[[Any], None] | None = None
    ) -> list[RequestOutput]:
        self.asked += prompts
        self.params = params
        if on_step is not None:
            on_step(step_stats())
        return [self._output(number, prompt) for number, prompt in enumerate(prompts)]

    def _output(self, number: int, prompt: Any) -> RequestOutput:
        text = self.answer(prompt)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) and self.tokenizer else np.asarray(prompt)
        made = 1 if self.params is None or self.params.max_tokens is None else self.params.max_tokens
        logprobs = None
        if self.params is not None and self.params.logprobs is not None:
            logprobs = [{7: Logprob(-0.1 + self.logprob_shift, 1, "x"), 8: Logprob(float("-inf"), 2)}] * made
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.params is not None and self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *[{int(token): Logprob(-3.0, 9, "p"), 7: Logprob(-0.5, 1)} for token in ids[1:]]]
        count = 1 if self.params is None else self.params.n
        completions = [
            CompletionOutput(index, text, [7] * made, finish, logprobs=logprobs)
            for index, finish in enumerate([self.finish] * (count - 1) + [self.last_finish or self.finish])
        ]
        for completion in completions:
            if completion.finish_reason == "error":
                completion.stop_reason = "logits are not numbers"
        return RequestOutput(
            request_id=str(number),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=completions,
            finished=True,
            num_cached_tokens=2,
            prompt_logprobs=prompt_logprobs,
            metrics=RequestMetrics(arrival_time=1.0, first_token_time=1.5, finished_time=2.0, steps=3),
            digest="ab" * 32 if self.args.digest else None,
        )


class Engines:
    """The fake engines that a command made, and how the next ones behave."""

    def __init__(self) -> None:
        self.made: list[FakeLLM] = []
        self.answer: Callable[[Any], str] = lambda _prompt: "an answer"
        self.shift: Callable[[EngineArgs], float] = lambda _args: 0.0
        self.finish = "stop"
        self.last_finish: str | None = None
        """Of the last completion, if it ends otherwise than the others."""

    def load(self, args: EngineArgs) -> FakeLLM:
        llm = FakeLLM(args, self.answer, self.shift(args), self.finish, self.last_finish)
        self.made.append(llm)
        return llm

    @property
    def last(self) -> FakeLLM:
        return self.made[-1]
