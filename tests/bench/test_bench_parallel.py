"""Layouts of ranks measured: real ranks on a small model, contexts that are filled in, figures that add up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import needs_native

from longfill.bench import parallel
from longfill.bench.checkpoints import preset_config, write_checkpoint
from longfill.bench.parallel import ParallelPlan, ParallelResult, Run, check_plan, run_layouts
from longfill.bench.parallel_fill import _fill, filled_engine
from longfill.bench.parallel_layout import parse_layouts
from longfill.bench.parallel_plot import draw_parallel
from longfill.bench.parallel_tables import markdown
from longfill.cache.layout import RecordLayout
from longfill.config import EngineArgs
from longfill.errors import CapacityError, ConfigError, LongfillError
from longfill.kernels.reference.quant import decode_latent
from longfill.models.config import ModelConfig
from longfill.partition import StepRequest, plan_step
from longfill.partition.mesh import MeshShape
from longfill.partition.slots import NO_SLOT
from longfill.partition.spread import Cut
from longfill.units import NumPages, PageSize
from longfill.worker.pool import LatentScales, allocate_pool, layer_caches

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_checkpoint(path, preset_config("toy", TINY))
    return path


def plan(folder: Path, layouts: str, **changes: Any) -> ParallelPlan:
    engine = EngineArgs(
        model=str(folder), memory_budget="1GiB", block_size=8, max_num_batched_tokens=64,
        distributed_timeout_seconds=60.0,
    )  # fmt: skip
    fields: dict[str, Any] = {"engine": engine, "layouts": parse_layouts(layouts), "lengths": (150,)}
    return ParallelPlan(**(fields | changes))


def run(planned: ParallelPlan) -> dict[str, ParallelResult]:
    check_plan(planned, ModelConfig.from_folder(planned.engine.model))
    return {result.layout.name: result for result in run_layouts(planned, lambda *_: None, lambda: None)}


@needs_native
def test_a_prefill_is_run_on_real_ranks_and_its_exchanges_are_shown(folder):
    one, pcp, tp = (result.to_json() for result in run(plan(folder, "1,pcp2,tp2")).values())
    for found in (one, pcp, tp):
        assert (found["length"], found["filled"], found["steps"], len(found["runs"])) == (150, 0, 3, 1)
        assert found["seconds"] == min(found["runs"])
        assert found["tokens_per_s"] == 150 / found["seconds"]
        assert found["ratio"] == one["seconds"] / found["seconds"]
        assert found["stage_seconds"]["step"] <= found["seconds"]
        # Two layers that score, and rows that have more keys than top-k; so few of them are not shared out over TP.
        times = 2 if found is tp else 1
        assert sum(found["rank_scored_pairs"]) == times * 2 * sum(range(17, 151))
    assert (one["comm"], one["wait_seconds"], one["same_bits"]) == ({}, 0.0, None)
    assert (pcp["same_bits"], pcp["same_tokens"]) == (True, True)
    assert (one["ranks"], pcp["ranks"], len(pcp["rank_scored_pairs"])) == (1, 2, 2)
    assert set(pcp["comm"]) == {"new_keys", "hidden"}
    assert {"attention_out", "query_latents"} < set(tp["comm"])
    assert tp["wait_seconds"] > 0


@needs_native
@pytest.mark.parametrize("decoded", [0, 3])
def test_all_layouts_go_on_from_the_same_filled_context(folder, decoded):
    """Where the bits may not depend on the ranks, they do not: so each has filled its part of the same records."""
    layouts = "1,1-det,pcp2,tp2dcp2-det" if decoded else "1,1-det,1-det-i4,tp2dcp2-det-i4"
    measured = 1 if decoded else 30
    results = run(plan(folder, layouts, lengths=(144 + measured,), measured=measured, decoded=decoded))
    assert all(result.filled == 144 for result in results.values())
    ranks = [result.same_bits for result in results.values() if result.layout.ranks > 1]
    assert ranks == [True, True] if decoded else [True]
    assert results["1-det"].deterministic_cost == results["1-det"].best.seconds / results["1"].best.seconds
    steps = {result.best.steps for result in results.values()}
    assert steps == {3 if decoded else 1}
    assert all(len(result.best.token_ids) == 1 + decoded for result in results.values())


@needs_native
def test_a_filled_context_is_a_prefix_hit_and_nothing_of_it_is_computed(folder):
    planned = plan(folder, "1", lengths=(104,), measured=40)
    results = run(planned)
    computed = sum(range(65, 105))
    assert sum(results["1"].best.rank_scored_pairs) == 2 * computed
    other = run(dataclasses.replace(planned, engine=dataclasses.replace(planned.engine, seed=1)))
    assert other["1"].best.digest != results["1"].best.digest


def test_a_pool_that_is_too_small_for_the_context_is_an_error(folder):
    planned = plan(folder, "1", lengths=(104,), measured=40)
    args = dataclasses.replace(planned.engine_args(planned.layouts[0], 104), num_gpu_blocks_override=15)
    engine = filled_engine(args, np.ones(64, dtype=np.int64), 0)
    assert engine.cache.num_cached_pages == 8
    engine.close()
    with pytest.raises(
        CapacityError, match=r"14 pages of 8 tokens, too few for a context of 120; raise --memory-budget"
    ):
        filled_engine(args, np.ones(120, dtype=np.int64), 0)


def test_a_context_that_was_evicted_gives_no_figures(folder):
    planned = plan(folder, "1", lengths=(104,), measured=40)
    # The warm-up needs 14 pages of the 16, so that of the context's 8 only a part stays.
    engine = dataclasses.replace(planned.engine, num_gpu_blocks_override=17)
    with pytest.raises(LongfillError, match=r"of 64 tokens that were filled in \d+ were found; raise --memory-budget"):
        run(dataclasses.replace(planned, engine=engine))


FORMATS = (("float32", "float32"), ("bfloat16", "fp8"), ("fp8", "fp8"), ("fp8_ds_mla", "fp8"))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 4), (4, 8)])
def test_every_rank_fills_its_share_where_a_plan_would_store_it(formats, ranks, interleave):
    layout = RecordLayout(
        page_size=PageSize(8), num_layers=2, full_layers=(1,), latent_format=formats[0], index_format=formats[1],
        kv_lora_rank=12, rope_dim=4, index_head_dim=8,
    )  # fmt: skip
    tokens = 8 * ranks * 5
    whole = filled_records(layout, MeshShape(), 0, 1, tokens)
    assert len(whole) == tokens
    held: dict[int, Any] = {}
    for rank in range(ranks):
        held |= filled_records(layout, MeshShape(tp=ranks, dcp=ranks), rank, interleave, tokens)
    assert sorted(held) == list(range(tokens))
    for position, record in whole.items():
        assert all(torch.equal(a, b) for a, b in zip(record, held[position], strict=True))
    rows = torch.stack([record[0] for record in whole.values()])
    values = decode_latent(rows, formats[0], 12, 4, 2.0**-6, 2.0**-6)
    assert 0.8 < float(values.std()) < 1.2
    assert len({record[0].numpy().tobytes() for record in whole.values()}) == tokens


def filled_records(
    layout: RecordLayout, shape: MeshShape, rank: int, interleave: int, tokens: int
) -> dict[int, tuple[torch.Tensor, ...]]:
    """What a rank of that shape has in its pool, by position, read where a step's plan would have written it."""
    num_pages = tokens // (8 * shape.dcp)
    pool = allocate_pool(layout, NumPages(num_pages + 1))
    caches = layer_caches(pool, layout, (LatentScales(2.0**-6, 2.0**-6),) * 2)
    args = SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    mesh = SimpleNamespace(shape=shape, dcp=SimpleNamespace(rank=shape.group("dcp", rank).index(rank)))
    _fill(SimpleNamespace(mesh=mesh, args=args, layout=layout, decoder=SimpleNamespace(caches=caches)), tokens, 3)  # type: ignore[arg-type]
    ids = np.zeros(tokens, dtype=np.int64)
    planned = plan_step(
        [StepRequest("filled", 0, tokens, np.arange(1, num_pages + 1), ids, samples=False)],
        page_size=PageSize(8), topk=4, indexer_workspace_rows=10**6, max_logits_bytes=10**9, workspace_rows=10**6,
        cut=Cut(shape, rank, interleave=interleave),
    )  # fmt: skip
    records = {}
    for position, slot in enumerate(planned.slots.tolist()):
        if slot != NO_SLOT:
            page, row = divmod(slot, 8)
            index = caches.index[1]
            parts = [cache.rows_NBX[page, row].clone() for cache in caches.latent]
            parts.append(index.values_NBX[page, row].clone())
            if index.scales_NB is not None:
                parts.append(index.scales_NB[page, row].clone())
            records[position] = tuple(parts)
    return records


