"""What is promised when something dies: the engine, a client, the server itself (API-06, 08, 12, 13, 20)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.server.running import Running, running

from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.server import serve
from longfill.server.args import ServerArgs
from longfill.server.client import EngineClient

FLAGS = ("--max-model-len", "20000", "--max-num-batched-tokens", "128", "--num-threads", "1", "--memory-budget", "2GiB")
LONG = " ".join(f"The access code of amber falcon is {n:05d}." for n in range(600))
"""Some 11,000 tokens: ninety steps."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """One that a test may end."""
    with running("needle", *FLAGS, log=tmp_path / "log") as server:
        yield server


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that outlives its tests."""
    with running("needle", *FLAGS, log=tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


class Asking(threading.Thread):
    """A client in a thread of its own; keeps what it got."""

    def __init__(self, server: Running, **body: Any) -> None:
        super().__init__(daemon=True)
        self._server = server
        # Under a salt of its own, no prompt is in the cache.
        self._body = {"prompt": LONG, "max_tokens": 40, "ignore_eos": True, "cache_salt": uuid.uuid4().hex, **body}
        self.status = 0
        self.text = ""
        self.error: Exception | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._server.url, timeout=120) as client,
                client.stream("POST", "/v1/completions", json=self._body) as response,
            ):
                self.status = response.status_code
                for part in response.iter_text():
                    self.text += part
        except httpx.HTTPError as error:
            self.error = error
        self.ended = time.monotonic()

    def result(self, seconds: float) -> Asking:
        self.join(seconds)
        assert not self.is_alive(), "no answer"
        assert self.error is None, self.error
        return self

    @property
    def events(self) -> list[str]:
        return [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]


def test_when_the_engine_is_killed_all_clients_get_5xx_and_the_process_ends_with_an_error(server: Running) -> None:
    """API-13 and API-08: those in the queue, in their prompt and in their answer; streams get an error and [DONE]."""
    decoding = Asking(server, stream=True, prompt="The access code", max_tokens=5000)
    server.wait_for("decode")
    asking = [Asking(server), Asking(server, stream=True), Asking(server, n=2, temperature=1.0)]
    # A stream whose headers have gone out can only be told by an event.
    wait_until(lambda: len(server.requests()) == 4 and asking[1].status > 0)
    engine, began = server.engine_pid, time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for client in (asking[0], asking[2]):
        assert client.result(5).status == 500
        assert json.loads(client.text)["error"]["code"] == "engine_dead"
    for client in (asking[1], decoding):
        *_, error, done = client.result(5).events
        assert json.loads(error)["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
    assert server.process.wait(10) == 1
    assert time.monotonic() - began < 5
    assert "killed by signal 9" in server.log
    assert not psutil.pid_exists(engine)


def test_a_hung_engine_makes_health_503_within_ten_seconds_and_a_busy_one_does_not(lasting: Running) -> None:
    """API-12."""
    client = Asking(lasting, stream=True)
    lasting.wait_for("prefill")
    assert lasting.http.get("/health").status_code == lasting.http.get("/ready").status_code == 200
    engine, began = lasting.engine_pid, time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    try:
        while lasting.http.get("/health").status_code == 200:
            assert time.monotonic() - began < 10
            time.sleep(0.1)
        answer = lasting.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["status"] == "hung"
    finally:
        os.kill(engine, signal.SIGCONT)
    assert client.result(60).events[-1] == "[DONE]"
    assert lasting.http.get("/health").status_code == 200


def test_sigterm_lets_requests_finish_refuses_others_and_ends_with_zero(server: Running) -> None:
    """API-20."""
    asking = [Asking(server, stream=True), Asking(server), Asking(server, prompt="The access code", max_tokens=200)]
    wait_until(lambda: len(server.requests()) == 3)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.http.get("/ready").status_code == 503)
    assert server.http.get("/health").status_code == 200
    late = server.post("/v1/completions", model="needle", prompt="The", max_tokens=1)
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "draining"
    assert int(late.headers["retry-after"]) > 0
    for client in asking:
        assert client.result(60).status == 200
    assert asking[0].events[-1] == "[DONE]"
    assert json.loads(asking[0].events[-2])["choices"][0]["finish_reason"] == "length"
    assert json.loads(asking[1].text)["usage"]["completion_tokens"] == 40
    assert server.process.wait(10) == 0


def test_a_second_sigterm_ends_at_once(server: Running) -> None:
    asking = [Asking(server, stream=True, max_tokens=6000), Asking(server, max_tokens=6000)]
    server.wait_for("prefill")
    while not asking[0].status or len(server.requests()) < 2:
        time.sleep(0.01)
    engine = server.engine_pid
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.process.wait(10) == 0
    assert not psutil.pid_exists(engine)
    assert json.loads(asking[0].result(5).events[-2])["error"]["code"] == "draining"
    assert asking[1].result(5).status == 503


def test_what_is_not_done_after_the_shutdown_timeout_ends_with_an_error_event(tmp_path: Path) -> None:
    with running("needle", *FLAGS, "--shutdown-timeout", "1", log=tmp_path / "log") as server:
        client = Asking(server, stream=True, prompt="The access code", max_tokens=19_000)
        server.wait_for("decode")
        server.process.send_signal(signal.SIGTERM)
        *_, error, done = client.result(20).events
        assert json.loads(error)["error"]["code"] == "draining"
        assert done == "[DONE]"
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_killed_client_gives_its_pages_back(lasting: Running, stream: bool, phase: str) -> None:
    """API-06, with a client that can say no goodbye: a process that is killed."""
    body = {
        "prompt": LONG if phase == "prefill" else "The access code", "max_tokens": 6000, "ignore_eos": True,
        "stream": stream, "cache_salt": uuid.uuid4().hex,
    }  # fmt: skip
    code = "import httpx, sys; httpx.post(sys.argv[1], content=sys.argv[2], timeout=600)"
    command = [sys.executable, "-c", code, f"{lasting.url}/v1/completions", json.dumps(body)]
    with subprocess.Popen(command) as client:
        lasting.wait_for(phase)
        assert lasting.pages_used() > 0
        client.kill()
    assert lasting.wait_until_idle(10) < 5
    assert lasting.post("/v1/completions", prompt="The access code", max_tokens=3).status_code == 200


