"""A real HTTP server that answers as told: an OpenAI-compatible API with fixed times, to measure a measuring client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class Script:
    """How the server answers; tests change it between requests."""

    first: float = 0.0
    """Seconds to the first token."""
    gap: float = 0.0
    """Seconds from token to token."""
    template: int = 0
    """Tokens that the server adds to a prompt."""
    lost: int = 0
    """Tokens of a prompt that it drops."""
    cached: int | None = 0
    tokens_per_chunk: int = 1
    stops_after: int | None = None
    """Tokens after which the output ends by itself, unless told to ignore the end."""
    honours_ignore_eos: bool = True
    usage: bool = True
    tokenize: bool = True
    model: dict[str, Any] = field(
        default_factory=lambda: {"id": "scripted", "vocab_size": 1000, "max_model_len": 100_000}
    )
    fails: str = ""
    """A way to fail, of requests for more than one token."""
    fail_every: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What it was asked, in order."""
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    num_long: int = 0

    @property
    def timed(self) -> list[dict[str, Any]]:
        """Requests for more than one token: those of the run, and warm-ups."""
        return [body for body in self.bodies if body["max_tokens"] > 1]

    def num_tokens(self, content: str | list[int]) -> int:
        """A token is a word, but long words are two."""
        if isinstance(content, str):
            return self.template + sum(1 + (len(word) > 7) for word in content.split()) - self.lost
        return self.template + len(content) - self.lost


def content_of(body: dict[str, Any]) -> str | list[int]:
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def stream(script: Script, body: dict[str, Any], failing: str) -> AsyncIterator[bytes]:
    # A body that should have been refused may ask for any number.
    chat, asked = "messages" in body, min(body["max_tokens"], 1000)

    def choice(text: str, reason: str | None = None) -> list[dict[str, Any]]:
        shown = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        return [{"index": 0, **shown, "finish_reason": reason}]

    script.running += 1
    script.most_running = max(script.most_running, script.running)
    try:
        if chat:
            yield chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        yield b": still computing\n\nevent: prefill_progress\n" + chunk(choices=[], done=1, total=2)
        await asyncio.sleep(script.first)
        ends = script.stops_after is not None and not (script.honours_ignore_eos and body.get("ignore_eos"))
        count = min(asked, script.stops_after) if ends else asked
        if failing == "error":
            yield chunk(error={"message": "the engine is gone", "code": 500}) + b"data: [DONE]\n\n"
            return
        for made in range(0, count, script.tokens_per_chunk):
            if made:
                await asyncio.sleep(script.gap)
            if failing == "cut" and made:
                return
            if failing == "drop" and made:
                raise ConnectionError("scripted")
            yield chunk(choices=choice("x" * min(script.tokens_per_chunk, count - made)))
        if failing == "hang":
            await asyncio.sleep(30)
        reason = "abort" if failing == "abort" else "length" if count == asked else "stop"
        yield chunk(choices=choice("", reason))
        if script.usage:
            assert body["stream_options"] == {"include_usage": True}
            prompt = script.num_tokens(content_of(body))
            details = None if script.cached is None else {"cached_tokens": min(script.cached, prompt)}
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "prompt_tokens_details": details}
            yield chunk(choices=[], usage=usage)
        yield b"data: [DONE]\n\n"
    finally:
        script.running -= 1


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [script.model]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if not script.tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"count": script.num_tokens(content_of(await request.json()))})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        script.headers.append(dict(request.headers))
        script.num_long += body["max_tokens"] > 1
        failing = script.fails if body["max_tokens"] > 1 and script.num_long % script.fail_every == 0 else ""
        if failing == "busy":
            return JSONResponse({"error": {"message": "too many requests wait"}}, 429, {"retry-after": "3"})
        if failing == "refuse":
            return JSONResponse({"error": {"message": "no such field", "code": 400}}, 400)
        if failing == "plain":
            return JSONResponse({"choices": []})
        if failing == "babble":
            return Response(b"data: what?\n\n", media_type="text/event-stream")
        return StreamingResponse(stream(script, body, failing), media_type="text/event-stream")

    return app


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a running server."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(script), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()
