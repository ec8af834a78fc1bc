"""Progress: the ledger's two numbers, speed, time left from pairs, pages and memory; plain lines without a terminal."""

from __future__ import annotations

import io

import pytest
from fake_engine import step_stats
from rich.console import Console

from longfill.cli.console import duration, size
from longfill.cli.eta import TimeLeft, causal_pairs
from longfill.cli.progress import ProgressView
from longfill.engine.stats import StepStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_view(*, terminal: bool) -> tuple[ProgressView, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, _environ={"TERM": "xterm"})
    return ProgressView(console, memory_budget=2**30, clock=clock), out, clock


def step(computed: int, tokens: int, total: int = 10_000, **changes: object) -> StepStats:
    return step_stats(num_tokens=tokens, progress={"0": (computed, total)}, pages_used=12, pages_total=345, **changes)


def test_without_a_terminal_plain_lines_come_every_few_seconds_and_at_the_end():
    view, out, clock = make_view(terminal=False)
    with view:
        for number in range(1, 11):
            clock.now += 1.0
            view.on_step(step(1000 * number, 1000, rss_bytes=2**29))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "5,000 / 10,000 tokens (50.0%)" in lines[0]
    assert "1,000 tokens/s" in lines[0]
    assert "KV pages 12 of 345" in lines[0]
    assert "(peak 12)" in lines[0]
    assert "memory 512.0 MiB of 1.0 GiB" in lines[0]
    assert "10,000 / 10,000 tokens (100.0%)" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_a_run_without_a_step_prints_nothing():
    view, out, _ = make_view(terminal=False)
    with view:
        pass
    assert out.getvalue() == ""


def test_a_terminal_shows_a_bar_for_each_prompt():
    view, out, clock = make_view(terminal=True)
    with view:
        clock.now += 1.0
        view.on_step(step_stats(num_tokens=900, progress={"0": (600, 1000), "1": (300, 1000)}, num_waiting=4))
    text = out.getvalue()
    for part in (
        "prompt 0",
        "600 / 1,000 tokens",
        "prompt 1",
        "300 / 1,000 tokens",
        "4 waiting",
        "60.0%",
        "900 tokens/s",
    ):
        assert part in text


def test_a_prompt_that_ended_and_left_the_ledger_is_whole():
    view, out, clock = make_view(terminal=True)
    with view:
        for computed, total in ((500, 1000), (1000, 0)):
            clock.now += 1.0
            view.on_step(step_stats(num_tokens=500, progress={"0": (computed, total)}))
    assert "1,000 / 1,000 tokens" in out.getvalue()


def test_many_prompts_are_counted_not_drawn():
    view, out, clock = make_view(terminal=True)
    with view:
        clock.now += 1.0
        view.on_step(step_stats(num_tokens=20, progress={str(n): (1, 100) for n in range(20)}))
    assert "and 12 more prompts" in out.getvalue()


def test_the_display_is_closed_when_the_run_fails():
    view, out, _ = make_view(terminal=True)
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert out.getvalue().endswith(("\x1b[?25h", "\n"))


def test_preemptions_are_counted():
    view, _, clock = make_view(terminal=False)
    for _ in range(2):
        clock.now += 1.0
        view.on_step(step(1000, 1000, preempted=("0",)))
    assert "2 preempted" in view.pace()


def simulate(per_token: float, per_pair: float, total: int, chunk: int, upto: int) -> tuple[float | None, float]:
    """The estimate after `upto` tokens of one prompt, and the true rest."""
    left = TimeLeft()

    def cost(first: int, end: int) -> float:
        return per_token * (end - first) + per_pair * causal_pairs(first, end)

    for first in range(0, upto, chunk):
        end = min(first + chunk, total)
        left.observe({"0": (end, total)}, end - first, cost(first, end))
    return left.seconds(), cost(upto, total)


@pytest.mark.parametrize(
    ("per_token", "per_pair"),
    [(1e-4, 0.0), (0.0, 1e-9), (1e-4, 1e-9), (1e-5, 5e-8)],
    ids=["linear", "pairs", "both", "late"],
)
@pytest.mark.parametrize("done", [3, 8, 31])
def test_time_left_counts_pairs_so_it_is_right_from_early_on(per_token, per_pair, done):
    estimate, truth = simulate(per_token, per_pair, 131_072, 4096, done * 4096)
    assert estimate == pytest.approx(truth, rel=1e-6)


def test_time_left_is_unknown_until_a_step_was_measured():
    assert simulate(1e-4, 1e-9, 131_072, 4096, 0)[0] is None
    assert simulate(1e-4, 1e-9, 131_072, 4096, 4096)[0] is None


def test_time_left_is_zero_at_the_end():
    assert simulate(1e-4, 1e-9, 131_072, 4096, 131_072)[0] == 0


def test_a_preempted_request_counts_again_and_is_not_taken_for_speed():
    left = TimeLeft()
    for end in (100, 200, 300):
        left.observe({"0": (end, 1000)}, 100, 1.0)
    before = left.seconds()
    left.observe({"0": (0, 1000)}, 50, 9.0)
    after = left.seconds()
    assert before is not None
    assert after is not None
    assert after > before


def test_a_prefix_hit_is_not_taken_for_speed():
    left = TimeLeft()
    left.observe({"0": (100, 200)}, 100, 1.0)
    left.observe({"0": (200, 200)}, 100, 1.0)
    left.observe({"0": (200, 200), "1": (90_100, 100_000)}, 100, 1.0)
    left.observe({"0": (200, 200), "1": (90_200, 100_000)}, 100, 90.0)
    estimate = left.seconds()
    assert estimate is not None
    assert estimate > 1000


def test_causal_pairs_add_up():
    assert causal_pairs(0, 1) == 1
    assert causal_pairs(0, 10) == sum(range(1, 11))
    assert causal_pairs(0, 7) + causal_pairs(7, 10) == causal_pairs(0, 10)
    assert causal_pairs(5, 5) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.9, "59.9 s"), (59.96, "1m 00s"), (75, "1m 15s"), (3599.6, "1h 00m"), (7384, "2h 03m")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.00 TiB")]
)
def test_sizes_read_well(count, text):
    assert size(count) == text
