"""The gate before an application of the test's own: which paths it knows, and what becomes of a bug."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from longfill.server.admission import Admission
from longfill.server.args import ServerArgs
from longfill.server.gate import Gate
from longfill.server.state import AppState

ROOT = "/llm"


class Behind:
    """Answers 200, or does what a test wants."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.tickets: list[bool] = []

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.tickets.append("ticket" in scope["state"])
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def ask(behind: Behind, *requests: tuple[str, str]) -> tuple[list[httpx.Response], int]:
    """The answers through a gate with a key, and how many clients it took for gone."""
    left: list[None] = []
    admission = Admission(max_num_queued_reqs=1, max_num_queued_tokens=100)
    state = SimpleNamespace(
        server_args=ServerArgs(api_key=("secret",), root_path=ROOT), client=SimpleNamespace(failure=None),
        draining=False, admission=admission, metrics=SimpleNamespace(disconnected=lambda: left.append(None)),
    )  # fmt: skip
    gate: Any = Gate(behind, cast(AppState, state))

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(gate, root_path=ROOT)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [await client.request(method, path, headers=_key(path)) for method, path in requests]

    answers = asyncio.run(run())
    assert not admission.tickets
    return answers, len(left)


def _key(path: str) -> dict[str, str]:
    return {"Authorization": "Bearer secret"} if "completions" in path else {}


@pytest.mark.parametrize("prefix", ["", ROOT])
def test_a_proxy_may_leave_the_root_path_in_or_take_it_out(prefix: str) -> None:
    behind = Behind()
    paths = [("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/v1/models")]
    answers, _ = ask(behind, *((method, prefix + path) for method, path in paths))
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    assert behind.tickets == [True, False]


def test_a_path_that_only_begins_like_the_root_path_needs_a_key() -> None:
    (answer,), _ = ask(Behind(), ("GET", f"{ROOT}health"))
    assert answer.status_code == 401


def test_a_bug_is_a_500_with_the_requests_id_and_no_client_that_left() -> None:
    behind = Behind()
    behind.error = KeyError("secret detail")
    (answer,), left = ask(behind, ("POST", "/v1/completions"))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"]
    assert "secret detail" not in answer.text
    assert left == 0
