"""Parsers of what a model writes: reasoning, content and tool calls, while the text is still coming."""

from longfill.server.parsers.events import (
    ContentText,
    Event,
    MalformedToolCall,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from longfill.server.parsers.output import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputParser,
    formats_for,
    make_parser,
    starts_in_reasoning,
)

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ContentText",
    "Event",
    "MalformedToolCall",
    "OutputParser",
    "ReasoningText",
    "ToolCallArguments",
    "ToolCallStart",
    "formats_for",
    "make_parser",
    "starts_in_reasoning",
]
