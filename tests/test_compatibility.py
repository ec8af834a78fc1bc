"""Every pair of features gives what each gives alone, or is refused with both names (known fault CP-03, for ranks);
docs/compatibility.md says which.

A pair is run on a tiny random model: two requests at once, then the first again (a prefix hit).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.compatibility import (
    ALTERS,
    BY_NAME,
    FEATURES,
    OUTSIDE,
    REFUSED_TOGETHER,
    Feature,
    Setup,
    cell,
    check,
    table,
)
from longfill.config import EngineArgs
from longfill.engine.executors import spawn
from longfill.errors import ConfigError, LongfillError
from longfill.kernels.cpu import available, selected_isa
from longfill.kernels.cpu.indexer import SCREENED_ISAS
from longfill.request import Logprob, StructuredOutputsParams
from tests.engine.small_tokenizers import gpt2
from tests.native import needs_native
from tests.oracle.harness import oracle, run, tokens
from tests.parallel.forked import ForkedProcesses
from tests.tiny import make_checkpoint

TOPK, OTHER_TOPK = 8, 12
PROMPTS = (tokens(23), tokens(22, 1))
LONG_PROMPT = tokens(31, 2)
MAX_TOKENS = 3
PAGE = 4
POOL = 13
"""Pages that both prompts fit into, but not both with what they generate: one of them is preempted."""

MEAN_ROUNDING = 0.3
"""Most that rows may differ from float32 on average, those that select another key included; unrelated ones: 1.4."""

MODEL_FIELDS: dict[str, dict[str, Any]] = {
    "no indexer": {"family": "deepseek_v3", "n_group": 1},
    "shared indexer layers": {"indexer_types": ["full", "shared"]},
    "no experts": {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", "dense"]},
    "fp8 weights": {"fp8": True},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "index_topk": {"hf_overrides": {"index_topk": OTHER_TOPK}},
    "sparse_mla_force_mqa": {"sparse_mla_force_mqa": True},
    "sparse_mla_prefill_workspace_factor": {"sparse_mla_prefill_workspace_factor": 1},
    "enable_prefix_caching": {"enable_prefix_caching": False},
    "num_gpu_blocks_override": {"num_gpu_blocks_override": POOL},
    "block_size": {"block_size": 8},
    "max_num_batched_tokens": {"max_num_batched_tokens": 7},
    "long_prefill_token_threshold": {"long_prefill_token_threshold": 3},
    "prefill_schedule_interval": {"prefill_schedule_interval": 2},
    "async_scheduling": {"async_scheduling": True},
    "split_mixed_batch": {"split_mixed_batch": True},
    "speculative_config": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "enable_expert_parallel": {"enable_expert_parallel": True},
    "prefill_context_parallel_size": {"prefill_context_parallel_size": 2},
    "decode_context_parallel_size": {"decode_context_parallel_size": 2},
    "cp_kv_cache_interleave_size": {"cp_kv_cache_interleave_size": 2},
    "deterministic": {"deterministic": True},
    "digest": {"digest": True},
    "skip_tokenizer_init": {"skip_tokenizer_init": True},
    "tokenizer": {"tokenizer": "OTHER"},
}
PARAMS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 1.0, "seed": 7},
    "penalties": {"presence_penalty": -2.0, "frequency_penalty": -1.0, "repetition_penalty": 0.2},
    "logit_bias": {"logit_bias": {5: 3.0, 7: 3.5, 300: -100.0}},
    "min_tokens": {"min_tokens": MAX_TOKENS, "stop_token_ids": list(range(400))},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="[a-zA-Z .,]{60}")},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 2},
    "stop": {"stop": ["a string that never comes"]},
}
CHOOSING = frozenset({"sampling", "penalties", "logit_bias", "min_tokens", "structured_outputs"})
"""Features that choose among the model's logits, and change none of them for the same tokens."""

