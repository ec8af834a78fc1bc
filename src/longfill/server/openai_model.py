"""The served model as the OpenAI endpoints need it: its names, limits, defaults, templates and output formats.

May import the tokenizer, token_bytes, parsers, prompts and sampling. Invariant: made once, before the first request, so
that a template or parser that cannot work is an error at start; nothing in it changes afterwards.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError, RequestError
from longfill.request import SamplingParams, StructuredOutputsParams
from longfill.server.errors import ApiError, bad_request
from longfill.server.messages import EngineReady
from longfill.server.openai_logprobs import TokenSpeller
from longfill.server.parsers import REASONING_FORMATS, TOOL_FORMATS, formats_for
from longfill.server.prompts import Prompter
from longfill.server.protocol_responses import ModelCard, ModelList
from longfill.server.sampling import SamplingLimits, generation_defaults
from longfill.worker.structured import StructuredOutputs

logger = logging.getLogger(__name__)

_TAG = re.compile("think|tool|arg_key|arg_value|DSML")


class ServedModel:
    """What requests are checked against."""

    def __init__(
        self,
        ready: EngineReady,
        tokenizer: Tokenizer | None,
        forms: StructuredOutputs | None,
        *,
        names: Sequence[str],
        chat_template: str | None,
        tool_call_parser: str,
        reasoning_parser: str,
        max_logprobs: int,
        has_priorities: bool,
    ) -> None:
        self.names = list(names)
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self.limits = SamplingLimits(ready.vocab_size, max_logprobs, has_priorities)
        self.defaults: dict[str, Any] = generation_defaults(Path(ready.model))
        self.prompter = Prompter(tokenizer, chat_template)
        self.speller = TokenSpeller(tokenizer)
        tool, reasoning = formats_for(ready.model_type)
        self.tool_format = _format("--tool-call-parser", tool_call_parser, tool, TOOL_FORMATS)
        self.reasoning_format = _format("--reasoning-parser", reasoning_parser, reasoning, REASONING_FORMATS)
        special = () if tokenizer is None else tokenizer.special_token_ids
        self.tags_are_special = any(_TAG.search(self.speller.string_of(token)) for token in special)
        """Whether tags of tool calls or reasoning are tokens that `skip_special_tokens` would leave out."""
        if not self.prompter.templates:
            logger.warning("there is no chat template: chats are refused; give one with --chat-template")
        self._ready = ready
        self._forms = forms
        self._created = int(time.time())

    @property
    def name(self) -> str:
        """What answers call the model that did not get a name from the client."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model {name!r:.200} is not served here; there is {', '.join(self.names)} (see /v1/models)",
                code="model_not_found",
                param="model",
            )

    def check_text_needs(self, params: SamplingParams) -> None:
        """Raise ApiError for what needs a tokenizer, where there is none."""
        if self.prompter.tokenizer is not None:
            return
        for name in ("stop", "structured_outputs"):
            if getattr(params, name):
                self.prompter.need_tokenizer(name)

    def check_form(self, form: StructuredOutputsParams | None, param: str) -> None:
        """Raise ApiError for a form that outputs cannot be held to; `param` is the field that asked for it."""
        if form is None or self._forms is None:
            return
        try:
            self._forms.validate(form)
        except RequestError as error:
            raise bad_request(f"{param}: {error}", param=param) from None

    def cards(self) -> ModelList:
        """The answer of /v1/models."""
        return ModelList([self._card(name) for name in self.names])

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=self._ready.model,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )


def _format(flag: str, wanted: str, own: str | None, known: Sequence[str]) -> str | None:
    if wanted == "auto":
        return own
    if wanted == "none":
        return None
    if wanted not in known:
        raise ConfigError(f"{flag}: {wanted!r} is not known; give auto, none or one of {', '.join(known)}")
    return wanted
