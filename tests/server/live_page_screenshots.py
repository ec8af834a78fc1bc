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
         "--max-num-seqs", "4", "--prefill-policy", "fair")  # fmt: skip
VIEWS = {
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "light": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}
PHONE_HEIGHT = 1290
"""Of the picture: as far as the list of requests goes."""


def tokens(count: int, seed: int) -> list[int]:
    return [10 + (place * place + seed * place) % 400 for place in range(count)]


def main(folder: Path) -> None:
    """Write dark.png, light.png and phone.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:  # noqa: SIM117
        with running("needle", *FLAGS, log=Path(scratch) / "log") as server:
            Generation(server.url, "warm-up", tokens(16_000, 1), 1).run()
            pages = {name: browser.new_context(**view).new_page() for name, view in VIEWS.items()}
            for page in pages.values():
                page.goto(server.url)
            work(server.url, pages["dark"])
            for name, page in pages.items():
                page.bring_to_front()
                page.wait_for_timeout(600)  # a page that was behind another one draws nothing
                page.screenshot(path=folder / f"{name}.png", **shape(name))


def work(url: str, page: Any) -> None:
    """One prompt after another, until the first is half done."""
    Generation(url, "book-200k", tokens(200_000, 1), 16).start()
    page.wait_for_timeout(4000)
    Generation(url, "chat-7", tokens(900, 2), 4000).start()
    page.wait_for_timeout(6000)
    for name, count in (("report-24k", 24_000), ("letters-9k", 9_000), ("chat-8", 2_500)):
        Generation(url, name, tokens(count, len(name)), 4000).start()
        page.wait_for_timeout(3000)
    page.set_default_timeout(300_000)
    page.wait_for_function("() => document.querySelector('[data-id=\"book-200k\"] .bar').ariaValueNow > 90_000")


def shape(name: str) -> dict[str, Any]:
    if name != "phone":
        return {}
    return {"full_page": True, "clip": {"x": 0, "y": 0, "width": 390, "height": PHONE_HEIGHT}}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
