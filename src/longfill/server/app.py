"""The application: state, gate and routes put together.

May import the server's other files and FastAPI. Invariant: every answer that is no success has OpenAI's error object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import longfill
from longfill.server.errors import ApiError
from longfill.server.gate import Gate
from longfill.server.live import live_router
from longfill.server.routes_openai import openai_router
from longfill.server.routes_system import system_router
from longfill.server.state import AppState


def make_app(state: AppState) -> FastAPI:
    """The ASGI application over a server's state, whose engine is ready."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.lanes.close()

    app = FastAPI(
        title="longfill",
        version=longfill.__version__,
        description="OpenAI-compatible API for prompts that take minutes.",
        lifespan=lifespan,
    )
    app.root_path = state.server_args.root_path.rstrip("/")
    app.include_router(system_router(state))
    app.include_router(live_router(state))
    app.include_router(openai_router(state))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, state=state)
    if state.server_args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.server_args.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    answer = ApiError(
        error.status_code,
        words.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code, "http_error"),
        headers=dict(error.headers or {}),
    )
    return answer.response()
