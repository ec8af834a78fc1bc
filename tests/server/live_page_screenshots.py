"""The pictures of docs/live_page.md, taken while the bundled model prefills a long prompt and decodes another.

    python -m tests.server.live_page_screenshots docs/live_page

Imports the tests' server and browser. Invariant: what the pictures show is a real server at work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.server.live_page import Generation, chromium
from tests.server.running import running

FLAGS = ("--max-num-batched-tokens", "1024", "--max-model-len", "262144", "--memory-budget", "2GiB",
         "--max-num-seqs", "4", "--long-prefill-token-threshold", "704")  # fmt: skip
VIEWS = {
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "light": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}
PROMPTS = (
    ("book-200k", 200_000, 1, 4),
    ("chat-7", 900, 2, 4),
    ("report-9k", 9_000, 3, 12),
    ("letters-12k", 12_000, 4, 1),
    ("chat-8", 2_500, 5, 1),
)
"""Name, tokens, seed of their text, and seconds until the next. The first begins like a prompt before it."""
PHONE_HEIGHT = 1290
"""Of the picture: as far as the list of requests goes."""


def tokens(count: int, seed: int) -> list[int]:
    return [10 + (place * place + seed * place) % 400 for place in range(count)]


def main(folder: Path) -> None:
    """Write dark.png, light.png and phone.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        chromium() as browser,
        running("needle", *FLAGS, log=Path(scratch) / "log") as server,
    ):
        Generation(server.url, "warm-up", tokens(24_000, 1), 1).run()
        pages = {name: browser.new_context(**view).new_page() for name, view in VIEWS.items()}
        for page in pages.values():
            page.goto(server.url)
        at_work = work(server.url, pages["dark"])
        for name, page in pages.items():
            page.bring_to_front()
            page.wait_for_timeout(600)  # a page that was behind another one draws nothing
            page.screenshot(path=folder / f"{name}.png", **shape(name))
        for generation in at_work:
            generation.abort()


def work(url: str, page: Any) -> list[Generation]:
    """One prompt after another, until the first is half done."""
    started = []
    for name, count, seed, pause in PROMPTS:
        started.append(Generation(url, name, tokens(count, seed), 4000))
        started[-1].start()
        page.wait_for_timeout(1000 * pause)
    done = "() => document.querySelector('[data-id=\"book-200k\"] .bar').ariaValueNow > 100_000"
    page.wait_for_function(done, timeout=300_000)
    return started


def shape(name: str) -> dict[str, Any]:
    if name != "phone":
        return {}
    return {"full_page": True, "clip": {"x": 0, "y": 0, "width": 390, "height": PHONE_HEIGHT}}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