def test_a_client_that_leaves_in_the_queue_leaves_nothing(lasting: Running) -> None:
    """n > 1 too; the connection is cut while others run."""
    running_one = Asking(lasting, stream=True, max_tokens=100)
    lasting.wait_for("prefill")
    for n in (1, 3):
        body = json.dumps({"prompt": LONG, "max_tokens": 50, "n": n, "temperature": 1.0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", lasting.port)) as raw:
            raw.sendall(head + body)
            wait_until(lambda: len(lasting.requests()) == 2)
        wait_until(lambda: len(lasting.requests()) == 1)
    assert running_one.result(60).events[-1] == "[DONE]"
    lasting.wait_until_idle()


def test_the_engine_ends_with_a_killed_server(server: Running) -> None:
    engine = psutil.Process(server.engine_pid)
    server.process.kill()
    _, alive = psutil.wait_procs([engine], timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("/nowhere/at/all",), "/nowhere/at/all"),
        (("needle", "--max-model-len", "99999999"), "--max-model-len"),
        (("needle", "--heartbeat-timeout", "1"), "--heartbeat-timeout"),
        (("needle", "--max-body-size", "many"), "--max-body-size"),
        (("needle", "--tool-call-parser", "nonsense"), "--tool-call-parser"),
        (("needle", "--chat-template", "{% broken"), "template"),
        (("needle", "--api-key", ""), "--api-key"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(AssertionError) as error, running(*flags, log=tmp_path / "log"):
        pass
    text = (tmp_path / "log").read_text()
    assert message in text.splitlines()[-1], error
    assert text.splitlines()[-1].startswith("longfill: error: ")
    assert "Traceback" not in text


def test_a_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with contextlib.suppress(AssertionError), running("needle", "--port", port, log=tmp_path / "log"):
            pytest.fail("it has started")
    text = (tmp_path / "log").read_text()
    assert f"--port {port}: cannot be had" in text
    assert "kernels" not in text


def test_a_certificate_that_cannot_be_used_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    files = tmp_path / "key.pem", tmp_path / "cert.pem"
    for file in files:
        file.write_text("no PEM")
    flags = ("--ssl-keyfile", str(files[0]), "--ssl-certfile", str(files[1]))
    with contextlib.suppress(AssertionError), running("needle", *flags, log=tmp_path / "log"):
        pytest.fail("it has started")
    text = (tmp_path / "log").read_text()
    assert f"longfill: error: --ssl-certfile {files[1]}" in text
    assert "kernels" not in text


def test_a_server_whose_output_is_closed_serves_and_ends_with_zero() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
    code = "from longfill.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "needle", "--host", "127.0.0.1", "--port", port, *FLAGS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], env=environment)
    try:
        until, url = time.monotonic() + 60, f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(f"{url}/health").status_code == 200
                break
            assert time.monotonic() < until
            time.sleep(0.1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_port_taken_while_the_model_is_loaded_is_said(tmp_path: Path) -> None:
    """Two sockets can be bound to one address, until one of them listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])

        def listen_once_it_is_bound() -> None:
            until = time.monotonic() + 60
            while not psutil.Process().children(recursive=True)[1:] and time.monotonic() < until:
                time.sleep(0.01)
            other.listen()

        threading.Thread(target=listen_once_it_is_bound, daemon=True).start()
        with contextlib.suppress(AssertionError), running("needle", "--port", port, log=tmp_path / "log"):
            pytest.fail("it has started")
    text = (tmp_path / "log").read_text()
    assert f"longfill: error: --host 127.0.0.1 --port {port}: cannot be had" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["x" * 120, "no such folder"])
def test_a_tmpdir_without_room_for_sockets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / name
    if name.startswith("x"):
        folder.mkdir()
    else:  # Python looks further, and ends in the current folder
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(folder)])
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ConfigError, match="TMPDIR"):
        EngineClient(EngineArgs(model="needle"), heartbeat_timeout=8, log_level="info")
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_signal_while_the_tokenizer_is_loaded_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)

    monkeypatch.setattr(serve, "EngineClient", Client)
    monkeypatch.setattr(serve, "_state", load)
    args, server_args = EngineArgs(model="needle"), ServerArgs(host="127.0.0.1", port=0)
    assert serve.run_server(args, server_args, on_ready=lambda *_: pytest.fail("it has started")) == 0


def test_a_deadline_ends_a_request_whose_client_does_not_read(server: Running) -> None:
    """The log-probabilities of its prompt fill what the sockets hold."""
    body = json.dumps(
        {
            "prompt": LONG[: len(LONG) // 2], "max_tokens": 12_000, "ignore_eos": True, "stream": True, "echo": True,
            "n": 4, "temperature": 1.0, "logprobs": 20, "timeout": 15,
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(head + body)
        server.wait_for("decode")
        until = time.monotonic() + 20
        while server.pages_used():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert server.requests(), "its client has read all of it; let it be sent more"


def test_a_signal_while_the_model_is_loaded_ends_it(tmp_path: Path) -> None:
    code = "from longfill.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "needle", "--host", "127.0.0.1", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    api = psutil.Process(process.pid)
    wait_until(lambda: bool(api.children()), 60)
    children = api.children()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
