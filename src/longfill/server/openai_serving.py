"""What all requests to the OpenAI endpoints share: the client, the model, the threads and the cache reports.

May import the client and everything of the OpenAI endpoints below `openai_call`. Invariant: made once at start, when the
engine is ready; raises what is wrong with templates, parsers or defaults then.
"""

from __future__ import annotations

from longfill.config import EngineArgs
from longfill.engine.tokenizer import Tokenizer
from longfill.server.args import ServerArgs
from longfill.server.cache_report import CacheReports
from longfill.server.client import EngineClient
from longfill.server.openai_endpoints import ChatEndpoint, CompletionEndpoint
from longfill.server.openai_model import ServedModel
from longfill.server.prompts import Lanes


class OpenAIServing:
    """Everything that a request needs beside itself."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, args: EngineArgs, server_args: ServerArgs
    ) -> None:
        self.client = client
        self.lanes = Lanes()
        self.model = ServedModel(
            client.ready,
            tokenizer,
            names=server_args.served_model_name or (args.model,),
            chat_template=server_args.chat_template,
            tool_call_parser=server_args.tool_call_parser,
            reasoning_parser=server_args.reasoning_parser,
            max_logprobs=server_args.max_logprobs,
            has_priorities=args.scheduling_policy == "priority",
        )
        self.reports = CacheReports(
            page_size=client.ready.page_size,
            enabled=args.enable_prefix_caching,
            decode=None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )
        self.chat = ChatEndpoint(self.model)
        self.completions = CompletionEndpoint(self.model)
        self.request_timeout = server_args.request_timeout
        self.sse_keepalive_interval = server_args.sse_keepalive_interval

    def close(self) -> None:
        """Let the threads end."""
        self.lanes.close()
