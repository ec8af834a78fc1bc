"""Drafts change when tokens come, never which: the same tokens and the same bits of their logits as without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import needs_native
from tests.oracle.harness import engine, tokens
from tests.tiny import edit_config, make_checkpoint
from tests.worker.drafts import Choose, Driven, drive, speculative

from longfill import SamplingParams
from longfill.errors import ConfigError
from longfill.models.config import ModelConfig
from longfill.partition import StepRequest, plan_step
from longfill.units import PageSize
from longfill.worker.sampler import LogitsError, SampledToken, SampleInput, candidates, sample
from longfill.worker.speculate import draft_token, tokens_behind, verify

PROMPTS = [tokens(37), tokens(5, 1), tokens(18, 2)]
"""One far above index_topk (16), one below it for most of its outputs, one that crosses it at once."""
OUTPUTS = 13
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=OUTPUTS, ignore_eos=True)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("glm_moe_dsa", {"kernel_backend": "reference"}),
    "native": ("deepseek_v32", {"kernel_backend": "cpu", "indexer_cache_dtype": "fp8"}),
    "dense": ("deepseek_v3", {}),
}
every_kind = pytest.mark.parametrize(
    "kind", ["reference", pytest.param("native", marks=needs_native), "dense"], scope="module"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    path = tmp_path_factory.mktemp(kind)
    make_checkpoint(path, KINDS[kind][0], mtp=1, num_hidden_layers=2)
    return path


def run(folder: Path, kind: str, params: SamplingParams, **given: Any) -> list[Driven]:
    return drive(folder, PROMPTS, params, **({"chunk": 7} | KINDS[kind][1] | given))


def among(truth: list[Driven], right: Sequence[bool]) -> Choose:
    """Drafts that are right and wrong in turns, as `right` says of the token at each output index, over and over."""

    def choose(name: str, first: int, made: Sequence[int]) -> list[int]:
        known = truth[int(name)].token_ids
        tokens = [known[i] if i < len(known) else 3 for i in range(first, first + len(made))]
        return [t if right[i % len(right)] else (t + 1) % 512 for i, t in enumerate(tokens, first)]

    return choose


def assert_same(got: list[Driven], want: list[Driven]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids[:OUTPUTS] == theirs.token_ids
        pairs = zip(ours.logits[:OUTPUTS], theirs.logits, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@every_kind
def test_the_same_tokens_and_logits_whatever_the_drafts_are(folder: Path, kind: str, params: SamplingParams) -> None:
    want = run(folder, kind, params, drafts=0)
    assert [r.decode_steps for r in want] == [OUTPUTS - 1] * len(PROMPTS)
    for drafts, page in ((1, 4), (2, 1), (3, 4), (3, 64), (8, 2)):
        assert_same(run(folder, kind, params, drafts=drafts, page=page), want)
        right = run(folder, kind, params, drafts=drafts, page=page, choose=among(want, [True]))
        assert_same(right, want)
        assert [r.decode_steps for r in right] == [-(-(OUTPUTS - 1) // (1 + drafts))] * len(PROMPTS)
        wrong = run(folder, kind, params, drafts=drafts, page=page, choose=among(want, [False]))
        assert_same(wrong, want)
        assert [r.decode_steps for r in wrong] == [OUTPUTS - 1] * len(PROMPTS)
        mixed = run(folder, kind, params, drafts=drafts, page=page, choose=among(want, [True, True, False]))
        assert_same(mixed, want)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@every_kind
def test_drafts_do_not_depend_on_the_cut_nor_on_earlier_drafts(folder: Path, kind: str, params: SamplingParams) -> None:
    """A draft is a function of the tokens before it: rows that rejected drafts left are never seen."""
    want = run(folder, kind, params, drafts=3)
    made = [dict(r.drafts) for r in want]
    for r in made:
        assert all(len(drafts) == 3 for drafts in r.values())
    runs = [run(folder, kind, params, drafts=3, chunk=chunk, page=page) for chunk, page in ((1, 64), (36, 1), (64, 4))]
    for right in ([False], [True, False], [True, True, False]):
        seen: list[dict[int, tuple[int, ...]]] = [{} for _ in PROMPTS]

        def choose(
            name: str, first: int, drafts: Sequence[int], seen: Any = seen, right: Sequence[bool] = tuple(right)
        ) -> Sequence[int]:
            seen[int(name)][first] = tuple(drafts)
            return among(want, right)(name, first, drafts)

        run(folder, kind, params, drafts=3, choose=choose)
        for ours, theirs in zip(seen, made, strict=True):
            shared = {i for i in ours.keys() & theirs.keys() if i < OUTPUTS}
            assert len(shared) >= 4
            assert {i: ours[i] for i in shared} == {i: theirs[i] for i in shared}
    for other in runs:
        assert [r.drafts for r in other] == made


@pytest.mark.parametrize("kind", ["reference"], scope="module")
def test_drafts_end_where_positions_end(folder: Path, kind: str) -> None:
    """The last drafts that a sequence has room for need no row beyond its end."""
    length = len(PROMPTS[0]) + OUTPUTS
    params = SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
    want = run(folder, kind, params, drafts=0)[:1]
    [got] = drive(
        folder, PROMPTS[:1], params, drafts=3, chunk=64, max_model_len=length, choose=among(want, [True]),
        kernel_backend="reference",
    )  # fmt: skip
    assert got.token_ids[:OUTPUTS] == want[0].token_ids
    # The token before the drafts stands at this position; drafts come from rows on it and before the last position.
    position = {first: len(PROMPTS[0]) + first - 1 for first in got.drafts}
    expected = {first: min(3, max(1, length - (at - 1))) for first, at in position.items()}
    assert {first: len(made) for first, made in got.drafts.items()} == expected


def row(temperature: float, seed: int, output_index: int = 0) -> SampleInput:
    return SampleInput("a", SamplingParams(temperature=temperature, top_p=0.95), seed, output_index)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_walk_gives_the_plain_draws_and_ends_behind_the_first_wrong_draft(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        logits_RV = 3 * torch.randn(4, 11, generator=generator)
        plain = [sample(logits_RV[[i]], [row(temperature, seed, 5 + i)])[0] for i in range(4)]
        ids = [token.token_id for token in plain]
        for right in range(4):
            drafts = [*ids[:right], *((token + 1) % 11 for token in ids[right:3])]
            assert verify(logits_RV, row(temperature, seed, 5), drafts) == tuple(plain[: right + 1])


def test_only_logits_that_a_walk_reaches_can_fail_it() -> None:
    logits_RV = torch.zeros(3, 5)
    logits_RV[:, 2] = 1
    logits_RV[2] = float("nan")
    assert [t.token_id for t in verify(logits_RV, row(0, 0), [4, 2])] == [2]
    assert [t.token_id for t in verify(logits_RV, row(0, 0), [2, 4])] == [2, 2]
    # The walk ends before it, and the next step begins with it.
    assert [t.token_id for t in verify(logits_RV, row(0, 0), [2, 2])] == [2, 2]
    with pytest.raises(LogitsError, match="request a: the model's logits contain NaN"):
        verify(logits_RV[2:], row(0, 0, 2), [])


def test_verified_tokens_are_distributed_as_the_model_says_and_drafts_stay_with_their_probability() -> None:
    """Chi-square over fixed seeds, for a likely draft, an unlikely one and an impossible one."""
    logits_V = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    params = SamplingParams(temperature=1.0)
    _, weights = candidates(logits_V.double().numpy(), params)
    expected = weights / weights.sum()
    count = 4000
    for draft in (3, 2, 99):
        walks = [verify(logits_V.expand(2, -1), SampleInput("a", params, seed, 0), [draft]) for seed in range(count)]
        observed = np.bincount([walk[0].token_id for walk in walks], minlength=5)
        assert ((observed - count * expected) ** 2 / (count * expected)).sum() < 18.5, "p < 0.001 with 4 degrees"
        accepted = sum(len(walk) == 2 for walk in walks)
        chance = expected[draft] if draft < 5 else 0.0
        assert abs(accepted - count * chance) <= 4 * (count * chance * (1 - chance)) ** 0.5


def test_a_draft_from_the_models_own_distribution_is_always_right() -> None:
    generator = torch.Generator().manual_seed(1)
    for seed, temperature in itertools.product(range(50), (0.0, 0.7)):
        logits_V = torch.randn(50, generator=generator)
        given = row(temperature, seed, seed % 3)
        guess = draft_token(logits_V, given.params, seed, seed % 3)
        assert verify(logits_V.expand(2, -1), given, [guess])[0].token_id == guess


def test_broken_draft_logits_make_a_poor_draft_and_no_error() -> None:
    broken_V = torch.full((5,), float("nan"))
    assert draft_token(broken_V, SamplingParams(temperature=1.0, logprobs=2), 0, 0) == 0


def part(
    name: str, token_ids: list[int], *, samples: bool, num_drafts: int = 0, following: int = -1, start: int = 0
) -> StepRequest:
    pages = np.arange(1, 9)
    ids = np.array(token_ids)
    return StepRequest(name, start, ids.size, pages, ids, samples, num_drafts=num_drafts, next_token_id=following)


def planned(*parts: StepRequest) -> Any:
    limits = {"indexer_workspace_rows": 100, "max_logits_bytes": 400, "workspace_rows": 100}
    return plan_step(parts, page_size=PageSize(4), topk=None, **limits)


def test_every_row_meets_the_token_behind_it() -> None:
    plan = planned(
        part("drafts", [10, 11, 12], samples=True, num_drafts=2, start=5),
        part("broken", [20], samples=True, start=3),
        part("middle", [30, 31], samples=False, following=32),
        part("tail", [40, 41], samples=True, start=2),
    )
    for sampled, row_of_last in (([10], 0), ([11, 9], 1), ([11, 12, 9], 2)):
        got = {"drafts": tuple(map(SampledToken, sampled)), "tail": (SampledToken(42),)}
        behind = tokens_behind(plan, got).tolist()
        assert behind[row_of_last] == sampled[-1]
        assert behind[:row_of_last] == [11, 12][:row_of_last]
        assert behind[4:] == [31, 32, 41, 42]
    assert min(tokens_behind(plan, {})) >= 0, "rows without a token behind them still need an embedding"


def test_a_prompts_chunk_without_the_token_behind_it_is_refused() -> None:
    with pytest.raises(ValueError, match="request middle: next_token_id is missing"):
        tokens_behind(planned(part("middle", [30, 31], samples=False)), {})


@pytest.mark.parametrize(
    ("layers", "found"), [(0, "the model has no draft layer"), (2, "the model has 2 draft layers")]
)
def test_models_without_exactly_one_draft_layer_are_refused_before_any_work(
    tmp_path: Path, layers: int, found: str
) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", mtp=layers, num_hidden_layers=2)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ConfigError, match=rf"--speculative-config mtp: {found}.*num_nextn_predict_layers"):
        engine(tmp_path, **speculative(1))


def test_a_model_with_several_draft_layers_runs_without_speculation(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", mtp=2, num_hidden_layers=2)
    llm = engine(tmp_path)
    assert llm.engine.worker.layout.num_layers == 2
    edit_config(tmp_path, num_nextn_predict_layers=2)
    assert ModelConfig.from_folder(tmp_path).num_mtp_layers == 2


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3"])
def test_a_record_holds_the_draft_layer_only_with_speculation(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, mtp=1, num_hidden_layers=2)
    plain, drafting = engine(tmp_path), engine(tmp_path, **speculative(2))
    full = (0, 1) if family == "glm_moe_dsa" else ()
    assert (plain.engine.worker.layout.num_layers, plain.engine.worker.layout.full_layers) == (2, full)
    layout = drafting.engine.worker.layout
    assert (layout.num_layers, layout.full_layers) == (3, (*full, 2) if full else ())
    caches = drafting.engine.worker.decoder.caches
    assert (len(caches.latent), tuple(caches.index)) == (3, layout.full_layers)
    assert plain.engine._identity(tmp_path) != drafting.engine._identity(tmp_path)
