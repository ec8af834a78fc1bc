"""Renders a model's own Jinja chat template, in a sandbox, as transformers does; or a format built in, without one.

May import errors, jinja2 and the formats built in. Invariant: rendering depends on the messages and the arguments only
(but for templates that ask for the date), so the same history gives the same bytes and keeps its cached prefix.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longfill.engine import deepseek_v32_chat
from longfill.errors import ModelError, RequestError

Message = Mapping[str, Any]
Encoder = Callable[..., str]

BUILT_IN: Mapping[str, Encoder] = {"deepseek_v32": deepseek_v32_chat.render}
"""By model_type: what renders conversations where the folder has no template."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients pass a message's reasoning; templates read the first (some the second)."""


class ChatTemplates:
    """The templates of one model folder, compiled when first used: `default` and perhaps `tool_use` and others.

    False where there is none, and no built-in encoder for the model: then conversations cannot be rendered.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        origin: str,
        built_in: Encoder | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._origin = origin
        self._built_in = None if sources else built_in
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(
        cls, folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], model_type: str | None = None
    ) -> ChatTemplates:
        """Templates of `tokenizer_config.json` (passed as `config`), overridden by the `.jinja` files of the folder.

        Without any, the encoder built in for `model_type`, if there is one.
        """
        inline = config.get("chat_template")
        sources: dict[str, str] = {}
        if isinstance(inline, str):
            sources["default"] = inline
        elif isinstance(inline, list):
            sources |= {entry["name"]: entry["template"] for entry in inline}
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        sources |= {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return cls(sources, special_tokens, str(folder), BUILT_IN.get(model_type or ""))

    def __bool__(self) -> bool:
        return bool(self._sources or self._built_in)

    def takes(self, variable: str) -> bool:
        """Whether a template reads this variable; False for one that cannot be parsed, which `render` reports."""
        if self._built_in:
            return variable in inspect.getfullargspec(self._built_in).kwonlyargs
        return any(variable in _variables(source) for source in self._sources.values())

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt's text. `variables` (`tools`, `documents`, `enable_thinking`...) are handed to the template.

        Raises ModelError for a missing or broken template and RequestError for messages that it refuses.
        """
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(f"messages: each must be an object with role and content, got {message!r}")
        messages = [_with_reasoning(message) for message in messages]
        if self._built_in:
            return self._built_in(messages, add_generation_prompt=add_generation_prompt, **variables)
        messages = [_with_arguments(index, message) for index, message in enumerate(messages)]
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        template = self._choose(with_tools=bool(given["tools"]))
        try:
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # the template is a program of the model's authors; whatever it raises is its answer
            raise RequestError(f"the chat template of {self._origin} refuses these messages: {error}") from error

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            others = f" (only {', '.join(self._sources)})" if self._sources else ""
            raise ModelError(
                f"{self._origin}: no default chat template{others}; put one into chat_template.jinja beside "
                "tokenizer.json, or send the prompt as plain text or token ids"
            )
        return self._template(name)

    def compile(self) -> None:
        """Compile every template now. Raises ModelError, with the line, for one that is no Jinja."""
        for name in self._sources:
            self._template(name)

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                where = f"{self._origin}: chat template {name!r}, line {error.lineno}"
                raise ModelError(f"{where}: {error.message}") from error
        return self._compiled[name]


@cache
def _variables(source: str) -> frozenset[str]:
    environment = _environment()
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
    except jinja2.TemplateSyntaxError:
        return frozenset()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, with which training marks the assistant's part: a plain scope here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    provided: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(provided)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Arguments(dict[str, Any]):
    """A call's arguments as an object and as JSON text, the client's own if it sent text: templates want either."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


def _with_arguments(index: int, message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(index, call) for call in calls]}


def _with_object(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    if given in (None, ""):
        given = {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise RequestError(f"messages[{index}]: the arguments of a tool call are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"messages[{index}]: the arguments of a tool call must be an object, got {text:.100}")
    return {**call, "function": {**function, "arguments": _Arguments(text, values)}}


def _with_reasoning(message: Message) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
