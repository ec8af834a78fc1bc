"""The soak's own judgement: what is flat, what leaks, and that wrong answers are seen."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any

import pytest
from benchmarks.soak import Soak, report
from benchmarks.soak_plot import draw_soak
from benchmarks.soak_traffic import Tally, Traffic
from benchmarks.soak_watch import Sample, growth
from tests.bench.scripted_server import Script, serving

MIB = 2**20
IDLE = Sample(
    seconds=0.0, api_rss_bytes=200 * MIB, engine_rss_bytes=300 * MIB, api_fds=20, pages_used=0, pages_cached=0,
    running=0, waiting=0, queued=0, health=200, health_seconds=0.001, tokens=0,
)  # fmt: skip


def soaked(**changes: Any) -> Soak:
    """A minute in which memory rises by a fifth while the server warms up, and is flat but for noise after that."""
    samples = [
        dataclasses.replace(
            IDLE,
            seconds=float(second),
            api_rss_bytes=int(200 * MIB * (1 + 0.2 * min(second, 20) / 20 + 0.01 * math.sin(second))),
        )
        for second in range(60)
    ]
    fields: dict[str, Any] = {
        "minutes": 1.0, "clients": 6, "flags": ("needle",), "start": IDLE, "samples": samples, "end": IDLE,
        "tally": Tally(), "exit_code": 0, "log": "",
    }  # fmt: skip
    return Soak(**(fields | changes))


def test_a_minute_of_warm_up_and_noise_passes(tmp_path):
    values = soaked().to_json()
    assert set(values["verdict"].values()) == {""}
    assert abs(values["growth"]["api"]) < 0.01
    assert "FAILED" not in report(values)
    light, dark = draw_soak(values, tmp_path / "soak.png")
    assert light.exists()
    assert dark.exists()


def leaking(name: str, share: float) -> list[Sample]:
    """A process that grows by this share of its memory in the second half."""
    return [
        dataclasses.replace(sample, **{name: int(getattr(sample, name) * (1 + share * sample.seconds / 30))})
        for sample in [dataclasses.replace(IDLE, seconds=float(second)) for second in range(60)]
    ]


WRONG = Tally()
WRONG.sent["stream"] = 9
WRONG.complain("stream", "nothing came")


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("requests", {"tally": WRONG}),
        ("api memory", {"samples": leaking("api_rss_bytes", 0.03)}),
        ("engine memory", {"samples": leaking("engine_rss_bytes", 0.03)}),
        ("pages", {"end": dataclasses.replace(IDLE, pages_used=1)}),
        ("queues", {"end": dataclasses.replace(IDLE, queued=1)}),
        ("files", {"end": dataclasses.replace(IDLE, api_fds=40)}),
        ("health", {"samples": [dataclasses.replace(IDLE, seconds=float(s), health=503 * (s == 7)) for s in range(9)]}),
        ("end", {"exit_code": 1}),
    ],
)
def test_each_fault_is_found_alone(check, changes):
    values = soaked(**changes).to_json()
    assert [name for name, fault in values["verdict"].items() if fault] == [check]
    assert f"FAILED  {check}: " in report(values)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, -0.05])
def test_growth_is_the_slope_over_the_second_half(share):
    times = [float(t) for t in range(101)]
    values = [100.0 + max(0.0, t - 50) * share * 2 for t in times]
    assert growth(times, values) == pytest.approx(share, rel=0.05, abs=1e-12)


@pytest.mark.parametrize("fails", ["refuse", "error", "cut", "drop", "abort"])
def test_wrong_answers_are_seen(fails):
    async def send(address: str) -> Tally:
        traffic = Traffic(address, long_prompt=50, vocab_size=1000, seed=0)
        until = time.monotonic() + 0.5
        await traffic.run(3, lambda: time.monotonic() > until)
        await traffic.aclose()
        return traffic.tally

    with serving(Script(fails=fails)) as address:
        tally = asyncio.run(send(address))
    assert tally.wrong["stream"] == tally.sent["stream"] > 0
    assert any(message.startswith("stream: ") for message in tally.messages)
