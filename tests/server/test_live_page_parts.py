"""The live page's modules in a browser, without a server: reading the stream, booking steps, listing requests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.server.live_page import chromium

PAGE = Path(str(files("longfill.server"))) / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
HOST = "http://page.test"
HELLO = {
    "model": "m", "served_model_name": "m", "version": "0", "page_size": 64, "num_pages": 100, "max_model_len": 1000,
    "max_num_batched_tokens": 512, "memory": {"budget": 1, "rows": [], "bytes_per_token": 1}, "kernels": {},
    "num_threads": 1, "started": 5.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The page's files at HOST; nothing else is there, so that it never connects."""
    with chromium() as browser:
        found = browser.new_page()
        found.route("**/*", answer)
        found.goto(HOST)
        yield found


def answer(route: Any) -> None:
    name = route.request.url.removeprefix(HOST)
    file = PAGE / ("index.html" if name == "/" else name.removeprefix("/page/"))
    if file.is_file():
        route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix])
    else:
        route.fulfill(status=503)


def run(page: Any, module: str, names: str, body: str, argument: Any = None) -> Any:
    """The value of `body`, in which `names` of a module are known, and `given`."""
    code = f"async (given) => {{ const {{ {names} }} = await import('/page/{module}.js'); {body} }}"
    return page.evaluate(code, argument)


def step(number: int, end: float, seconds: float, requests: list[list[Any]], **more: Any) -> dict[str, Any]:
    """A step record; `requests` are [id, computed, tokens, prompt tokens, step tokens]."""
    prompt = sum(min(now, max(0, length - (computed - now))) for _, computed, _, length, now in requests)
    return {
        "step": number, "time": end, "num_tokens": sum(row[4] for row in requests), "num_prompt_tokens": prompt,
        "seconds": {"step": seconds, "index": seconds / 2}, "requests": requests, "preempted": [], **more,
    }  # fmt: skip


def request(name: str, state: str, computed: int = 0, tokens: int = 100, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "state": state, "num_computed_tokens": computed, "num_tokens": tokens, "num_prompt_tokens": tokens,
        "num_cached_tokens": None, "num_preemptions": 0, "age_s": 1.0, "estimated_prefill_s": None, "priority": 0,
        "stream": False, "endpoint": "/v1/completions", **more,
    }  # fmt: skip


def update(requests: list[dict[str, Any]], steps: list[dict[str, Any]], now: float = 100.0) -> dict[str, Any]:
    return {"now": now, "steps": steps, "requests": requests, "num_requests": len(requests)}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_the_same_however_the_stream_is_cut(page: Any, end: str) -> None:
    lines = [
        "event: hello",
        'data: {"a": 1}',
        "",
        ": still here",
        "",
        "data: one",
        "data:two",
        "",
        "event: no data",
        "",
    ]
    text = end.join([*lines, "event: update", "data: last", ""]) + end
    cuts = [[1] * len(text), *([at, len(text) - at] for at in range(len(text)))]
    body = """
    return given[1].map((sizes) => {
      const events = [];
      const parser = new EventParser((name, data) => events.push([name, data]));
      let at = 0;
      for (const size of sizes) parser.push(given[0].slice(at, (at += size)));
      return events;
    });"""
    wanted = [["hello", '{"a": 1}'], ["message", "one\ntwo"], ["update", "last"]]
    for events in run(page, "stream", "EventParser", body, [text, cuts]):
        assert events == wanted


HISTORY = """
  const history = new History();
  for (const record of given) history.push(record, () => 0);
  return { bins: history.bins, widest: Math.max(...history.bins.map((bin) => bin.end - bin.start)) };
"""


