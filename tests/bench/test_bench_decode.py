"""Decoding in several settings: equal outputs or no result, figures that add up, a report that names the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.worker.drafts import choose_drafts

from longfill.bench import decode
from longfill.bench.checkpoints import preset_config, write_checkpoint
from longfill.bench.decode import DecodePlan, DecodeResult, OutputsDifferError, Setting, run_decodes
from longfill.bench.decode_plot import draw_decode
from longfill.bench.decode_texts import DESCRIPTIONS, prompts
from longfill.bench.tables import markdown
from longfill.config import EngineArgs
from longfill.engine.engine import LLMEngine
from longfill.engine.stats import SpecDecodingStats
from longfill.errors import ConfigError, LongfillError
from longfill.models.config import ModelConfig
from longfill.models.hub import resolve_model

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_topk": 16,
    "index_n_heads": 16,
}
DRAFTED = TINY | {"num_nextn_predict_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "drafted"
    write_checkpoint(path, preset_config("toy", DRAFTED))
    return path


def plan(folder: Path, *settings: tuple[int, int], **changes: Any) -> DecodePlan:
    engine = EngineArgs(model=str(folder), memory_budget="2GiB", skip_tokenizer_init=True, num_threads=1, block_size=8)
    fields: dict[str, Any] = {
        "engine": engine, "text": "random", "context": 20, "count": 2, "rounds": 1, "repeats": 1, "max_tokens": 9,
        "temperature": 0.0,
    }  # fmt: skip
    return DecodePlan(settings=tuple(Setting(*each) for each in settings), **(fields | changes))


def run(planned: DecodePlan) -> list[DecodeResult]:
    return run_decodes(planned, lambda _setting, _rate: None)


def test_every_setting_is_measured_from_the_moment_when_all_prompts_have_a_token(folder):
    seen: list[tuple[str, bool]] = []
    planned = plan(folder, (1, 0), (2, 0), (1, 2), rounds=2, repeats=2)
    results = run_decodes(planned, lambda setting, rate: seen.append((str(setting), rate > 0)))
    names = ["1 in flight with 0 drafts", "2 in flight with 0 drafts", "1 in flight with 2 drafts"]
    assert seen == [(name, True) for name in [*names, *names]]
    assert [(result.depth, result.drafts) for result in results] == [(1, 0), (2, 0), (1, 2)]
    plain = results[0]
    assert (plain.steps, plain.tokens) == (2 * 8, 2 * 2 * 8)
    assert plain.spec == SpecDecodingStats()
    for result in results:
        values = result.to_json()
        each = values["per_step"]
        assert values["tokens_per_s"] == result.tokens / result.seconds
        assert result.ratio == result.rate / plain.rate
        assert each["host"] == pytest.approx(sum(each["stages"][name] for name in ("schedule", "update", "plan")))
        assert min(each["compute"], each["step"]) > 0
        assert 0 <= each["hidden"] <= 1
    assert results[2].spec.num_drafts > 0
    assert len(results[2].spec.num_accepted_tokens_per_pos) == 2


def test_drafts_that_are_right_need_fewer_steps_and_show_it_by_position(folder, monkeypatch):
    said: dict[str, Sequence[int]] = {}
    generate = decode._generate

    def remember(engine: LLMEngine, *rest: Any) -> Any:
        outputs = generate(engine, *rest)
        said.update({output.request_id: output.outputs[0].token_ids for output in outputs})
        return outputs

    monkeypatch.setattr(decode, "_generate", remember)
    plain = run(plan(folder, (1, 0)))[0]
    truth = dict(said)

    def half_right(name: str, first: int, made: Sequence[int]) -> list[int]:
        """The first draft is right, the second never."""
        known = [*truth[name], *[0] * 8][first : first + len(made)]
        return [token if place == 0 else (token + 1) % 128 for place, token in enumerate(known)]

    def rigged(args: EngineArgs) -> LLMEngine:
        engine = LLMEngine(args)
        choose_drafts(engine.worker, half_right)
        return engine

    monkeypatch.setattr(decode, "LLMEngine", rigged)
    for depth in (1, 2, 3):
        drafted = run(plan(folder, (depth, 2)))[0]
        assert drafted.steps < plain.steps
        assert drafted.spec.acceptance_per_position[1:] == [0.0]
        assert drafted.to_json()["acceptance"]["per_position"][0] == pytest.approx(1.0, abs=0.15)
        assert drafted.ratio is None


def test_temperature_and_seed_reach_the_sampler(folder):
    assert plan(folder, (1, 0), temperature=0.5).params(3).temperature == 0.5
    assert [plan(folder, (1, 0)).params(i).seed for i in (0, 3)] == [0, 3]
    assert plan(folder, (1, 0)).params(0).ignore_eos
    assert not plan(folder, (1, 0), text="answers").params(0).ignore_eos
    run(plan(folder, (1, 0), (3, 0), (2, 1), temperature=1.0))


def canned(outputs: list[list[int]], seconds: float, tokens: int = 8) -> Any:
    stages = dict.fromkeys(("schedule", "update", "plan", "idle"), 0.1) | {"compute": 0.7, "step": 0.9}
    return decode._Run(outputs, 4, tokens, seconds, stages, SpecDecodingStats())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What each engine says, one after the other, instead of being made."""
    runs: list[list[Any]] = []
    monkeypatch.setattr(decode, "_measure", lambda _plan, _setting: runs.pop(0))
    return runs