PARALLEL = (
    "tensor_parallel_size", "enable_expert_parallel", "prefill_context_parallel_size", "decode_context_parallel_size",
    "deterministic",
)  # fmt: skip
"""Features of several ranks that meet HARD ones in every run of the tests; all other pairs of theirs are slow."""
OF_RANKS = frozenset(
    {*PARALLEL, "cp_kv_cache_interleave_size", "dcp_comm_backend=ag_rs", "pcp_split=interleave", "pcp_split=contiguous"}
    | {"all2all_backend=high_throughput", "all2all_backend=low_latency"}
)
HARD = frozenset(
    {"no indexer", "shared indexer layers", "fp8 weights", "dtype=bfloat16", "kernel_backend=reference"}
    | {"enable_prefix_caching", "num_gpu_blocks_override", "max_num_batched_tokens", "async_scheduling"}
    | {"speculative_config", "structured_outputs", "prompt_logprobs", "split_mixed_batch"}
)

NEEDS = {
    "enable_expert_parallel": "prefill_context_parallel_size",
    "all2all_backend=high_throughput": "enable_expert_parallel",
    "all2all_backend=low_latency": "enable_expert_parallel",
    "pcp_split=interleave": "prefill_context_parallel_size",
    "pcp_split=contiguous": "prefill_context_parallel_size",
    "decode_context_parallel_size": "tensor_parallel_size",
    "cp_kv_cache_interleave_size": "decode_context_parallel_size",
    "dcp_comm_backend=ag_rs": "decode_context_parallel_size",
    "n": "sampling",
    "sparse_mla_prefill_workspace_factor": "attention_path=workspace",
    "indexer_screen=on": "indexer_cache_dtype=fp8",  # which the bench's float32 models have only when told to
}


def arguments(name: str) -> dict[str, Any]:
    """Engine arguments that turn a feature on; `knob=value` features say so themselves."""
    if "=" in name:
        knob, value = name.split("=")
        return {knob: value}
    return ARGUMENTS.get(name, {})


@dataclass
class Result:
    """Of each request: its tokens, the fp32 logits [V] behind each, the digest, and what happened to it."""

    token_ids: list[list[int]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    siblings: list[list[list[Tensor]]] = field(default_factory=list)
    """The logits behind the other completions, with n > 1; the fields above are the first one's."""
    prompts: list[list[dict[int, tuple[float, int]] | None] | None] = field(default_factory=list)
    """By token of the prompt and token id: log-probability and rank, where they are asked for."""
    digests: list[str | None] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    preemptions: int = 0


needs_screen = pytest.mark.skipif(
    not available() or selected_isa() not in SCREENED_ISAS, reason="the indexer has no screen here"
)


class Bench:
    """Tiny models by the features that they have, and runs by the features that are on; each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = functools.cache(self._run)
        self.model = functools.cache(self._model)
        self.rows = functools.cache(self._rows)
        """Features that may change a row's logits -> the logits [L, V] of every row of a prompt."""
        self.exact = functools.cache(self._exact)
        """The same from the model alone, in float32, having checked that transformers agrees."""

    def _model(self, names: frozenset[str], topk: int = TOPK) -> tuple[Path, Any]:
        """(folder, the transformers model that it equals)."""
        fields: dict[str, Any] = {"family": "glm_moe_dsa", "index_topk": topk, "index_n_heads": 16}
        for name in names:
            fields |= MODEL_FIELDS[name]
        if fields["family"] == "deepseek_v3":
            fields = {k: v for k, v in fields.items() if not k.startswith("index")}
        sizes = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
        folder = self.root / f"{'-'.join(sorted(names)).replace(' ', '_')}_{topk}"
        model = make_checkpoint(folder, **fields, **sizes, kv_lora_rank=128, mtp=1)
        gpt2().save(str(folder / "tokenizer.json"))
        return folder, model

    def llm(self, names: frozenset[str]) -> LLM:
        folder, _ = self.model(names & frozenset(MODEL_FIELDS))
        given: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 4, "block_size": PAGE, "num_threads": 1}
        given |= {"memory_budget": "4GiB", "sparse_indexer_max_logits_mb": 1}
        for name in sorted(names):
            given |= arguments(name)
        if given.get("tokenizer") == "OTHER":
            given["tokenizer"] = str(self.model(frozenset({"shared indexer layers"}))[0])
        return LLM(str(folder), **given)

    def _run(self, names: frozenset[str]) -> Result:
        llm, result = self.llm(names), Result()
        logits: dict[str, list[Tensor]] = {}
        append = llm.engine._append

        def keep(live: Any, num_tokens: int, outcome: Any) -> None:
            name = live.request.request_id
            logits.setdefault(name, []).extend(row.clone() for row in outcome.logits[name][:num_tokens])
            append(live, num_tokens, outcome)

        llm.engine._append = keep  # type: ignore[method-assign]
        params = sampling(names)
        for batch in (PROMPTS, PROMPTS[:1]):
            for output in llm.generate([list(prompt) for prompt in batch], params):
                result.token_ids.append(output.outputs[0].token_ids)
                ids = [output.request_id]
                if len(output.outputs) > 1:
                    ids = [f"{completion.index}_{output.request_id}" for completion in output.outputs]
                result.logits.append(logits[ids[0]])
                result.siblings.append([logits[sibling] for sibling in ids[1:]])
                result.prompts.append(bare(output.prompt_logprobs))
                result.digests.append(output.digest)
                result.cached.append(output.num_cached_tokens)
        result.preemptions = llm.stats.preemptions
        llm.close()
        return result

    def _rows(self, names: frozenset[str]) -> Tensor:
        with self.llm(names) as llm:
            return run(llm, LONG_PROMPT).logits if llm.engine_args.num_ranks == 1 else last_rows(llm)

    def _exact(self, names: frozenset[str]) -> Tensor:
        rows = self.rows(names)
        topk = OTHER_TOPK if "index_topk" in names else TOPK
        _, model = self.model(names & frozenset(MODEL_FIELDS), topk)
        assert difference(rows, oracle(model, LONG_PROMPT).logits).max() < 1e-5
        return rows


