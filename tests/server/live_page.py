"""A headless Chromium, and requests for it to watch: for tests of the live page, and for its pictures.

May import playwright and httpx. Invariant: the browser ends with its context; nothing of it reaches beyond this
machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from shutil import which
from typing import Any

import httpx
import pytest

CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
)  # fmt: skip


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A playwright browser; without Chromium the test is skipped, or fails where LONGFILL_REQUIRE_CHROMIUM=1."""
    path = which("chromium") or which("chromium-browser") or which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("the Python package playwright is not installed")
    if path is None:
        _missing("Chromium is not installed; on Debian and Ubuntu: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def _missing(what: str) -> None:
    if os.environ.get("LONGFILL_REQUIRE_CHROMIUM") == "1":
        pytest.fail(what)
    pytest.skip(what)


class Generation(threading.Thread):
    """A streamed request to `/v1/completions`, in a thread of its own."""

    def __init__(self, url: str, request_id: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._id = request_id
        self._body = {
            "model": "needle", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        self.text = ""
        """All that the server sent."""

    def run(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=self._body, headers={"x-request-id": self._id}, timeout=300
        ) as response:
            for part in response.iter_text():
                self.text += part

    def abort(self) -> None:
        """Have the server end it, and wait for that."""
        httpx.post(f"{self._url}/v1/requests/{self._id}/abort", timeout=30)
        self.finish()

    def finish(self) -> str:
        """Wait for its end; returns all that the server sent."""
        self.join(timeout=300)
        assert not self.is_alive(), f"request {self._id} did not end"
        return self.text