def test_the_fastest_run_of_each_round_counts(folder, measured):
    measured += [
        [canned([[1]], 2.0), canned([[2]], 1.0)],
        [canned([[1]], 1.0), canned([[2]], 4.0)],
        [canned([[1]], 1.0), canned([[2]], 3.0)],
        [canned([[1]], 0.5), canned([[2]], 0.5)],
    ]
    plain, ahead = run(plan(folder, (1, 0), (2, 0), repeats=2, rounds=2))
    assert (plain.seconds, plain.tokens, plain.steps) == (2.0, 16, 8)
    assert (ahead.seconds, ahead.ratio) == (1.0, 2.0)
    each = plain.to_json()["per_step"]
    # Of 0.3 s host and 0.6 s model 0.9 s passed: nothing was done at the same time.
    assert [each[name] for name in ("host", "compute", "step", "idle")] == pytest.approx([0.075, 0.15, 0.225, 0.025])
    assert each["hidden"] == pytest.approx(0.0)


def test_what_host_and_model_have_more_than_the_step_was_hidden(folder, measured):
    measured.append(
        [dataclasses.replace(canned([[1]], 1.0), stage_seconds=canned([], 1.0).stage_seconds | {"step": 0.75})]
    )
    assert run(plan(folder, (2, 0)))[0].to_json()["per_step"]["hidden"] == pytest.approx(0.5)


@pytest.mark.parametrize(("other", "at"), [([5, 6, 8], 2), ([5, 6], 2), ([5, 6, 7, 8], 3), ([4, 6, 7], 0)])
def test_settings_that_say_other_tokens_get_no_figures(folder, measured, other, at):
    measured += [[canned([[1], [5, 6, 7]], 1.0)], [canned([[1], other], 1.0)]]
    with pytest.raises(OutputsDifferError, match=rf"prompt 1: 2 in flight with 1 drafts .* from output {at} on"):
        run(plan(folder, (1, 0), (2, 1)))


def test_a_setting_that_contradicts_itself_gets_no_figures_either(folder, measured):
    measured += [[canned([[1]], 1.0)], [canned([[2]], 1.0)]]
    with pytest.raises(OutputsDifferError):
        run(plan(folder, (1, 0), repeats=2))


def test_outputs_that_end_at_once_leave_nothing_to_time(folder):
    with pytest.raises(ConfigError, match="ask for longer ones"):
        run(plan(folder, (1, 0), max_tokens=1))


def test_a_prompt_that_fails_is_not_measured(folder, monkeypatch):
    def broken(args: EngineArgs) -> LLMEngine:
        engine = LLMEngine(args)
        logits = engine.worker.decoder.logits
        engine.worker.decoder.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(decode, "LLMEngine", broken)
    with pytest.raises(LongfillError, match=r"prompt 0 failed: .*NaN"):
        run(plan(folder, (1, 0)))


@pytest.fixture(scope="module")
def make() -> Callable[..., list[list[Any]]]:
    from longfill.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_model("needle", None))

    def build(text: str, **changes: Any) -> list[list[Any]]:
        sizes = {"context": 1024, "count": 3, "rounds": 2, "seed": 4}
        return prompts(text, tokenizer, 512, **(sizes | changes))  # type: ignore[arg-type]

    return build


