"""longfill's own process of `bench prefill`: `python -m longfill.bench.prefill_worker`.

May import the engine. Invariant: what is timed is the public path, `LLM.generate` with one token to sample.
"""

from __future__ import annotations

from typing import Any

from longfill.bench.ceilings import Machine, Math, math_of
from longfill.bench.child import ChildRequest, serve
from longfill.bench.flops import prefill_flops
from longfill.bench.timing import clock
from longfill.config import EngineArgs
from longfill.engine.llm import LLM
from longfill.kernels.cpu import available, selected_isa
from longfill.request import SamplingParams

COMPARED_TOKENS = 64
"""Most likely tokens whose log-probabilities are handed back: as many as a request may ask for."""


class LongfillEngine:
    """One request at a time. Its steps take what `options` of the request, the engine arguments, say."""

    def __init__(self, request: ChildRequest) -> None:
        self._llm = LLM.from_engine_args(EngineArgs(**request.options))
        self._params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=COMPARED_TOKENS)
        self._ceiling: Math = "fp32"
        self._machine: Machine | None = None
        if available():
            isa = selected_isa()
            if self._llm.model_config.dtype == "bfloat16":
                self._ceiling = math_of(isa)
            # A short buffer: only multiply-adds are asked for.
            self._machine = Machine(isa, request.threads, clock(request.threads, processor_time=False), buffer=64)

    def prefill(self, token_ids: list[int]) -> None:
        self._tokens = len(token_ids)
        self._before = dict(self._llm.stats.seconds)
        [self._output] = self._llm.generate([token_ids], self._params)

    def figures(self) -> dict[str, Any]:
        totals = self._llm.stats.seconds
        return {
            "stage_seconds": {stage: total - self._before.get(stage, 0.0) for stage, total in totals.items()},
            "flops": prefill_flops(self._llm.model_config, self._tokens),
            "kernel_paths": dict(self._llm.kernel_paths),
            "peak_math": self._ceiling,
            "peak_flops_per_s": None if self._machine is None else self._machine.measure(self._ceiling),
        }

    def answer(self) -> dict[str, Any]:
        completion = self._output.outputs[0]
        if completion.logprobs is None:
            raise RuntimeError(f"the prompt failed: {completion.stop_reason}")
        return {"logprobs": {token: entry.logprob for token, entry in completion.logprobs[0].items()}}


if __name__ == "__main__":
    serve(LongfillEngine, "torch")
