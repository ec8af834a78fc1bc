"""`longfill serve`: the OpenAI API over an engine, until a signal ends it.

Imports the server when it is asked for, so that help stays quick and needs none of its packages. Invariant: what is
shown goes to stderr; the last line before requests are taken says where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longfill.cli.console import duration, size, stderr
from longfill.cli.flags import engine_flags
from longfill.config import EngineArgs
from longfill.errors import ConfigError

if TYPE_CHECKING:
    from longfill.server.state import AppState

PANEL = "Server"
LIMITS = "Limits"


@engine_flags()
def serve(
    engine: EngineArgs,
    host: Annotated[str, typer.Option(help="Address to listen on", rich_help_panel=PANEL)] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port (0: any free one)", rich_help_panel=PANEL)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LONGFILL_API_KEY",
            metavar="KEY",
            help="A key that clients may bring; repeatable, each its own tenant",
            rich_help_panel=PANEL,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeatable", rich_help_panel=PANEL)
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file, or the template itself", rich_help_panel=PANEL)
    ] = None,
    tool_call_parser: Annotated[
        str, typer.Option(help="Format of tool calls, or auto, or none", rich_help_panel=PANEL)
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="Format of reasoning, or auto, or none", rich_help_panel=PANEL)
    ] = "auto",
    cache_salt: Annotated[
        str | None, typer.Option(help="Salt of the prefix cache for all, over the client's", rich_help_panel=PANEL)
    ] = None,
    sse_keepalive_interval: Annotated[
        float, typer.Option(help="A silent stream sends a comment this often (s)", rich_help_panel=PANEL)
    ] = 5.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="An engine that does nothing for so long is hung (s)", rich_help_panel=PANEL)
    ] = 8.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="What requests get to finish after SIGTERM (s)", rich_help_panel=PANEL)
    ] = 120.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error", rich_help_panel=PANEL)] = "info",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may call it (CORS); repeatable", rich_help_panel=PANEL),
    ] = None,
    root_path: Annotated[str, typer.Option(help="Where a proxy has put it", rich_help_panel=PANEL)] = "",
    ssl_keyfile: Annotated[str | None, typer.Option(help="Key, for HTTPS", rich_help_panel=PANEL)] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate, for HTTPS", rich_help_panel=PANEL)] = None,
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest body of a request", rich_help_panel=LIMITS)
    ] = "64MiB",
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Requests that may wait for a first token; then 429", rich_help_panel=LIMITS)
    ] = 1024,
    max_num_queued_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that may wait; then 429", rich_help_panel=LIMITS)
    ] = 8 * 2**20,
    request_timeout: Annotated[
        float | None, typer.Option(help="Longest that a request may take (s)", rich_help_panel=LIMITS)
    ] = None,
    max_logprobs: Annotated[int, typer.Option(help="Most log-probabilities of a token", rich_help_panel=LIMITS)] = 20,
) -> int:
    """Serve a model over the OpenAI API."""
    try:
        from longfill.server.args import ServerArgs
        from longfill.server.serve import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve needs packages that are not installed ({error.name}): pip install 'longfill[server]'"
        ) from None
    server_args = ServerArgs(
        host=host,
        port=port,
        api_key=tuple(api_key or ()),
        served_model_name=tuple(served_model_name or ()),
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        cache_salt=cache_salt,
        sse_keepalive_interval=sse_keepalive_interval,
        heartbeat_timeout=heartbeat_timeout,
        shutdown_timeout=shutdown_timeout,
        log_level=log_level,
        allowed_origins=tuple(allowed_origins or ()),
        root_path=root_path,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        max_body_size=max_body_size,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        request_timeout=request_timeout,
        max_logprobs=max_logprobs,
    )
    stderr().print(f"longfill: loading {engine.model}")
    return run_server(engine, server_args, on_ready=_show)


def _show(state: AppState, url: str) -> None:
    """What was reserved, and where requests are taken."""
    ready, console = state.client.ready, stderr()
    memory = ready.memory
    console.print(
        f"longfill: ready in {duration(state.load_seconds)}; {size(memory['reserved'])} of {size(memory['budget'])} "
        f"reserved, {ready.num_pages:,} pages of {ready.page_size} tokens, prompts up to {ready.max_model_len:,}",
        soft_wrap=True,
    )
    if not state.server_args.api_key:
        console.print("longfill: no --api-key: whoever reaches the address may use it", soft_wrap=True)
    console.print(f"longfill: serving {state.model_names[0]} at {url}", soft_wrap=True)
