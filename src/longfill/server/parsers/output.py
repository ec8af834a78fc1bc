"""Turns a completion's text, as it comes, into reasoning, content and tool calls, in the format of its model.

May import the other modules of parsers. Invariant: the events, with neighbouring texts joined, are the same however
the text was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longfill.server.parsers.calls import CallReader, ToolFormat
from longfill.server.parsers.events import ContentText, Event, ReasoningText, ToolCallArguments
from longfill.server.parsers.incoming import SPACE, Incoming, Shape, Steps, Tags
from longfill.server.parsers.plain_json import DeepSeekV3, DeepSeekV31
from longfill.server.parsers.tagged import DeepSeekV32, Glm

_TOOLS: dict[str, ToolFormat] = {
    "glm45": Glm(),
    "glm47": Glm(),
    "deepseek_v3": DeepSeekV3(),
    "deepseek_v31": DeepSeekV31(),
    "deepseek_v32": DeepSeekV32(),
}
TOOL_FORMATS = tuple(_TOOLS)
"""Names as of vLLM's --tool-call-parser."""

_ASSISTANT = {
    "glm45": "<|assistant|>",
    "glm47": "<|assistant|>",
    "deepseek_r1": "<｜Assistant｜>",
    "deepseek_v3": "<｜Assistant｜>",
}
"""All write `<think>...</think>`; the mark is what a prompt has before the assistant's part."""
REASONING_FORMATS = tuple(_ASSISTANT)
"""Names as of vLLM's --reasoning-parser."""

_BY_MODEL_TYPE = {
    "glm_moe_dsa": ("glm47", "glm45"),
    "glm4_moe_lite": ("glm47", "glm45"),
    "glm4_moe": ("glm45", "glm45"),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
}

_THINK, _THINK_END = "<think>", "</think>"
_OPENS, _CLOSES = Shape(SPACE, _THINK), Shape(SPACE, _THINK_END)


def formats_for(model_type: str) -> tuple[str | None, str | None]:
    """The tool format and the reasoning format of a config.json's model_type, each None where it has none."""
    return _BY_MODEL_TYPE.get(model_type, (None, None))


def starts_in_reasoning(reasoning_format: str | None, rendered_prompt: str) -> bool:
    """Whether the prompt's end leaves the model inside `<think>`."""
    if reasoning_format is None:
        return False
    mark = rendered_prompt.rfind(_ASSISTANT[reasoning_format])
    if mark < 0:
        return rendered_prompt.rstrip().endswith(_THINK)
    return rendered_prompt.rfind(_THINK, mark) > rendered_prompt.rfind(_THINK_END, mark)


def make_parser(
    *,
    tool_format: str | None,
    reasoning_format: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    starts_in_reasoning: bool,
) -> OutputParser:
    """A parser for one completion. Formats are names of `TOOL_FORMATS` and `REASONING_FORMATS`.

    Without tools nothing is read as a call, without a reasoning format nothing as reasoning. The text must come with
    its special tokens (`skip_special_tokens=False`): in some tokenizers the tags are such.
    """
    if reasoning_format is not None and reasoning_format not in _ASSISTANT:
        raise ValueError(f"no reasoning format {reasoning_format!r}; there are {', '.join(REASONING_FORMATS)}")
    if tool_format is not None and tool_format not in _TOOLS:
        raise ValueError(f"no tool format {tool_format!r}; there are {', '.join(TOOL_FORMATS)}")
    form = _TOOLS[tool_format] if tool_format and tools else None
    reasons = reasoning_format is not None
    return OutputParser(form, tools or (), reasons=reasons, starts_in_reasoning=starts_in_reasoning)


class OutputParser:
    """One completion's text: `feed` as it comes, then `finish` once. Made by `make_parser`."""

    def __init__(
        self, form: ToolFormat | None, tools: Sequence[Mapping[str, Any]], *, reasons: bool, starts_in_reasoning: bool
    ) -> None:
        self._incoming = Incoming()
        self._events: list[Event] = []
        self._form = form
        self._calls = CallReader(form, tools, self._incoming, self._events.append) if form else None
        self._content = _Content(form, self._events)
        self._steps = self._run(reasons, reasons and starts_in_reasoning)

    def feed(self, text: str) -> list[Event]:
        """Events that are certain now."""
        self._incoming.add(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The events that waited for more text, now that none comes."""
        self._incoming.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events = _joined(self._events)
        self._events.clear()
        return events

    def _run(self, reasons: bool, in_reasoning: bool) -> Steps[None]:
        if reasons:
            opened = yield from self._incoming.one_of(_OPENS, *(() if in_reasoning else (_CLOSES,)))
            if in_reasoning or (opened and opened.re is _OPENS.full):
                yield from self._read_reasoning()
        yield from self._read_content()

    def _read_reasoning(self) -> Steps[None]:
        openings = self._form.openings if self._form else ()
        tags = Tags(_THINK_END, *openings)
        while tag := (yield from self._incoming.until(tags, self._reason)):
            if tag == _THINK_END:
                self._incoming.take(len(tag))
                return
            # A call without `</think>` before ends the reasoning, if it is one and not just talked about.
            assert self._calls is not None
            if (yield from self._calls.read(tentative=True)):
                yield from self._incoming.one_of(_CLOSES)
                return
            self._reason(self._incoming.take(len(tag)))

    def _reason(self, text: str) -> None:
        self._events.append(ReasoningText(text))

    def _read_content(self) -> Steps[None]:
        form, calls = self._form, self._calls
        tags = Tags(*form.openings, *form.fragments) if form else Tags()
        while tag := (yield from self._incoming.until(tags, self._content.add)):
            assert form is not None
            assert calls is not None
            self._content.pause()
            if calls.any_read and (yield from self._incoming.one_of(*form.block_ends)):
                continue
            yield from calls.read() if tag in form.openings else calls.read_fragment()
        self._content.end()


def _joined(events: Sequence[Event]) -> list[Event]:
    """The events with neighbouring parts of the same text made one."""
    joined: list[Event] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case (ReasoningText(before), ReasoningText(text)):
                joined[-1] = ReasoningText(before + text)
            case (ContentText(before), ContentText(text)):
                joined[-1] = ContentText(before + text)
            case (ToolCallArguments(_, before), ToolCallArguments(index, text)):
                joined[-1] = ToolCallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


class _Content:
    """Content with white space held back until it is known whether text follows or a call."""

    def __init__(self, form: ToolFormat | None, events: list[Event]) -> None:
        self._form = form
        self._events = events
        self._blank: list[str] = []
        self._any = False
        """Whether there was content that is not white space."""
        self._after_call = False

    def add(self, text: str) -> None:
        shown = text.rstrip() if self._form else text
        if shown:
            self._events.append(ContentText("".join(self._blank) + shown))
            self._blank.clear()
            self._any, self._after_call = True, False
        if len(shown) < len(text):
            self._blank.append(text[len(shown) :])

    def pause(self) -> None:
        """A call follows: what the template itself writes before it is no content, nor is any space between calls."""
        blank = "".join(self._blank)
        self._blank.clear()
        separator = self._form.separator if self._form else None
        if self._any and not self._after_call and separator is not None and (kept := blank.removesuffix(separator)):
            self._events.append(ContentText(kept))
        self._after_call = True

    def end(self) -> None:
        if self._blank and not self._after_call:
            self._events.append(ContentText("".join(self._blank)))
