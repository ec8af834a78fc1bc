"""What all requests to the OpenAI endpoints share: the client, the model, the threads and the cache reports.

May import state and what the endpoints are made of, below `openai_call`. Invariant: made once at start, when the engine
is ready; raises then what is wrong with templates, parsers or defaults.
"""

from __future__ import annotations

from longfill.server.openai_endpoints import ChatEndpoint, CompletionEndpoint
from longfill.server.openai_model import ServedModel
from longfill.server.state import AppState


class OpenAIServing:
    """Everything that a request needs beside itself."""

    def __init__(self, state: AppState) -> None:
        server_args = state.server_args
        self.client = state.client
        self.lanes = state.lanes
        self.reports = state.cache_reports
        self.model = ServedModel(
            state.client.ready,
            state.tokenizer,
            state.forms,
            names=state.model_names,
            chat_template=server_args.chat_template,
            tool_call_parser=server_args.tool_call_parser,
            reasoning_parser=server_args.reasoning_parser,
            max_logprobs=server_args.max_logprobs,
            has_priorities=state.args.scheduling_policy == "priority",
        )
        self.chat = ChatEndpoint(self.model)
        self.completions = CompletionEndpoint(self.model)
        self.request_timeout = server_args.request_timeout
        self.sse_keepalive_interval = server_args.sse_keepalive_interval
