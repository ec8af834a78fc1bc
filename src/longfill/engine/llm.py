"""`LLM`: the offline entry point, with vLLM's names.

May import everything below `engine/`. Invariant: `generate` returns outputs in the order of its prompts, all finished.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np

from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.engine.stats import EngineStats, StepStats
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import CapacityError, ConfigError
from longfill.models.config import ModelConfig
from longfill.request import RequestOutput, RequestOutputKind, SamplingParams, TokenIds
from longfill.worker.memory import MemoryPlan

Prompt = str | Sequence[int] | TokenIds | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids` (and what `_OPTIONS` lists)."""


class LLM:
    """A model ready to generate.

    >>> from longfill import LLM, SamplingParams
    >>> llm = LLM("needle", max_model_len=4096)
    >>> llm.generate("The access code of", SamplingParams(temperature=0, max_tokens=4))  # doctest: +SKIP
    """

    def __init__(self, model: str | PathLike[str] = "needle", **engine_args: Any) -> None:
        try:
            args = EngineArgs(model=fspath(model), **engine_args)
        except TypeError as error:
            raise ConfigError(f"LLM: {error}") from None
        self._start(args)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """The same from one validated object."""
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        self.engine_args = args
        self.engine = LLMEngine(args)
        self._ids = itertools.count()

    @property
    def model_name(self) -> str:
        return self.engine_args.model

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def memory(self) -> MemoryPlan:
        """What the memory budget was divided into at start."""
        return self.engine.worker.memory

    @property
    def kernel_paths(self) -> dict[str, str]:
        """Operation -> the implementation that runs it."""
        return self.engine.worker.kernels.paths

    @property
    def stats(self) -> EngineStats:
        """Totals over all steps so far."""
        return self.engine.stats

    def close(self) -> None:
        """End all processes of the engine, as happens by itself when the program ends or nothing refers to this."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; `on_step` is called after each step (for progress).

        One SamplingParams serves all prompts, or give one for each. If any prompt is refused, none is run. Raises
        ParallelError where a rank is lost, and EngineDeadError ever after, or after `close`.
        """
        self.engine.executor.check()
        batch = _as_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if not all(isinstance(wanted, SamplingParams) for wanted in each):
            raise ConfigError("generate: sampling_params must be a SamplingParams, or a list with one for each prompt")
        if len(each) != len(batch):
            raise ConfigError(f"generate: {len(batch)} prompts but {len(each)} sampling_params; give one, or one each")
        ids = [str(next(self._ids)) for _ in batch]
        try:
            for request_id, prompt, wanted in zip(ids, batch, each, strict=True):
                content, options = _content(prompt)
                final = dataclasses.replace(wanted, output_kind=RequestOutputKind.FINAL_ONLY)
                self.engine.add_request(request_id, content, final, **options)
            done = self._run(on_step)
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def _run(self, on_step: Callable[[StepStats], None] | None) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            outputs = self.engine.step()
            done.update({output.request_id: output for output in outputs if output.finished})
            if self.engine.last_step is None and not outputs:
                raise CapacityError("no request can be scheduled and nothing runs: the KV pool is held from outside")
            if on_step is not None and self.engine.last_step is not None:
                on_step(self.engine.last_step)
        return done


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping) or hasattr(prompts, "__array__"):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ConfigError(
            f"generate: prompts must be text, token ids, a mapping or a list of these, got {prompts!r:.60}"
        )
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int | float | np.integer) else items


_OPTIONS: dict[str, tuple[type, str]] = {
    "cache_salt": (str, "a string"),
    "priority": (int, "an integer"),
    "tenant": (str, "a string"),
    "kv_transfer_params": (dict, "a mapping"),
}
"""What a prompt's mapping may hold beside the prompt: the type, and its name in words."""


def _content(prompt: Prompt) -> tuple[str | Sequence[int] | TokenIds, dict[str, Any]]:
    """Text or ids, and the options given with them."""
    if not isinstance(prompt, Mapping):
        return _text_or_ids(prompt), {}
    unknown = set(prompt) - {"prompt", "prompt_token_ids", *_OPTIONS}
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise ConfigError(
            f"prompt {sorted(prompt)}: give either 'prompt' or 'prompt_token_ids', and of {', '.join(_OPTIONS)} what "
            "you like"
        )
    options = {name: prompt[name] for name in _OPTIONS if prompt.get(name) is not None}
    for name, value in options.items():
        kind, words = _OPTIONS[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"prompt: {name} must be {words}, got {value!r:.60}")
    return _text_or_ids(prompt.get("prompt", prompt.get("prompt_token_ids"))), options


def _text_or_ids(content: Any) -> str | Sequence[int] | TokenIds:
    if isinstance(content, str | list | tuple) or hasattr(content, "__array__"):
        return content  # type: ignore[no-any-return]
    raise ConfigError(f"prompt: give text or a list of token ids, got {content!r:.60}")
