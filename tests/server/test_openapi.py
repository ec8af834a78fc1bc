"""The OpenAPI document: what it says of bodies and answers is so, and nothing drawn from it gets a 5xx."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.server.running import Running, running

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def document(tiny_server: Running) -> dict[str, Any]:
    """The document of the running server."""
    described: dict[str, Any] = tiny_server.http.get("/openapi.json").json()
    return described


def _schema(document: dict[str, Any], path: str, status: str = "200", kind: str = "application/json") -> dict[str, Any]:
    operations = document["paths"][path]
    answers = operations[next(iter(operations))]["responses"]
    content: dict[str, Any] = answers[status]["content"][kind]
    return content.get("x-event-data", content["schema"])


def _check(value: Any, schema: dict[str, Any]) -> None:
    jsonschema_rs.validator_for(schema).validate(value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, "return_token_ids": True, "n": 2, "seed": 1}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "explain_prefix_cache": True}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
        ("/tokenize", {"prompt": "a b"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [20, 21]}),
    ],
)
def test_answers_are_what_the_document_says(
    tiny_server: Running, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    _check(body, request)
    answer = tiny_server.post(path, **body)
    assert answer.status_code == 200, answer.text
    _check(answer.json(), _schema(document, path))
    refused = tiny_server.post(path, **body, surprise=1)
    _check(refused.json(), _schema(document, path, "400"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_frames_are_what_the_document_says(tiny_server: Running, document: dict[str, Any], path: str) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}
    options = {"include_usage": True, "prefill_progress": True}
    for event in tiny_server.events(path, **body, max_tokens=3, stream_options=options):
        _check(event, _schema(document, path, kind="text/event-stream"))


def test_models_are_what_the_document_says(tiny_server: Running, document: dict[str, Any]) -> None:
    _check(tiny_server.http.get("/v1/models").json(), _schema(document, "/v1/models"))


def test_every_error_that_can_come_is_documented(document: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        described = set(document["paths"][path]["post"]["responses"])
        assert {"200", "400", "401", "413", "429", "500", "503", "504"} <= described


@pytest.fixture
def short_server(random_model: Path, tmp_path: Path) -> Iterator[Running]:
    """One whose outputs are short, whatever is asked for."""
    with running(random_model, "--max-model-len", "96", log=tmp_path / "short.log") as server:
        yield server


@pytest.mark.slow
def test_schemathesis_finds_no_5xx(short_server: Running, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{short_server.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--max-examples", "50", "--phases", "examples,coverage,fuzzing"),
        # The live page's feed never ends. A deadline of milliseconds is met with 504, as it should be.
        *("--exclude-path", "/v1/live", "--request-timeout", "60", "--seed", "1", "--continue-on-failure"),
        *("--suppress-health-check", "all"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=tmp_path)
    statuses = re.findall(r"^\[(5\d\d)\]", done.stdout, re.M)
    assert set(statuses) <= {"504"}, done.stdout[-6000:]
    # All of its phases ran: without this, a wrong flag would look like success.
    assert "Fuzzing" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Unresolvable" not in done.stdout
    assert short_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