def last_rows(llm: LLM) -> Tensor:
    """The logits [L, V] of every row of LONG_PROMPT, each as the last one of a prompt of its own."""
    rows: list[Tensor] = []
    append = llm.engine._append

    def keep(live: Any, num_tokens: int, outcome: Any) -> None:
        rows.append(outcome.logits[live.request.request_id][0].clone())
        append(live, num_tokens, outcome)

    llm.engine._append = keep  # type: ignore[method-assign]
    for end in range(1, len(LONG_PROMPT) + 1):
        llm.generate([list(LONG_PROMPT[:end])], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return torch.stack(rows)


def sampling(names: frozenset[str]) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    for name in names & frozenset(PARAMS):
        fields |= PARAMS[name]
    return SamplingParams(**fields)


def bare(
    prompt_logprobs: list[dict[int, Logprob] | None] | None,
) -> list[dict[int, tuple[float, int]] | None] | None:
    """Without the tokens' texts, which are not there without a tokenizer."""
    if prompt_logprobs is None:
        return None
    return [entry and {token: (one.logprob, one.rank) for token, one in entry.items()} for entry in prompt_logprobs]


def digest_of(completions: list[list[Tensor]]) -> str:
    """The digest of the logits behind one completion, or of those behind several."""
    each = [hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).hexdigest() for rows in completions]
    return each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Of each row: root mean square of the difference over that of `want`."""
    return (got - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()


def with_needs(*features: Feature) -> frozenset[str]:
    names = {feature.name for feature in features}
    while not (needed := {NEEDS[name] for name in names & frozenset(NEEDS)}) <= names:
        names |= needed
    return frozenset(names)


def marks(*features: Feature) -> list[Any]:
    names = {feature.name for feature in features}
    found = [needs_native] if "kernel_backend=cpu" in names else []
    if "indexer_screen=on" in names:
        found.append(needs_screen)
    if len(names & OF_RANKS) == 1 < len(names) and not (names & set(PARALLEL) and names & HARD):
        found.append(pytest.mark.slow)
    return found


def pairs(*, refused: bool) -> list[Any]:
    chosen = [
        (a, b)
        for a, b in itertools.combinations(FEATURES, 2)
        if a.group != b.group and (cell(a, b) == "refused") == refused
    ]
    return [
        pytest.param(a, b, id=f"{a.name}-{b.name}".replace(" ", "_"), marks=[] if refused else marks(a, b))
        for a, b in chosen
    ]


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "Processes", ForkedProcesses)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("compatibility"))


@pytest.mark.parametrize(("first", "second"), pairs(refused=False))
def test_every_allowed_pair_is_equal(bench: Bench, first: Feature, second: Feature) -> None:
    names = with_needs(first, second)
    got = bench.run(names)
    kept = frozenset(name for name in names if BY_NAME[name].effect != "none" or ALTERS.get(name, frozenset()) & names)
    same = bench.run(kept)
    assert got.token_ids == same.token_ids
    for rows, wanted in zip(got.logits, same.logits, strict=True):
        assert all(torch.equal(row, want) for row, want in zip(rows, wanted, strict=True))
    assert got.prompts == bench.run(kept | (names & {"prompt_logprobs"})).prompts
    assert all((entries is not None) == ("prompt_logprobs" in names) for entries in got.prompts)
    decides = kept - CHOOSING
    exact = bench.exact(frozenset(name for name in decides if BY_NAME[name].effect == "model"))
    allowed = sum(BY_NAME[name].tolerance for name in decides)
    rounding = difference(bench.rows(decides), exact)
    assert rounding.median() <= allowed
    assert rounding.mean() <= MEAN_ROUNDING
    for digest, rows, siblings in zip(got.digests, got.logits, got.siblings, strict=True):
        assert digest == (digest_of([rows, *siblings]) if "digest" in names else None)


@pytest.mark.parametrize(("first", "second"), pairs(refused=True))
def test_every_refused_pair_is_refused_with_both_names(bench: Bench, first: Feature, second: Feature) -> None:
    names = frozenset({first.name, second.name})
    if names & OF_RANKS:
        names = with_needs(first, second)
    with pytest.raises(LongfillError) as error:
        bench.llm(names).generate([list(PROMPTS[0])], sampling(names))
    options = [first.option, second.option]
    if names == {"index_topk", "no indexer"}:  # refused where config.json is read, in its words
        options = ["index_topk", "deepseek_v3"]
    assert all(option in str(error.value) for option in options)


@pytest.mark.parametrize(("names", "why"), REFUSED_TOGETHER)
def test_what_is_refused_together_is_allowed_in_part(bench: Bench, names: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench.llm(with_needs(*(BY_NAME[name] for name in names)))
    assert all(BY_NAME[name].option in str(error.value) for name in names)
    assert why in str(error.value)
    for left_out in names:
        bench.llm(with_needs(*(BY_NAME[name] for name in names if name != left_out))).close()


def test_a_refusal_comes_before_any_weight_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("the worker was made")

    monkeypatch.setattr("longfill.engine.engine.make_executor", started)
    with pytest.raises(ConfigError, match="--sparse-mla-force-mqa and --model without an indexer"):
        bench.llm(frozenset({"sparse_mla_force_mqa", "no indexer"}))


def test_an_override_of_topk_is_refused_by_the_table_as_by_the_reader_of_config_json(bench: Bench) -> None:
    model = bench.llm(frozenset({"no indexer"})).model_config
    with pytest.raises(ConfigError, match="index_topk in --hf-overrides and --model without an indexer exclude"):
        check(EngineArgs(hf_overrides={"index_topk": OTHER_TOPK}), model)


@pytest.mark.parametrize("args", [{}, {"kv_cache_dtype": "float32", "dtype": "bfloat16"}])
def test_a_screen_is_refused_for_index_keys_that_auto_makes_float32(bench: Bench, args: dict[str, Any]) -> None:
    folder, _ = bench.model(frozenset())
    with pytest.raises(ConfigError, match="--indexer-screen on and --indexer-cache-dtype float32 exclude") as error:
        LLM(str(folder), indexer_screen="on", **args)
    assert "auto is float32 beside float32 latent rows; add --indexer-cache-dtype fp8" in str(error.value)


@needs_native
@pytest.mark.parametrize("args", [{}, {"kv_cache_dtype": "bfloat16"}, {"dtype": "bfloat16"}])
def test_native_kernels_run_for_index_keys_of_both_formats(bench: Bench, args: dict[str, Any]) -> None:
    folder, _ = bench.model(frozenset())
    given = {"max_model_len": 32, "memory_budget": "4GiB", "num_threads": 1} | args
    for backend in ("auto", "cpu"):
        assert LLM(str(folder), kernel_backend=backend, **given).engine.worker.kernels.native_index
    assert not LLM(str(folder), kernel_backend="reference", **given).engine.worker.kernels.native_index


@needs_native
def test_native_kernels_give_the_same_bits_with_and_without_force_mqa(bench: Bench) -> None:
    forced = frozenset({"sparse_mla_force_mqa"})
    assert torch.equal(bench.rows(forced), bench.rows(frozenset()))


@pytest.mark.parametrize("feature", [pytest.param(f, id=f.name.replace(" ", "_"), marks=marks(f)) for f in FEATURES])
def test_a_run_turns_on_the_features_that_it_is_named_after(bench: Bench, feature: Feature) -> None:
    llm = bench.llm(with_needs(feature))
    setup = Setup(llm.engine_args, llm.model_config, sampling(with_needs(feature)))
    unnamed = {"dtype=float32", "attention_path=paged", "block_size"}  # of the checkpoint, the default, the bench
    unnamed |= {"indexer_cache_dtype=float32", "indexer_cache_dtype=fp8"}  # what auto stands for
    on = {other.name for other in FEATURES if other.enabled(setup)}
    assert with_needs(feature) <= on <= with_needs(feature) | unnamed


def test_the_runs_meet_what_makes_features_hard(bench: Bench) -> None:
    plain = bench.run(frozenset())
    assert plain.cached == [0, 0, 20]
    assert bench.run(frozenset({"enable_prefix_caching"})).cached == [0, 0, 0]
    assert bench.run(frozenset({"num_gpu_blocks_override"})).preemptions > 0
    assert min(map(len, PROMPTS)) > OTHER_TOPK


@pytest.mark.parametrize("name", sorted(CHOOSING))
def test_a_choosing_feature_changes_the_tokens(bench: Bench, name: str) -> None:
    assert bench.run(frozenset({name})).token_ids != bench.run(frozenset()).token_ids


def test_completions_of_one_prompt_differ(bench: Bench) -> None:
    got = bench.run(frozenset({"n", "sampling"}))
    for rows, [sibling] in zip(got.logits, got.siblings, strict=True):
        assert torch.equal(rows[0], sibling[0])  # what follows the prompt
        assert not torch.equal(rows[-1], sibling[-1])


@pytest.mark.parametrize("name", [f.name for f in FEATURES if f.effect == "rounding" and f.tolerance])
def test_a_rounding_feature_changes_something_and_stays_within_its_tolerance(bench: Bench, name: str) -> None:
    if name == "kernel_backend=reference" and not available():
        pytest.skip("the reference is all there is")
    # The native kernels round alike with and without it.
    beside = {"kernel_backend=reference"} if name == "sparse_mla_force_mqa" else set()
    names = with_needs(BY_NAME[name], BY_NAME[name]) | beside
    changed = difference(bench.rows(names), bench.exact(frozenset()))
    assert changed.max() > 0
    assert changed.median() <= sum(BY_NAME[needed].tolerance for needed in names)


def test_every_knob_has_a_row_or_a_reason_to_have_none() -> None:
    rows: Mapping[str, Any] = {f.group: f for f in FEATURES} | {f.name: f for f in FEATURES}
    inside = {"hf_overrides"}  # its field index_topk
    for knob in dataclasses.fields(EngineArgs):
        assert (knob.name in rows or knob.name in inside) != (knob.name in OUTSIDE), knob.name


def test_docs_are_current() -> None:
    page = Path(__file__).parents[1] / "docs" / "compatibility.md"
    assert page.read_text(encoding="utf-8") == table(), "run: python -m longfill.compatibility > docs/compatibility.md"
