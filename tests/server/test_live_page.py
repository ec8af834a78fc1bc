"""The live page in a real browser, beside a real server that has work to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.live_page import Generation, chromium
from tests.server.running import running

LONG = 200_000
"""Tokens of the long prompt, which is ended when all is seen: minutes at 256 a step."""
FLAGS = ("--max-num-batched-tokens", "256", "--max-model-len", "262144", "--memory-budget", "1GiB")
CACHED = 6_400
"""Of these, tokens that a prompt before it had too: whole pages."""
TIMEOUT_MS = 60_000
RGB = """([selector, of]) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.fillStyle = getComputedStyle(document.querySelector(selector))[of];
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
}"""
"""A colour of an element, as three bytes."""
TEXTS = (".name", ".who .detail", ".stage", ".note", ".legend li", "#readout", "dt", "footer")
CHART = """() => {
  const chart = document.getElementById("chart");
  const { data } = chart.getContext("2d").getImageData(0, 0, chart.width, 0.5 * chart.height);
  const painted = {};
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] === 255) painted[data.slice(at, at + 3)] = (painted[data.slice(at, at + 3)] ?? 0) + 1;
  }
  return painted;
}"""
"""Colour -> pixels of it, in the upper half of the chart."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Watched:
    """A page, with whatever went wrong on it."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.url = url
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_context(viewport={"width": 1440, "height": 900}, **context).new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait(self, condition: str, argument: Any = None) -> None:
        self.page.wait_for_function(condition, arg=argument)

    def computed(self, request_id: str) -> int:
        """What the request's bar shows."""
        return int(self.page.get_attribute(f'[data-id="{request_id}"] .bar', "aria-valuenow"))

    def wait_for_status(self, status: str) -> None:
        self.page.wait_for_selector(f'#status[data-status="{status}"]')


def prompt(length: int) -> list[int]:
    """Each begins with the shorter ones."""
    return [10 + place * place % 400 for place in range(length)]


def number(text: str) -> int:
    """The first whole number in a text."""
    found = re.search(r"\d[\d,]*", text)
    assert found is not None, text
    return int(found[0].replace(",", ""))


