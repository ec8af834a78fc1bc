"""The balance of splits: counts of the plans, and the gains that they allow."""

from __future__ import annotations

import numpy as np
import pytest

from longfill.bench.parallel_balance import Balance, balance
from longfill.bench.parallel_plot import draw_parallel
from longfill.bench.parallel_tables import markdown
from longfill.config import choices_of

SPLITS = choices_of("pcp_split")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("length", "chunk", "topk"), [(1000, 256, 64), (513, 512, 1), (100, 4096, 200)])
def test_all_ranks_together_score_what_one_rank_scores(split, length, chunk, topk):
    found = balance(length, ranks=3, split=split, chunk=chunk, topk=topk)
    keys = np.arange(1, length + 1)
    assert sum(found.rank_pairs) == int(keys[keys > topk].sum())
    assert len(found.chunks) == -(-length // chunk)
    assert all(1 <= gain <= 3 for gain in (*found.speedups, found.overall) if sum(found.rank_pairs))


def test_pairs_of_a_rank_are_within_one_percent_for_zigzag_over_128k():
    for ranks in (2, 4):
        pairs = balance(131_072, ranks=ranks, split="zigzag", chunk=4096, topk=2048).rank_pairs
        assert max(pairs) / min(pairs) < 1.01
        assert balance(131_072, ranks=ranks, split="zigzag", chunk=4096, topk=2048).overall > 0.99 * ranks


def test_contiguous_pieces_gain_little_in_the_first_step_and_almost_all_over_a_million_tokens():
    found = balance(1_048_576, ranks=4, split="contiguous", chunk=16_384, topk=1)
    assert found.speedups[0] == pytest.approx(2.29, abs=0.01)
    assert found.overall == pytest.approx(3.95, abs=0.005)


def test_a_step_is_as_slow_as_the_rank_that_has_most():
    found = Balance("zigzag", ((6, 2), (4, 4), (0, 0)))
    assert found.rank_pairs == (10, 6)
    assert found.speedups == (8 / 6, 2.0, 2.0)
    assert found.overall == 16 / 10
    assert found.to_json()["most_over_least"] == 10 / 6


def values() -> dict:
    results = [
        balance(8192, ranks=ranks, split=split, chunk=1024, topk=64).to_json() for ranks in (2, 4) for split in SPLITS
    ]
    return {"parallel": "balance", "length": 8192, "chunk": 1024, "topk": 64, "results": results}


def test_the_report_has_a_row_for_each_split_and_number_of_ranks(tmp_path):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(values()).splitlines() if "|" in line]
    head, _, *found = rows
    assert head[:2] == ["split", "ranks"]
    assert [tuple(row[:2]) for row in found] == [(split, ranks) for ranks in ("2", "4") for split in SPLITS]
    assert [len(row[2].split()) for row in found] == [2, 2, 2, 4, 4, 4]
    light, dark = draw_parallel(values(), tmp_path / "balance.png")
    assert light.read_bytes()[:4] == b"\x89PNG"
    assert light.read_bytes() != dark.read_bytes()
