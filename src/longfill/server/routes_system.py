"""Health, metrics, who is being served, the effective configuration: what operators ask.

May import state and FastAPI. Invariant: none of these waits for the engine or for a thread, so that they answer while
a step runs and while prompts are being tokenised.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
import psutil
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import longfill
from longfill.server.admission import Ticket
from longfill.server.errors import ApiError
from longfill.server.state import AppState

OPERATOR = "key-0"
"""Who brings the first of several keys."""
MOST_REQUESTS = 200
"""That a list shows; a count stands beside it."""


def system_router(state: AppState) -> APIRouter:
    """Routes over one server's state."""
    router = APIRouter()
    process = psutil.Process()

    @router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)  # as SageMaker asks
    @router.api_route("/health", methods=["HEAD"], include_in_schema=False)
    @router.get("/health", summary="Whether the process lives: the engine computes, or waits for requests")
    async def health() -> Response:
        status, why = state.health
        return _status(status, why, good=("ok", "draining"))

    @router.api_route("/ready", methods=["HEAD"], include_in_schema=False)
    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> Response:
        status, why = state.health
        return _status(status, why, good=("ok",))

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": longfill.__version__}

    @router.get("/metrics", response_class=Response, summary="Prometheus metrics")
    async def metrics() -> Response:
        admission = state.admission
        text = state.metrics.render(
            state.client.ledger,
            alive=state.client.is_alive,
            rss_bytes=process.memory_info().rss,
            queued=(admission.num_queued_reqs, admission.num_queued_tokens),
            rejected=admission.num_rejected,
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/config", summary="The configuration in effect")
    async def config() -> dict[str, Any]:
        return effective_config(state)

    @router.get("/v1/requests", summary="Unfinished requests, oldest first, and how far each is")
    async def requests(request: Request) -> dict[str, Any]:
        shown = _visible(state, request)
        data = [request_object(ticket) for ticket in shown[:MOST_REQUESTS]]
        return {"object": "list", "data": data, "num_requests": len(shown)}

    @router.get(
        "/v1/requests/{request_id:path}",
        summary="One request, and how much of its prompt was cached and why",
        responses={404: {}},
    )
    async def one_request(request_id: str, request: Request) -> dict[str, Any]:
        found = [ticket for ticket in _visible(state, request) if ticket.request_id == request_id]
        tenant, report = state.cache_reports.last(request_id) or ("", None)
        known = report is not None and sees(request, tenant)
        cache = {"prefix_cache": msgspec.to_builtins(report)} if known else {}
        if found:
            return request_object(found[0]) | cache
        if not known:
            raise _unknown(request_id)
        return {"id": request_id, "state": "ended"} | cache

    @router.post(
        "/v1/requests/{request_id:path}/abort",
        summary="End a request; its client gets what it has",
        responses={404: {}},
    )
    async def abort(request_id: str, request: Request) -> dict[str, Any]:
        found = [ticket for ticket in _visible(state, request) if ticket.request_id == request_id]
        if not found:
            raise _unknown(request_id)
        for ticket in found:
            ticket.abort()
        return {"id": request_id, "aborted": True}

    return router


def effective_config(state: AppState) -> dict[str, Any]:
    """Every knob with its value, and what the engine made of them."""
    ready = state.client.ready
    return {
        "version": longfill.__version__,
        "engine": dataclasses.asdict(state.args),
        "server": state.server_args.report(),
        "model": {
            "folder": ready.model,
            "model_type": ready.model_type,
            "max_model_len": ready.max_model_len,
            "vocab_size": ready.vocab_size,
        },
        "memory": ready.memory,
        "kernels": ready.kernels,
        "num_threads": ready.num_threads,
        "block_size": ready.page_size,
        "num_gpu_blocks": ready.num_pages,
    }


def sees(request: Request, tenant: str) -> bool:
    """Whether a client may know of a tenant's requests: its own, and with the first key all."""
    own: str = request.state.tenant
    return own in ("", OPERATOR, tenant)


def _visible(state: AppState, request: Request) -> list[Ticket]:
    """The unfinished requests that a client may know of, oldest first."""
    return [ticket for ticket in state.admission.tickets.values() if sees(request, ticket.tenant)]


def request_list(state: AppState) -> list[dict[str, Any]]:
    """The oldest unfinished requests."""
    tickets = list(state.admission.tickets.values())[:MOST_REQUESTS]
    return [request_object(ticket) for ticket in tickets]


def request_object(ticket: Ticket) -> dict[str, Any]:
    """One request for the lists: its two numbers are sums over its prompts."""
    streams = ticket.streams
    states = {stream.state for stream in streams}
    estimates = [stream.estimated_prefill_seconds for stream in streams]
    cached = [stream.num_cached_tokens for stream in streams]
    return {
        "id": ticket.request_id,
        "endpoint": ticket.endpoint,
        "state": next((name for name in ("decode", "prefill", "waiting") if name in states), "tokenising"),
        "num_computed_tokens": sum(stream.num_computed_tokens for stream in streams),
        "num_tokens": sum(stream.num_tokens for stream in streams),
        "num_prompt_tokens": sum(stream.num_prompt_tokens for stream in streams),
        "num_cached_tokens": None if None in cached else sum(count or 0 for count in cached),
        "num_output_tokens": sum(stream.num_output_tokens for stream in streams),
        "num_preemptions": sum(stream.num_preemptions for stream in streams),
        "age_s": time.monotonic() - ticket.arrival,
        "estimated_prefill_s": max((each for each in estimates if each is not None), default=None),
        "priority": streams[0].request.priority if streams else 0,
        "stream": ticket.stream,
    }


def _status(status: str, why: str, *, good: tuple[str, ...]) -> Response:
    return JSONResponse({"status": status, "reason": why}, 200 if status in good else 503)


def _unknown(request_id: str) -> ApiError:
    return ApiError(404, f"no unfinished request has the id {request_id!r:.200}", code="request_not_found")
