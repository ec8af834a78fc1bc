"""Names of layouts: what each stands for, and what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest

from longfill.bench.parallel_layout import parse_layout, parse_layouts
from longfill.config import EngineArgs
from longfill.errors import ConfigError

TP, PCP, DCP = "tensor_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"

KNOWN: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1-det": (1, {"deterministic": True}),
    "tp2": (2, {TP: 2}),
    "tp16": (16, {TP: 16}),
    "pcp3": (3, {PCP: 3}),
    "pcp2-interleave": (2, {PCP: 2, "pcp_split": "interleave"}),
    "pcp2-zigzag": (2, {PCP: 2, "pcp_split": "zigzag"}),
    "tp2dcp2": (2, {TP: 2, DCP: 2}),
    "tp2dcp2-ag_rs-i64": (2, {TP: 2, DCP: 2, "dcp_comm_backend": "ag_rs", "cp_kv_cache_interleave_size": 64}),
    "tp2dcp2-det": (2, {TP: 2, DCP: 2, "deterministic": True}),
    "pcp2dcp2-contiguous": (2, {PCP: 2, DCP: 2, "pcp_split": "contiguous"}),
    "tp2pcp2dcp4": (4, {TP: 2, PCP: 2, DCP: 4}),
    "tp2ep": (2, {TP: 2, "enable_expert_parallel": True}),
    "pcp2ep-low_latency": (2, {PCP: 2, "enable_expert_parallel": True, "all2all_backend": "low_latency"}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_says_how_its_engine_differs_from_one_rank(name):
    ranks, knobs = KNOWN[name]
    layout = parse_layout(name)
    args = layout.engine(EngineArgs(num_threads=1))
    assert (layout.name, layout.ranks, layout.knobs) == (name, ranks, knobs)
    assert args == EngineArgs(num_threads=1, **knobs)
    assert args.num_ranks == ranks
    assert (layout.page_factor, layout.deterministic) == (knobs.get(DCP, 1), "deterministic" in knobs)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "'' is no layout; write 1, or tpN"),
        ("2", "'2' is no layout"),
        ("tp1", "'tp1' is no layout"),
        ("tp", "'tp' is no layout"),
        ("dp2", "'dp2' is no layout"),
        ("pcp2tp2", "'pcp2tp2' is no layout; .* in this order"),
        ("ep2", "'ep2' is no layout; .*tp2ep"),
        ("-det", "'-det' is no layout"),
        ("ep", "ep spreads experts over the ranks of tp and pcp; write tp2ep or pcp2ep"),
        ("tp2-fast", "-fast is no option"),
        ("tp2-i0", "-i0 is no option"),
        ("tp2-zigzag", "-zigzag means nothing without pcp"),
        ("tp2-ag_rs", "-ag_rs means nothing without dcp"),
        ("tp2-low_latency", "-low_latency means nothing without ep"),
        ("pcp2-zigzag-interleave", "-interleave is a second value"),
        ("tp2-det-det", "-det is a second value"),
        ("dcp2", "dcp2: --decode-context-parallel-size 2: .*--tensor-parallel-size, which is 1"),
        ("tp2pcp2dcp3", "must be 1, 2 or 4"),
        ("tp3-det", "--deterministic adds up 8 slices"),
        ("tp2-i64", "--cp-kv-cache-interleave-size 64 means nothing without --decode-context-parallel-size"),
        ("tp2dcp2-i48", "must divide --block-size"),
    ],
)
def test_a_name_that_is_no_layout_is_refused_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=f"--layouts: .*{why}"):
        parse_layout(name)


def test_lists_keep_their_order_and_name_each_layout_once():
    assert [layout.name for layout in parse_layouts(" tp2, 1 ,tp2,pcp2")] == ["tp2", "1", "pcp2"]
    with pytest.raises(ConfigError, match="'' is no layout"):
        parse_layouts("1,,tp2")


def test_interleave_is_checked_against_the_page_that_the_engine_has():
    with pytest.raises(ConfigError, match=r"--layouts: tp2dcp2-i16: .*--block-size 8"):
        parse_layout("tp2dcp2-i16").engine(EngineArgs(block_size=8))


def test_deterministic_layouts_are_compared_with_what_adds_up_alike():
    for name, plain, one in (
        ("tp2dcp2-det-i4", "tp2dcp2-i4", "1-det-i4"), ("tp2-det", "tp2", "1-det"), ("1-det-i4", "1", "1-det-i4"),
    ):  # fmt: skip
        layout = parse_layout(name)
        assert layout.plain_knobs == parse_layout(plain).knobs
        assert layout.one_rank_knobs == parse_layout(one).knobs
    assert parse_layout("tp2dcp2-i4").one_rank_knobs == {}
