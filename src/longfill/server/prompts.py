"""From a body's bytes to token ids, in threads beside the event loop.

May import the tokenizer, the templates and the protocol. Invariant: no step holds the interpreter for more than a few
milliseconds, whatever the size of the body, and a small body never waits for a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from longfill.engine.chat_template import ChatTemplates
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ConfigError
from longfill.request import TokenIds
from longfill.server.errors import bad_request
from longfill.server.protocol_chat import ChatFields

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Work on more than this takes the slow lane."""
_PIECE_BYTES = 64 * 1024
"""Token ids are read in pieces of this much JSON, between which other threads run."""


class Lanes:
    """Threads for short work and others for long work."""

    def __init__(self, threads: int = 2) -> None:
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="short")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="long")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(...)` in a thread of the lane for work on `size` bytes. Cancelled, it does not begin."""
        lane = self._long if size > LARGE_BYTES else self._short
        return await asyncio.wrap_future(lane.submit(function, *args, **kwargs))

    def close(self) -> None:
        """Let the threads end; what waits for one does not begin."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it, and as text where there is a text."""

    token_ids: TokenIds
    text: str | None = None


def read_body(body: bytes) -> dict[str, Any]:
    """The body's fields; `prompt` and `tokens` as `msgspec.Raw`. Raises ApiError where it is not a JSON object."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {
            name: value if name in ("prompt", "tokens") else msgspec.json.decode(value) for name, value in raw.items()
        }
    except RecursionError:
        raise bad_request("the body is nested too deeply to be read", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not a JSON object: {error}", code="invalid_json") from None


def read_prompts(raw: msgspec.Raw, vocab_size: int) -> list[str | TokenIds]:
    """The prompts of a completion: each a text or an array of token ids."""
    try:
        first = bytes(raw)[:64].lstrip()
        if first.startswith(b"["):
            inner = first[1:].lstrip()[:1]
            if inner == b"[":
                return [read_ids(each, vocab_size) for each in msgspec.json.decode(raw, type=list[msgspec.Raw])]
            if inner == b'"':
                return list(msgspec.json.decode(raw, type=list[str]))
            return [read_ids(raw, vocab_size)]
        return [msgspec.json.decode(raw, type=str)]
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(
            "prompt must be a text, a list of texts, a list of token ids or a list of such lists", param="prompt"
        ) from None


def read_text(raw: Any, param: str) -> str:
    """A text that `read_body` left unread."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        raise bad_request(f"{param} must be a text", param=param) from None


def read_ids(raw: msgspec.Raw, vocab_size: int, param: str = "prompt") -> TokenIds:
    """A JSON list of token ids: int64 [tokens]. Raises ApiError for anything else, and for ids out of range."""
    text = bytes(raw).strip()
    try:
        pieces = [np.array(msgspec.json.decode(piece, type=list[int]), np.int64) for piece in _pieces(text)]
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"{param} must be a list of token ids, all integers", param=param) from None
    except OverflowError:
        raise bad_request(f"{param}: token ids go from 0 to {vocab_size - 1}", param=param) from None
    ids = np.concatenate(pieces)
    if ids.size == 0:
        raise bad_request(f"{param} is empty; give at least one token", param=param)
    for worst in (int(ids.min()), int(ids.max())):
        if not 0 <= worst < vocab_size:
            raise bad_request(f"{param}: token ids go from 0 to {vocab_size - 1}, got {worst}", param=param)
    return ids


def _pieces(text: bytes) -> list[bytes]:
    """A JSON list as several lists of the same elements, if these are numbers; otherwise none of them can be read."""
    if len(text) <= _PIECE_BYTES or not (text.startswith(b"[") and text.endswith(b"]")):
        return [text]
    inner, pieces, start = text[1:-1], [], 0
    while start < len(inner):
        end = inner.find(b",", start + _PIECE_BYTES)
        end = len(inner) if end < 0 else end
        pieces.append(b"[%b]" % inner[start:end])
        start = end + 1
    return pieces or [text]


class Prompter:
    """Makes prompts with the model's tokenizer and templates. Its methods run in the lanes' threads."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.templates = _templates(tokenizer, chat_template)
        self.templates.compile()  # one that is broken is said at start, not to the first client

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises ApiError where the server runs without one."""
        if self.tokenizer is None:
            raise bad_request(f"{what}: the server runs with --skip-tokenizer-init; send token ids", param=what)
        return self.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> Prompt:
        """A text's token ids."""
        ids = self.need_tokenizer(param).encode(text, add_special_tokens=add_special_tokens)
        if ids.size == 0:
            raise bad_request(f"{param} is empty; give at least one token", param=param)
        return Prompt(ids, text)

    def chat(self, body: ChatFields, variables: Mapping[str, Any]) -> Prompt:
        """A conversation's token ids; the text is what the template gave."""
        return self.encode(self.render(body, variables), add_special_tokens=False, param="messages")

    def render(self, body: ChatFields, variables: Mapping[str, Any]) -> str:
        """A conversation as text."""
        self.need_tokenizer("messages")
        if not self.templates:
            raise bad_request(
                "messages: this model has no chat template; start the server with --chat-template, or send the prompt "
                "to /v1/completions",
                param="messages",
            )
        messages = [message.for_template() for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        go_on = bool(body.continue_final_message)
        try:
            text = self.templates.render(
                messages,
                add_generation_prompt=not go_on if body.add_generation_prompt is None else body.add_generation_prompt,
                tools=tools,
                **{**variables, **(body.chat_template_kwargs or {})},
            )
        except RecursionError:
            raise bad_request("messages: nested too deeply for the chat template", param="messages") from None
        return _cut_behind(text, messages[-1]["content"]) if go_on else text


def _cut_behind(text: str, content: str) -> str:
    """The conversation up to the end of its last message's content, without what the template closes it with."""
    at = text.rfind(content)
    if at >= 0:
        return text[: at + len(content)]
    at = text.rfind(content.strip())  # a template may strip it
    if at < 0 or not content.strip():
        raise bad_request(
            "continue_final_message: the chat template does not show the last message as it is", param="messages"
        )
    return text[: at + len(content.strip())]


def _templates(tokenizer: Tokenizer | None, given: str | None) -> ChatTemplates:
    """The model's templates, or the one of --chat-template: a file, or the template itself."""
    if given is None:
        return ChatTemplates({}, {}, "this server") if tokenizer is None else tokenizer.chat_templates
    special = {} if tokenizer is None else tokenizer.special_tokens
    if "{" in given or "\n" in given:
        return ChatTemplates({"default": given}, special, "--chat-template")
    if not Path(given).is_file():
        raise ConfigError(f"--chat-template: {given} is neither a file nor a Jinja template")
    return ChatTemplates({"default": Path(given).read_text(encoding="utf-8")}, special, given)