@pytest.mark.parametrize("text", ["answers", "haystack", "random"])
def test_prompts_have_the_length_and_differ(make, text):
    turns = make(text)
    assert [[ids.size for ids in turn] for turn in turns] == [[1024] * 3] * 2
    assert len({ids.tobytes() for turn in turns for ids in turn}) == 6
    assert all(np.array_equal(a, b) for a, b in zip(turns[1], make(text)[1], strict=True))


def test_questions_of_a_round_share_their_text(make):
    for first, second, third in make("answers"):
        assert np.array_equal(first[:900], second[:900])
        assert np.array_equal(first[:900], third[:900])
    assert not np.array_equal(make("answers")[0][0][:100], make("answers")[1][0][:100])


def test_prompts_that_cannot_be_made_are_a_mistake(make):
    with pytest.raises(ConfigError, match="--prompts 9: a text of 1,024 tokens has 8 facts"):
        make("answers", count=9)
    with pytest.raises(ConfigError, match="--context 30"):
        make("answers", context=30)
    with pytest.raises(ConfigError, match="--text haystack: the model has no tokenizer"):
        prompts("haystack", None, 512, context=64, count=1, rounds=1, seed=0)


def values(text: str = "haystack") -> dict[str, Any]:
    """What the command prints, with invented figures."""
    acceptance = {"drafts": 9, "rate": 0.6, "mean_length": 2.2, "per_position": [0.75, 0.5]}
    none = {"drafts": 0, "rate": None, "mean_length": None, "per_position": []}
    each = {"host": 5e-4, "compute": 2e-3, "idle": 1e-4, "step": 2.25e-3, "hidden": 0.5}
    plain = {
        "depth": 1, "drafts": 0, "steps": 1200, "tokens": 4800, "seconds": 2.0, "tokens_per_s": 2400.0, "ratio": 1.0,
        "per_step": each | {"hidden": 0.0}, "acceptance": none,
    }  # fmt: skip
    drafted = plain | {"depth": 2, "drafts": 2, "ratio": 1.875, "per_step": each, "acceptance": acceptance}
    return {
        "machine": {"processor": "Test 1", "cores": 2, "memory_bytes": 2**34, "torch": "2", "longfill": "0"},
        "model": "needle", "threads": 1, "text": text, "description": DESCRIPTIONS[text], "context": 4096, "prompts": 4,
        "rounds": 2, "repeats": 3, "max_tokens": 128, "temperature": 0.0, "decodes": [plain, drafted],
    }  # fmt: skip


def test_spec_02_the_report_shows_acceptance_by_position_and_says_whether_the_text_was_random_tokens():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(values()).splitlines() if "|" in line]
    head, _, plain, drafted = rows
    assert dict(zip(head, plain, strict=True)) == {
        "in flight": "1", "drafts": "0", "steps": "1,200", "tokens": "4,800", "tokens/s": "2,400", "ratio": "1.00",
        "step, ms": "2.25", "model, ms": "2.00", "host, ms": "0.50", "hidden": "0%", "idle, ms": "0.10",
        "tokens a draft step": "-", "accepted by position": "-",
    }  # fmt: skip
    shown = dict(zip(head, drafted, strict=True))
    assert (shown["accepted by position"], shown["tokens a draft step"]) == ("0.75 0.50", "2.20")
    assert (shown["hidden"], shown["ratio"]) == ("50%", "1.88")
    assert "random tokens" not in markdown(values())
    assert "Text: haystack text, continued." in markdown(values())
    assert "Text: random tokens, continued: how often drafts are right on them says nothing" in markdown(
        values("random")
    )


@pytest.mark.parametrize("drafting", [True, False])
def test_a_picture_is_drawn_with_and_without_drafts(tmp_path, drafting):
    drawn = values()
    drawn["decodes"] = drawn["decodes"] if drafting else drawn["decodes"][:1]
    light, dark = draw_decode(drawn, tmp_path / "decode.png")
    assert (light.name, dark.name) == ("decode.png", "decode-dark.png")
    assert light.read_bytes()[:4] == b"\x89PNG"
    assert light.read_bytes() != dark.read_bytes()


def test_a_preset_with_a_draft_layer_has_the_same_model_without(folder, tmp_path):
    write_checkpoint(tmp_path, preset_config("toy", TINY))
    plain, drafted = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(tensor.equal(drafted[name]) for name, tensor in plain.items())
    extra = drafted.keys() - plain.keys()
    assert all(name.startswith("model.layers.2.") for name in extra)
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.self_attn.indexer.wk.weight"} < extra
    assert ModelConfig.from_folder(folder, None).num_mtp_layers == 1