def metrics(url: str, name: str, label: str = "") -> dict[str, float]:
    """The value of `label` -> the metric."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels.get(label, ""): sample.value for sample in samples}


def requests(url: str) -> dict[str, dict[str, Any]]:
    return {request["id"]: request for request in httpx.get(f"{url}/v1/requests").json()["data"]}


def luminance(colour: list[int]) -> float:
    """Relative, as WCAG 2 has it."""
    parts = [value / 255 for value in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_a_long_prefill_is_shown_as_the_server_counts_it_in_dark_and_light(browser: Any, tmp_path: Path) -> None:
    with running("needle", *FLAGS, log=tmp_path / "log") as server:
        url = server.url
        pages = {scheme: Watched(browser, url, color_scheme=scheme) for scheme in ("dark", "light")}
        for page in pages.values():
            page.wait_for_status("ok")
            assert page.text("#num-running") == "0"
        Generation(url, "before", prompt(CACHED), 1).run()
        short, long = Generation(url, "short", [20] * 300, 9000), Generation(url, "long", prompt(LONG), 4)
        short.start()
        for page in pages.values():  # behind the long one it would wait for the end of that
            page.wait("() => document.querySelector('[data-id=\"short\"][data-state=decode]')")
        long.start()
        for page in pages.values():
            check_follows(page, url)
        for page in pages.values():
            check_two_at_once(page)
            check_colours(page, dark=page is pages["dark"])
            check_fixed_numbers(page, url)
        short.abort()
        long.abort()
        last = Generation(url, "last", prompt(3000), 300)
        last.run()
        assert '"completion_tokens":300' in last.text
        for page in pages.values():
            check_ends(page, url)
            assert page.errors == []
            assert all(asked.startswith(url) for asked in page.asked), "everything comes from the server itself"


def check_follows(page: Watched, url: str) -> None:
    """The bar never runs ahead of the server, and gets where the server is."""
    seen = []
    for _ in range(3):
        page.wait("() => document.querySelector('[data-id=\"long\"][data-state=prefill]')")
        page.wait(
            "(at_least) => document.querySelector('[data-id=\"long\"] .bar').ariaValueNow >= at_least",
            requests(url)["long"]["num_computed_tokens"] + 1,
        )
        seen.append(page.computed("long"))
        now = requests(url)["long"]
        assert seen[-1] <= now["num_computed_tokens"]
        assert now["num_tokens"] == LONG
    assert seen == sorted(set(seen)), "it moves, and never back"
    assert page.page.get_attribute('[data-id="long"] .bar', "aria-valuemax") == str(LONG)
    assert f"{CACHED:,} cached" in page.text('[data-id="long"]')
    assert (
        page.page.eval_on_selector('[data-id="long"] .cached', "(node) => node.style.width")
        == f"{100 * CACHED / LONG}%"
    )
    page.wait("() => /≈ \\d/.test(document.querySelector('[data-id=\"long\"]').innerText)")


def check_two_at_once(page: Watched) -> None:
    """One prefills while another decodes, told apart by colour in the list and in the chart."""
    assert page.text("#num-running") == "2"
    slots = {name: page.page.get_attribute(f'[data-id="{name}"]', "data-slot") for name in ("short", "long")}
    assert slots["short"] != slots["long"]
    assert "token" in page.text("#readout")
    assert float(page.text("#prefill-rate").replace(",", "")) > 0
    assert float(page.text("#decode-rate").replace(",", "")) > 0
    colour = page.page.evaluate(RGB, ['[data-id="long"] .dot', "backgroundColor"])
    painted = page.page.evaluate(CHART)
    assert painted[",".join(map(str, colour))] > 500, "bars in the colour of the long prefill"


def check_colours(page: Watched, *, dark: bool) -> None:
    back = page.page.evaluate(RGB, [".panel", "backgroundColor"])
    assert (luminance(back) < 0.05) if dark else (luminance(back) > 0.9)
    for text in TEXTS:
        assert contrast(page.page.evaluate(RGB, [text, "color"]), back) >= 4.5, text
    toggle = page.page.locator("#theme")
    assert toggle.get_attribute("aria-pressed") == str(dark).lower()
    toggle.click()
    other = page.page.evaluate(RGB, [".panel", "backgroundColor"])
    assert (luminance(other) > 0.9) if dark else (luminance(other) < 0.05)
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == str(dark).lower()


def check_fixed_numbers(page: Watched, url: str) -> None:
    config = httpx.get(f"{url}/v1/config").json()
    assert page.text("#model") == "needle"
    assert number(page.text("#pages-note")) == config["num_gpu_blocks"]
    assert f"{config['block_size']} tokens" in page.text("#pages-note")
    assert "1.00 GiB budget" in page.text("#memory-note")
    names = [row["name"] for row in config["memory"]["rows"]]
    page.page.evaluate("document.getElementById('memory-more').open = true")
    shown = page.text("#memory") + page.text("#memory-small")
    assert all(name in shown for name in names)
    stages = set(metrics(url, "longfill:step_seconds_total", "stage")) - {"step", "compute"}
    assert set(page.page.locator("#stages span").all_inner_texts()) == stages | {"other"}
    assert config["version"] in page.text("#facts")


def check_ends(page: Watched, url: str) -> None:
    for name in ("short", "long", "last"):
        page.page.wait_for_selector(f'[data-id="{name}"][data-state="ended"]')
    assert page.text('[data-id="last"] .count') == "3,299 / 3,300"
    assert "300 generated" in page.text('[data-id="last"]')
    page.wait("() => document.getElementById('num-running').textContent === '0'")
    page.wait("() => document.querySelector('#pages li b').textContent === '0'")
    found = metrics(url, "longfill:pages", "state")
    assert found["used"] == 0
    assert [number(text) for text in page.page.locator("#pages b").all_inner_texts()] == [
        0, found["cached"], found["free"],
    ]  # fmt: skip


@pytest.mark.slow
def test_the_page_finds_a_restarted_server_and_asks_for_the_key_that_it_now_wants(browser: Any, tmp_path: Path) -> None:
    with running("needle", *FLAGS, log=tmp_path / "first") as first:
        page = Watched(browser, first.url)
        page.wait_for_status("ok")
        Generation(first.url, "before", [20] * 3000, 400).run()
        page.page.wait_for_selector('[data-id="before"][data-state="ended"]')
    page.wait_for_status("reconnecting")
    assert "last known state" in page.text("#notice")
    assert page.page.locator('[data-id="before"]').count() == 1, "what was known stays"
    flags = (*FLAGS, "--port", str(first.port), "--api-key", "sesame", "--served-model-name", "second")
    with running("needle", *flags, log=tmp_path / "second"):
        page.page.wait_for_selector("dialog[open]")
        page.page.fill("#key", "wrong")
        page.page.keyboard.press("Enter")
        page.wait("() => document.getElementById('key-reason').textContent.includes('refused')")
        page.page.fill("#key", "sesame")
        page.page.click("dialog button")
        page.wait_for_status("ok")
        page.wait("() => document.getElementById('model').textContent === 'second'")
        assert page.page.locator('[data-id="before"]').count() == 0, "another server's requests are gone"
        assert page.page.evaluate("localStorage.length") == 0, "the key is kept for the tab only"
    assert page.errors == []
