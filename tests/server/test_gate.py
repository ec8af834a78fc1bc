"""Who gets in, what is written about it, and whose requests a client may see."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.running import Running, running

KEYS = ("operator-key", "first-tenant", "second-tenant")


@pytest.fixture(scope="module")
def server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    limits = ("--max-num-queued-reqs", "2", "--max-num-queued-tokens", "1500", "--max-body-size", "100kB")
    sizes = ("--max-model-len", "2048", "--max-num-batched-tokens", "64", "--served-model-name", "tiny")
    log = tmp_path_factory.mktemp("log") / "log"
    with running(random_model, *flags, *limits, *sizes, log=log) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


def key(index: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[index]}"}


class Slow(threading.Thread):
    """A long answer for one tenant, read by a client that leaves in the end."""

    def __init__(self, server: Running, index: int, name: str) -> None:
        super().__init__(daemon=True)
        self.server, self.index, self.id, self.left = server, index, name, threading.Event()
        self.start()
        server.wait_for("decode")

    def run(self) -> None:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        headers = {**key(self.index), "x-request-id": self.id}
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            for _ in response.iter_lines():
                if self.left.is_set():
                    return

    def leave(self) -> None:
        self.left.set()
        self.join(20)
        self.server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/requests", "/v1/config", "/v1/live", "/tokenize"])
@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic operator-key", "operator-key", "Bearer"])
def test_everything_but_health_and_metrics_needs_a_key(server: Running, path: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    answer = httpx.get(server.url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    for open_path in ("/health", "/ready", "/metrics", "/version", "/"):
        assert httpx.get(server.url + open_path).status_code == 200


def test_no_answer_shows_a_key(server: Running) -> None:
    config = server.http.get("/v1/config").json()
    assert config["server"]["api_key"] == "3 keys"
    assert config["engine"]["max_num_batched_tokens"] == 64
    assert config["model"]["max_model_len"] == 2048
    assert sum(row["bytes"] for row in config["memory"]["rows"]) <= config["memory"]["budget"]
    shown = server.http.get("/v1/config").text + server.log
    assert not any(secret in shown for secret in KEYS)


def test_a_tenant_sees_and_ends_its_own_requests_and_the_first_key_all(server: Running) -> None:
    slow = Slow(server, 1, "of-tenant-1")
    for index, status in ((0, 200), (1, 200), (2, 404)):
        listed = httpx.get(f"{server.url}/v1/requests", headers=key(index)).json()
        assert (len(listed["data"]), listed["num_requests"]) == ((1, 1) if status == 200 else (0, 0))
        answer = httpx.get(f"{server.url}/v1/requests/of-tenant-1", headers=key(index))
        assert answer.status_code == status
    assert httpx.post(f"{server.url}/v1/requests/of-tenant-1/abort", headers=key(2)).status_code == 404
    assert httpx.get(f"{server.url}/v1/live", headers=key(1)).status_code == 403
    assert server.requests()[0]["id"] == "of-tenant-1"
    assert httpx.post(f"{server.url}/v1/requests/of-tenant-1/abort", headers=key(1)).json()["aborted"] is True
    slow.join(20)
    assert not slow.is_alive()
    server.wait_until_idle()
    ended = httpx.get(f"{server.url}/v1/requests/of-tenant-1", headers=key(1)).json()
    assert ended["state"] == "ended"
    assert ended["prefix_cache"]["prompt_tokens"] > 0
    assert httpx.get(f"{server.url}/v1/requests/of-tenant-1", headers=key(2)).status_code == 404


def test_too_many_requests_get_429_before_their_body_is_read(server: Running) -> None:
    """API-14. Two connections that say they will send a body hold both places."""
    with httpx.Client(base_url=server.url, headers=key(0)) as client:

        def endless() -> Iterator[bytes]:
            yield b"{"
            hold.wait(20)
            yield b"}"

        hold = threading.Event()
        waiting = [
            threading.Thread(
                target=httpx.post, args=(f"{server.url}/v1/completions",),
                kwargs={"content": endless(), "headers": key(0), "timeout": 60}, daemon=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        for thread in waiting:
            thread.start()
        until = time.monotonic() + 10
        while client.get("/v1/requests").json()["num_requests"] < 2:
            assert time.monotonic() < until
        answer = client.post("/v1/completions", json={"prompt": "a"})
        hold.set()
        for thread in waiting:
            thread.join(20)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 600
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        text = client.get("/metrics").text
    assert 'longfill:requests_rejected_total{engine="0",limit="reqs",model_name="tiny"} 1.0' in text


def test_too_many_prompt_tokens_get_429_unless_they_would_wait_alone(server: Running) -> None:
    ids = [5] * 1900
    assert server.post("/v1/completions", prompt=ids, max_tokens=1).status_code == 200
    both: list[httpx.Response] = []
    first = threading.Thread(
        target=lambda: both.append(server.post("/v1/completions", prompt=ids[::-1], max_tokens=1, cache_salt="x"))
    )
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        first.start()
        server.wait_for("waiting")
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": ids[:500]}, headers=key(0))
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    first.join(20)
    assert both[0].status_code == 200
    assert answer.status_code == 429
    assert "--max-num-queued-tokens" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", prompt=ids[:500], max_tokens=1).status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Running, chunked: bool) -> None:
    """API-05: by what its head says, with no byte of it sent, or as soon as more has come."""
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 200000"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n{length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(head.encode())
        for _ in range(3 if chunked else 0):  # the third is beyond the limit, and no end follows
            raw.sendall(b"c350\r\n" + b" " * 50_000 + b"\r\n")
        answer = b""
        while part := raw.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100,000" in answer
    assert server.http.get("/health").status_code == 200


def test_request_ids_are_kept_or_made_and_strange_ones_refused(server: Running) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my/id:7"})
    assert answer.headers["x-request-id"] == "my/id:7"
    assert answer.json()["id"] == "cmpl-my/id:7"
    assert server.http.get("/v1/requests/my/id:7").json()["state"] == "ended"
    made = [server.http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    refused = server.http.get("/v1/models", headers={"x-request-id": "x" * 200})
    assert refused.status_code == 400
    assert "x-request-id" in refused.json()["error"]["message"]


def test_every_request_leaves_one_line_and_those_whose_client_left_are_counted(server: Running) -> None:
    name = "leaves-a-line"
    server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True},
                     headers={"x-request-id": name})  # fmt: skip
    until = time.monotonic() + 10
    while not (lines := [line for line in server.log.splitlines() if name in line]):  # it comes behind the answer
        assert time.monotonic() < until
        time.sleep(0.01)
    [line] = lines
    assert "200, 1 prompt tokens (0 cached), 3 generated" in line
    before = _left(server)
    Slow(server, 1, "leaves-early").leave()
    assert _left(server) == before + 1
    assert "leaves-early: the client left" in server.log


def _left(server: Running) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("longfill:client_disconnects_total"))


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_unknown_paths_and_methods_have_an_error_object(server: Running, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_may_ask_for_the_head_alone(server: Running, path: str) -> None:
    answer = httpx.head(server.url + path)
    assert answer.status_code == 200
    assert answer.content == b""


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="a", suffix="", best_of=1, echo=False, user="me", store=False)
    assert answer.status_code == 200, answer.text
    refused = server.post("/v1/completions", prompt="a", suffix="b")
    assert refused.json()["error"]["param"] == "suffix"


def test_an_answer_without_a_key_has_its_request_id_too(server: Running) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "who-am-i"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "who-am-i")


def test_a_second_request_with_an_id_that_is_in_use_is_served_too(server: Running) -> None:
    """Proxies try again under the same id."""
    slow = Slow(server, 0, "twice")
    answer = server.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"x-request-id": "twice"}
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "twice"
    slow.leave()


def test_a_key_may_have_any_letters(random_model: Path, tmp_path: Path) -> None:
    with running(random_model, "--api-key", "clé", log=tmp_path / "log") as server:
        for given, status in (("clé", 200), ("cle", 401)):
            headers = {b"Authorization": f"Bearer {given}".encode()}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