HOUR = """
  const history = new History();
  let state = 7;
  const draw = (choices) => choices[(state = (state * 48271) % 2147483647) % choices.length];
  const sent = { steps: 0, seconds: 0, most: 0 };
  for (let now = 1000, computed = 0; now < 1000 + 3590; sent.steps += 1) {
    const seconds = draw([0.003, 0.02, 0.08, 0.2]);
    now += seconds + draw(given);
    computed += 1;
    sent.seconds += seconds;
    history.push({
      step: sent.steps, time: now, num_tokens: 1, num_prompt_tokens: computed <= 40 ? 1 : 0,
      seconds: { step: seconds }, requests: [["a", computed, computed + 1, 40, 1]], preempted: [],
    }, () => 0);
    sent.most = Math.max(sent.most, history.bins.length);
  }
  const sum = (name) => history.bins.reduce((total, bin) => total + bin[name], 0);
  return {
    ...sent,
    kept: ["steps", "promptTokens", "decodeTokens", "stepSeconds"].map(sum),
    widest: Math.max(...history.bins.map((bin) => bin.end - bin.start)),
    ordered: history.bins.every((bin, at, bins) => at === 0 || bins[at - 1].end <= bin.start),
  };
"""


@pytest.mark.parametrize("pauses", [[0], [0, 0, 0, 0.001, 0.4], [0.9], [0, 0, 1.1]])
def test_an_hour_of_short_steps_takes_bounded_room_and_loses_no_token(page: Any, pauses: list[float]) -> None:
    found = run(page, "history", "History", HOUR, pauses)
    steps, prompt, decode, seconds = found["kept"]
    assert (steps, prompt, decode) == (found["steps"], 40, found["steps"] - 40)
    assert seconds == pytest.approx(found["seconds"])
    assert found["most"] <= 6001
    assert found["widest"] <= 3.0
    assert found["ordered"]


def test_a_long_step_stays_as_high_when_short_ones_are_put_together_with_it(page: Any) -> None:
    steps = [step(0, 1.0, 0.040, [["a", 4000, 8000, 8000, 4000]])]
    steps += [step(1 + i, 1.0 + 0.001 * (i + 1), 0.001, [["b", 9 + i, 10 + i, 8, 1]]) for i in range(5)]
    (one,) = run(page, "history", "History", HISTORY, steps)["bins"]
    assert one["steps"] == 6
    assert one["promptArea"][0] / one["stepSeconds"] == pytest.approx(4000 * 40 / 45)


def test_rates_count_idle_time_and_no_rejected_draft_but_wait_for_a_long_step(page: Any) -> None:
    steps = [step(0, 11.0, 1.0, [["a", 300, 600, 600, 300]]), step(1, 12.0, 1.0, [["a", 600, 601, 600, 300]])]
    steps.append(step(2, 12.5, 0.5, [["a", 604, 605, 600, 4]], num_draft_tokens=3, num_accepted_tokens=1))
    body = """
      const history = new History();
      for (const record of given) history.push(record, () => 0);
      return [history.rates(12.5, true), history.rates(15.0, true), history.rates(15.0, false),
              history.rates(99.0, false)];"""
    busy, waiting, idle, later = run(page, "history", "History", body, steps)
    assert busy == waiting == {"prefill": pytest.approx(600 / 2.5), "decode": pytest.approx(2 / 2.5)}
    assert idle == {"prefill": pytest.approx(600 / 5), "decode": pytest.approx(2 / 5)}
    assert later == {"prefill": 0, "decode": 0}


LEDGER = """
  const ledger = new Ledger();
  ledger.takeHello(given[0]);
  for (const next of given.slice(1)) next.started ? ledger.takeHello(next) : ledger.takeUpdate(next);
  const tokens = ledger.history.bins.reduce((sum, bin) => sum + bin.promptTokens + bin.decodeTokens, 0);
  const areas = [0, 1].map((slot) => ledger.history.bins.reduce((sum, bin) => sum + bin.promptArea[slot], 0));
  return { tokens, areas, requests: ledger.requests, ended: ledger.ended };
"""


def test_a_step_that_a_reconnection_sends_again_is_booked_once(page: Any) -> None:
    steps = [step(number, 90.0 + number, 1.0, [["a", 10 * number + 10, 100, 100, 10]]) for number in range(4)]
    running = [request("a", "prefill", 40)]
    first = HELLO | update(running, steps[:2])
    found = run(page, "ledger", "Ledger", LEDGER, [first, update(running, steps[2:3]), HELLO | update(running, steps)])
    assert found["tokens"] == 40


