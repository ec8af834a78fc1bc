"""A client of any OpenAI-compatible server: what it serves, how many tokens a prompt is, and one request timed.

Imports httpx, which comes with the extra `server`. Invariant: sending a request never raises; what went wrong is in
the answer, by kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from longfill.bench.serve_metrics import Answer
from longfill.bench.serve_plan import Job
from longfill.bench.serve_stream import Stream, StreamError, error_message
from longfill.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BROKEN_OUTPUTS = ("error", "abort")
"""Finish reasons of outputs that the server gave up."""
PROBE_TIMEOUT = 600.0
"""Seconds for each request before the run: the server may be computing for others."""


@dataclass(frozen=True)
class Target:
    """Where requests go and what each carries beside its prompt."""

    base_url: str
    endpoint: str
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 6 * 3600.0
    """Seconds for a request from sending to its end."""

    @property
    def chat(self) -> bool:
        """Whether prompts are messages."""
        return self.endpoint.endswith("/chat/completions")

    def body(self, prompt: Any, max_tokens: int) -> bytes:
        """The request's JSON. It is made before the run: for a long prompt it takes longer than a token."""
        place: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        head = {"model": self.model, **place, "max_tokens": max_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(head | stream | dict(self.fields), separators=(",", ":")).encode()


class Connection:
    """An HTTP client for one server, a connection for each request in flight."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._http = httpx.AsyncClient(
            base_url=target.base_url,
            headers={"content-type": "application/json", **target.headers},
            timeout=httpx.Timeout(None, connect=60.0),
            # Kept for less than servers keep them, so that none is closed under a request.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,  # a proxy would be measured too
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves; raises ConfigError where it cannot be asked."""
        response = await self._ask("GET", "/v1/models")
        data = response.get("data")
        if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
            raise ConfigError(f"{self.target.base_url}/v1/models does not list models")
        return data

    async def tokenize(self, prompt: str) -> int | None:
        """How many tokens the prompt is with what the server adds; None where it has no such route."""
        place: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.target.chat else {"prompt": prompt}
        )
        try:
            response = await self._http.post(
                "/tokenize", json={"model": self.target.model, **place}, timeout=PROBE_TIMEOUT
            )
            count = response.json().get("count") if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return count if isinstance(count, int) else None

    async def count(self, prompt: Any) -> int:
        """Tokens of a prompt by the usage of a request for one token; raises ConfigError where it fails."""
        answer = await self.send(Job(-1, 0, 0, 1, 0.0), self.target.body(prompt, 1), time.perf_counter(), "probe")
        if answer.failure is not None:
            raise ConfigError(f"{self.target.base_url}{self.target.endpoint}: {answer.failure}: {answer.message}")
        if answer.prompt_tokens is None:
            raise ConfigError(
                f"{self.target.base_url}{self.target.endpoint} reports no usage in its streams, so that the lengths of "
                "prompts cannot be checked"
            )
        return answer.prompt_tokens

    async def send(self, job: Job, body: bytes, start: float, request_id: str) -> Answer:
        """Send a request and follow its stream; times are from `start`, by `time.perf_counter`."""
        answer = Answer(job, sent=time.perf_counter() - start)
        stream = Stream(answer.sent)
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._follow(body, request_id, stream, start)
        except _FailedError as failed:
            answer.failure, answer.message = failed.args
        except (TimeoutError, httpx.TimeoutException):
            answer.failure, answer.message = "timeout", f"no end after {self.target.timeout:,.0f} s"
        except httpx.ConnectError as error:
            answer.failure, answer.message = "no connection", _text(error)
        except StreamError as error:
            answer.failure, answer.message = "bad stream", str(error)
        except httpx.HTTPError as error:
            answer.failure, answer.message = "disconnected", _text(error)
        answer.ended = time.perf_counter() - start
        answer.token_times, answer.first = stream.token_times, stream.first_token
        answer.prompt_tokens = stream.count("prompt_tokens")
        answer.completion_tokens = stream.count("completion_tokens")
        answer.cached_tokens = stream.cached_tokens
        answer.longest_silence = stream.longest_silence
        return answer

    async def _follow(self, body: bytes, request_id: str, stream: Stream, start: float) -> None:
        """Feed the answer to `stream`; raises _FailedError for one that did not come to its end."""
        async with self._post(body, request_id) as response:
            stream.heard(time.perf_counter() - start)
            if response.status_code != 200:
                kind = "rejected" if response.status_code == 429 else f"HTTP {response.status_code}"
                raise _FailedError(kind, _refusal(await response.aread()))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise _FailedError("bad stream", f"content type {response.headers.get('content-type')!r}")
            async for piece in response.aiter_bytes():
                stream.feed(piece, time.perf_counter() - start)
        if stream.error is not None:
            raise _FailedError("error in the stream", stream.error)
        if not stream.done or stream.finish_reason is None:
            missing = "a finish reason" if stream.done else "[DONE]"
            raise _FailedError("cut short", f"the stream ended without {missing}")
        if stream.finish_reason in BROKEN_OUTPUTS:
            raise _FailedError(f"finish reason {stream.finish_reason}", "the server gave the output up")

    @contextlib.asynccontextmanager
    async def _post(self, body: bytes, request_id: str) -> AsyncIterator[httpx.Response]:
        headers = {"x-request-id": request_id, "accept": "text/event-stream"}
        request = self._http.build_request("POST", self.target.endpoint, content=body, headers=headers)
        response = await self._http.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()

    async def _ask(self, method: str, path: str) -> dict[str, Any]:
        where = f"{self.target.base_url}{path}"
        try:
            response = await self._http.request(method, path, timeout=PROBE_TIMEOUT)
            value = response.json() if response.status_code == 200 else None
        except httpx.HTTPError as error:
            raise ConfigError(f"cannot reach {where}: {_text(error)}") from None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"{where} answers {response.status_code}: {_refusal(response.content)}")
        return value


class _FailedError(Exception):
    """(kind, message) of a request that failed."""


def _refusal(content: bytes) -> str:
    try:
        return error_message(json.loads(content))
    except ValueError:
        return error_message(content.decode("utf-8", "replace") or "(no body)")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
