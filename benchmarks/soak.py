"""A soak of `longfill serve`: an hour of mixed traffic, after which nothing may have failed, grown or been lost.

    python -m benchmarks.soak --minutes 60 --json soak.json --plot soak.png

Imports the traffic, the watch and the plots of the benchmarks. Invariant: the exit code is 0 only if no request failed
that should not, memory is flat, pages and files are back, and the server ended by itself when told to.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak_plot import draw_soak
from benchmarks.soak_traffic import Tally, Traffic
from benchmarks.soak_watch import Sample, SoakServer, growth, settled, soak_server

MOST_GROWTH = 0.02
MOST_FDS = 8
"""File descriptors more at the end than at the start: of connections that are kept open."""
FLAGS = (
    "needle", "--max-model-len", "20000", "--num-gpu-blocks-override", "400", "--max-num-batched-tokens", "2048",
)  # fmt: skip
"""A small pool: all of it is in use within a minute, prefixes are evicted, and long prompts wait for pages."""
LONG_PROMPT = 12000


@dataclasses.dataclass(frozen=True)
class Soak:
    """What was seen."""

    minutes: float
    clients: int
    flags: Sequence[str]
    start: Sample
    samples: Sequence[Sample]
    end: Sample
    tally: Tally
    exit_code: int
    log: str

    def verdict(self) -> dict[str, str]:
        """What is wrong, by check; "" where nothing is."""
        times = [sample.seconds for sample in self.samples]
        api = growth(times, [sample.api_rss_bytes for sample in self.samples])
        engine = growth(times, [sample.engine_rss_bytes for sample in self.samples])
        wrong = sum(self.tally.wrong.values())
        ill = sum(sample.health != 200 for sample in self.samples)
        fds = self.end.api_fds - self.start.api_fds
        left = (self.end.running, self.end.waiting, self.end.queued)
        return {
            "requests": f"{wrong:,} of {self.tally.sent.total():,} answers were wrong" if wrong else "",
            "api memory": f"{api:+.2%} in the second half" if api > MOST_GROWTH else "",
            "engine memory": f"{engine:+.2%} in the second half" if engine > MOST_GROWTH else "",
            "pages": ""
            if self.end.pages_used == self.start.pages_used
            else f"{self.end.pages_used} in use, {self.start.pages_used} before",
            "queues": f"running, waiting, queued: {left}" if any(left) else "",
            "files": f"{fds:+} file descriptors" if fds > MOST_FDS else "",
            "health": f"{ill} of {len(self.samples)} answers of /health were not 200" if ill else "",
            "end": f"exit code {self.exit_code}" if self.exit_code else "",
        }

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        times = [sample.seconds for sample in self.samples]
        health = sorted(sample.health_seconds for sample in self.samples)
        return {
            "minutes": self.minutes,
            "clients": self.clients,
            "flags": list(self.flags),
            "verdict": self.verdict(),
            "growth": {
                "api": growth(times, [sample.api_rss_bytes for sample in self.samples]),
                "engine": growth(times, [sample.engine_rss_bytes for sample in self.samples]),
            },
            "health_p99_s": health[int(0.99 * (len(health) - 1))],
            "sent": dict(self.tally.sent),
            "wrong": dict(self.tally.wrong),
            "messages": self.tally.messages,
            "tokens": self.tally.tokens,
            "start": self.start.to_json(),
            "end": self.end.to_json(),
            "samples": [sample.to_json() for sample in self.samples],
            "exit_code": self.exit_code,
            "log": self.log,
        }


def soak(minutes: float, clients: int, flags: Sequence[str], seed: int = 0) -> Soak:
    """Run it."""
    with soak_server(flags) as server:
        start, samples, end, tally = asyncio.run(_load(server, minutes * 60, clients, seed))
        code = server.stop()
        return Soak(minutes, clients, flags, start, samples, end, tally, code, server.log())


async def _load(
    server: SoakServer, seconds: float, clients: int, seed: int
) -> tuple[Sample, list[Sample], Sample, Tally]:
    model = await server.model()
    traffic = Traffic(server.url, long_prompt=LONG_PROMPT, vocab_size=model["vocab_size"], seed=seed)
    start = await server.sample(0.0, 0)
    began, samples = time.monotonic(), []

    def gone() -> float:
        return time.monotonic() - began

    async def watch() -> None:
        while gone() < seconds:
            samples.append(await server.sample(gone(), traffic.tally.tokens))
            await asyncio.sleep(1.0)

    await asyncio.gather(traffic.run(clients, lambda: gone() >= seconds), watch())
    await traffic.aclose()
    end = await settled(server, start.pages_used)
    await server.aclose()
    return start, samples, end, traffic.tally


def report(values: dict[str, Any]) -> str:
    """What was sent, and a line a check."""
    lines = [
        f"{values['minutes']:g} minutes, {values['clients']} clients, {sum(values['sent'].values()):,} requests, "
        f"{values['tokens']:,} tokens, /health p99 {1e3 * values['health_p99_s']:.1f} ms; memory in the second half: "
        f"API {values['growth']['api']:+.2%}, engine {values['growth']['engine']:+.2%}",
        ", ".join(f"{kind} {count:,}" for kind, count in sorted(values["sent"].items())),
        *values["messages"],
        *(
            f"{'FAILED' if fault else 'ok'}  {check}{f': {fault}' if fault else ''}"
            for check, fault in values["verdict"].items()
        ),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; what follows `--` replaces the server's flags."""
    parser = argparse.ArgumentParser(description="Mixed traffic on longfill serve, and what is left after it.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("flags", nargs="*", default=FLAGS, help="flags of longfill serve")
    given = parser.parse_args(arguments)
    values = soak(given.minutes, given.clients, given.flags, given.seed).to_json()
    print(report(values))
    if given.json:
        given.json.write_text(json.dumps(values) + "\n", encoding="utf-8")
    if given.plot:
        draw_soak(values, given.plot)
    return 1 if any(values["verdict"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