def test_another_server_starts_at_its_own_first_step_and_knows_no_old_request(page: Any) -> None:
    first = HELLO | update([request("a", "prefill")], [step(50, 90.0, 1.0, [["a", 10, 100, 100, 10]])])
    second = HELLO | update([request("b", "prefill")], [step(0, 95.0, 1.0, [["b", 7, 100, 100, 7]])]) | {"started": 6.0}
    found = run(page, "ledger", "Ledger", LEDGER, [first, second])
    assert found["tokens"] == 17
    assert [one["id"] for one in found["requests"]] == ["b"]
    assert found["ended"] == []


def test_prompts_and_completions_of_one_request_have_its_colour(page: Any) -> None:
    rows = [[name, 10, 100, 100, 10] for name in ("x", "y-0", "y-1", "0_y-1", "2_x")]
    both = [request("x", "prefill"), request("y", "prefill")]
    found = run(page, "ledger", "Ledger", LEDGER, [HELLO | update(both, [step(0, 90.0, 1.0, rows)])])
    assert found["areas"] == [20, 30]
    assert [one["slot"] for one in found["requests"]] == [0, 1]


def test_an_ended_request_shows_the_numbers_of_its_last_step(page: Any) -> None:
    first = HELLO | update([request("a", "prefill", 60)], [])
    last = update([], [step(0, 90.0, 1.0, [["a", 100, 101, 100, 40]])])
    (ended,) = run(page, "ledger", "Ledger", LEDGER, [first, last])["ended"]
    assert (ended["state"], ended["num_computed_tokens"], ended["num_tokens"]) == ("ended", 100, 101)


def test_of_thousands_of_requests_the_running_and_the_first_waiting_are_listed_and_the_rest_counted(page: Any) -> None:
    running = [request(f"r{number}", "decode", 99, slot=number % 8) for number in range(40)]
    waiting = [request(f"w{number}", "waiting", slot=None) for number in range(160)]
    read = request("t", "tokenising", 0, 0, slot=None)
    body = """
      const [rows, rest] = [document.createElement("div"), document.createElement("span")];
      const list = new RequestsList(rows, rest);
      const names = () => [...rows.children].map((row) => row.dataset.id);
      list.show(given, [], 3000, 0);
      const [before, text] = [names(), rest.textContent];
      const kept = rows.querySelector('[data-id="r39"]');
      list.show(given.slice(39), [], 2961, 0);  // the row stays, and moves
      return [before, text, names(), kept === rows.firstElementChild];"""
    found = run(page, "requests_list", "RequestsList", body, [*running, read, *waiting])
    first = [f"r{number}" for number in range(40)]
    shown = ["t", *(f"w{number}" for number in range(11))]
    assert found == [[*first, *shown], "2,948 more", ["r39", *shown], True]


def test_what_the_worker_does_besides_its_stages_is_shown_as_other(page: Any) -> None:
    seconds = {
        "step": 10,
        "compute": 9,
        "schedule": 0.5,
        "update": 0.5,
        "idle": 0.25,
        "new": 1,
        "attend": 4,
        "plan": 1,
    }
    found = run(page, "meters", "orderedStages", "return orderedStages(given);", seconds)
    assert found == [
        ["schedule", 0.5], ["plan", 1], ["attend", 4], ["new", 1], ["other", 3], ["update", 0.5], ["idle", 0.25],
    ]  # fmt: skip


def test_numbers_read_as_people_write_them(page: Any) -> None:
    body = """return [
      [0.4, 59.6, 187, 7500, 90061].map(duration),
      [12, 1000, 1.5 * 2 ** 30].map(bytes),
      [4e-5, 0.0123, 2.5, 250].map((value) => measured(value).join(" ")),
      [0, 5.937, 1234.5].map(rate),
      [plural(1, "page"), plural(2000, "page")],
    ];"""
    found = run(page, "format", "duration, bytes, measured, rate, plural", body)
    assert found == [
        ["0 s", "1 m 00 s", "3 m 07 s", "2 h 05 m", "1 d 01 h"],
        ["12 B", "0.98 KiB", "1.50 GiB"],
        ["40.0 µs", "12.3 ms", "2.50 s", "250 s"],
        ["0", "5.94", "1,235"],
        ["1 page", "2,000 pages"],
    ]  # fmt: skip