@pytest.mark.parametrize(
    ("layouts", "changes", "why"),
    [
        ("1", {"lengths": (1_048_576,)}, "1,048,576 tokens and 1 behind it are more than the model's 1,048,576"),
        ("1", {"lengths": (32, 64), "measured": 40}, "of 32 tokens 40 cannot be measured"),
        ("1,tp2dcp2", {"lengths": (104,), "measured": 32}, "tp2dcp2: a context of 72 tokens .* which hold 16"),
        ("1,tp8", {}, "--tensor-parallel-size 8: the model has 4 heads"),
        ("1,tp2dcp2-ag_rs-det", {}, "--dcp-comm-backend ag_rs and --deterministic exclude each other"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(folder, layouts, changes, why):
    with pytest.raises(ConfigError, match=why):
        run(plan(folder, layouts, **changes))


def canned(seconds: float, digest: str = "a", **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "seconds": seconds, "steps": 2, "stage_seconds": {"index": 0.5, "mlp": 0.25, "step": 1.0, "compute": 0.9},
        "comm": {}, "rank_scored_pairs": (100, 50), "token_ids": (7,), "digest": digest,
    }  # fmt: skip
    return Run(**(fields | changes))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Run]]:
    """What each layout's runs give, one after the other, instead of being made."""
    runs: dict[str, list[Run]] = {}
    monkeypatch.setattr(parallel, "_measure", lambda _plan, layout, *_: runs[layout.name].pop(0))
    return runs


def test_the_fastest_run_counts_and_is_held_against_one_rank_and_its_own_plain_form(folder, measured):
    measured |= {
        "1": [canned(8.0), canned(6.0)],
        "tp2": [canned(3.0, "b"), canned(4.0, "b")],
        "1-det": [canned(9.0, "d"), canned(10.0, "d")],
        "tp2-det": [canned(6.0, "d"), canned(4.5, "d")],
    }
    found = run(plan(folder, "1,tp2,1-det,tp2-det", repeats=2))
    assert {name: result.ratio for name, result in found.items()} == {
        "1": 1.0, "tp2": 2.0, "1-det": 6 / 9, "tp2-det": 6 / 4.5
    }  # fmt: skip
    assert (found["1-det"].deterministic_cost, found["tp2-det"].deterministic_cost) == (1.5, 1.5)
    assert found["tp2"].deterministic_cost is None
    assert (found["tp2"].same_bits, found["tp2"].same_tokens) == (False, True)
    assert (found["tp2-det"].same_bits, found["1-det"].same_bits, found["1"].same_bits) == (True, None, None)


def test_every_repeat_goes_through_all_layouts_length_by_length(folder, measured):
    measured |= {name: [canned(1.0) for _ in range(4)] for name in ("1", "pcp2")}
    seen: list[tuple[str, int]] = []
    planned = plan(folder, "1,pcp2", lengths=(64, 150), repeats=2)
    results = list(run_layouts(planned, lambda layout, length, _run: seen.append((layout.name, length)), lambda: None))
    assert seen == [("1", 64), ("pcp2", 64)] * 2 + [("1", 150), ("pcp2", 150)] * 2
    assert [len(result.runs) for result in results] == [2] * 4


def test_without_one_rank_there_is_nothing_to_hold_against(folder, measured):
    measured |= {"tp2": [canned(3.0)], "pcp2": [canned(2.0)]}
    found = run(plan(folder, "tp2,pcp2"))
    assert {(result.ratio, result.same_bits) for result in found.values()} == {(None, None)}


def test_one_run_of_other_bits_is_enough_to_say_so(folder, measured):
    measured |= {"1": [canned(1.0), canned(1.0)], "pcp2": [canned(1.0), canned(0.5, "b", token_ids=(8,))]}
    found = run(plan(folder, "1,pcp2", repeats=2))["pcp2"]
    assert (found.same_bits, found.same_tokens) == (False, False)


def values(kind: str = "prefill", tokens_measured: int | None = None) -> dict[str, Any]:
    """What the command prints, with invented figures."""
    plain = {
        "layout": "1", "ranks": 1, "length": 4096, "filled": 0, "decoded": 0, "steps": 4, "seconds": 2.0,
        "runs": [2.0, 2.5], "tokens_per_s": 2048.0, "ratio": 1.0, "paired_ratio": 1.0, "deterministic_cost": None,
        "stage_seconds": {"index": 1.0, "step": 2.0, "compute": 1.9}, "wait_seconds": 0.0, "comm": {},
        "rank_scored_pairs": [1000], "same_tokens": None, "same_bits": None,
    }  # fmt: skip
    split = plain | {
        "layout": "pcp2-contiguous", "ranks": 2, "seconds": 1.25, "ratio": 1.6, "paired_ratio": 1.5,
        "wait_seconds": 0.5,
        "stage_seconds": {"index": 0.75, "wait": 0.5, "step": 1.25}, "comm": {"hidden": 500, "new_keys": 4_000_000},
        "rank_scored_pairs": [400, 600], "same_tokens": True, "same_bits": True,
    }  # fmt: skip
    summed = split | {"layout": "tp2-det", "deterministic_cost": 1.5, "same_bits": False}
    made = {
        "machine": {"processor": "Test 1", "cores": 2, "memory_bytes": 2**34, "torch": "2", "longfill": "0"},
        "load_average": 0.25, "model": "needle", "threads": 1, "repeats": 2, "parallel": kind,
        "machine_scaling": {
            "threads": 2, "math": 1.9, "read": 1.8, "all_math": [1.8, 2.0], "one_thread_flops_per_s": [1e11, 2e11],
        },
        "results": [plain, split, summed],
    }  # fmt: skip
    if kind == "prefill":
        return made | {"tokens_measured": tokens_measured, "chunk": 1024}
    return made | {"context": 4095, "decoded": 4}


def tables(text: str) -> list[list[dict[str, str]]]:
    """Rows of each table by column."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in block] for block in blocks]
    return [[dict(zip(head, row, strict=True)) for row in rows] for head, _, *rows in cells]


def test_the_report_of_a_prefill_says_what_was_waited_for_sent_and_how_evenly_it_was_shared():
    text = markdown(values())
    figures, stages = tables(text)
    assert figures[1] == {
        "layout": "`pcp2-contiguous`", "tokens": "4,096", "ranks": "2", "seconds": "1.25", "tokens/s": "2,048",
        "times one rank": "1.60", "by repeat": "1.50", "det over plain": "-", "waited, s": "0.50", "sent, MB": "4.0",
        "pairs, most over least": "1.5000", "bits of one rank": "same",
    }  # fmt: skip
    assert (figures[0]["bits of one rank"], figures[2]["bits of one rank"]) == ("-", "same tokens")
    assert figures[2]["det over plain"] == "1.50"
    assert stages[1] == {"layout": "`pcp2-contiguous`", "tokens": "4,096", "index": "0.75", "wait": "0.50"}
    assert "- `pcp2-contiguous`, 4,096 tokens, 4 steps: new_keys 4,000,000, hidden 500" in text
    assert "Load average before: 0.25." in text
    assert "2 threads of this machine do 1.90 times the multiply-adds of one (1.80 to 2.00)" in text
    assert "steps of 1,024 tokens, computed whole. Fastest of 2 runs; by repeat" in text


def test_what_is_not_computed_is_said():
    text = markdown(values(tokens_measured=64))
    assert "**Only the last 64 tokens are computed and timed**; those before them are filled in." in text
    text = markdown(values("decode"))
    assert "4 tokens behind a context of 4,095 that is filled in, not computed" in text
    figures, stages = tables(text)
    assert (figures[1]["a token, ms"], figures[1]["waited, ms"], figures[1]["sent, KB"]) == (
        "1,250.00",
        "125.00",
        "1,000.1",
    )
    assert stages[1] == {"layout": "`pcp2-contiguous`", "index": "187.50", "wait": "125.00"}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_picture_is_drawn_for_light_and_dark_pages(tmp_path, kind):
    light, dark = draw_parallel(values(kind), tmp_path / "parallel.png")
    assert (light.name, dark.name) == ("parallel.png", "parallel-dark.png")
    assert light.read_bytes()[:4] == b"\x89PNG"
    assert light.read_bytes() != dark.read_bytes()
