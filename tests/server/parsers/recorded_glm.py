"""Outputs of GLM's models, sound and broken, with the events that each stands for."""

from __future__ import annotations

from dataclasses import dataclass

from longfill.server.parsers import (
    ContentText,
    Event,
    MalformedToolCall,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "timeout": {"type": "integer"},
                    "background": {"type": "boolean"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "edit_file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "edits": {"type": "array", "items": {"type": "object"}},
                    "note": {"type": ["string", "null"]},
                    "mode": {"$ref": "#/$defs/Mode"},
                    "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
                "$defs": {"Mode": {"enum": ["insert", "replace"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Recorded:
    name: str
    tool_format: str
    text: str
    events: tuple[Event, ...]
    reasoning: bool = False
    in_reasoning: bool = False
    """Whether the prompt ended with `<think>`."""


def call(index: int, name: str, arguments: str) -> tuple[Event, ...]:
    return ToolCallStart(index, name), ToolCallArguments(index, arguments)


def said(text: str) -> tuple[Event, ...]:
    return (ContentText(text),)


def thought(text: str) -> tuple[Event, ...]:
    return (ReasoningText(text),)


def broken(index: int, text: str, why: str) -> tuple[Event, ...]:
    return (MalformedToolCall(index, text, why),)


NO_HEADER = "no name of a tool, or nothing that belongs after it"
NO_OPENING = "the tag that opens a call is missing"
NEITHER = "after an argument comes neither another one nor the end of the call"


def glm(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


GLM = [
    Recorded("plain answer", "glm47", "It is < 5 </b> `<tool>`.\n", said("It is < 5 </b> `<tool>`.\n")),
    Recorded("one call", "glm47", glm("bash", command="ls"), call(0, "bash", '{"command": "ls"}')),
    Recorded(
        "content before, between and after",
        "glm47",
        "Look.\n" + glm("bash", command="ls") + "\n" + glm("now") + "\n\nDone.\n",
        said("Look.") + call(0, "bash", '{"command": "ls"}') + call(1, "now", "{}") + said("\n\nDone.\n"),
    ),
    Recorded(
        "line breaks of GLM-4.5",
        "glm45",
        "\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls\n</arg_value>\n<arg_key>timeout</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>",
        call(0, "bash", '{"command": "ls\\n", "timeout": 5}'),
    ),
    Recorded(
        "spaces between the tags",
        "glm45",
        "Here: <tool_call>bash <arg_key>command</arg_key> <arg_value>a</arg_value> </tool_call>",
        said("Here:") + call(0, "bash", '{"command": "a"}'),
    ),
    Recorded(
        "tags and shell in a value",
        "glm47",
        glm("bash", command='cat <<E >&1 2>&1 </dev/null\n</tool_call> </arg "q" \\ </b>\nE'),
        call(0, "bash", '{"command": "cat <<E >&1 2>&1 </dev/null\\n</tool_call> </arg \\"q\\" \\\\ </b>\\nE"}'),
    ),
    Recorded(
        "strings that look like numbers",
        "glm47",
        glm("bash", command="12", timeout="12", background="true"),
        call(0, "bash", '{"command": "12", "timeout": 12, "background": true}'),
    ),
    Recorded(
        "nested JSON, nullable string, reference, union",
        "glm47",
        glm("edit_file", edits='[{"old": "a</b>", "new": {"x": [1]}}]', note="null", mode="1", line="null"),
        call(
            0,
            "edit_file",
            '{"edits": [{"old": "a</b>", "new": {"x": [1]}}], "note": null, "mode": "1", "line": null}',
        ),
    ),
    Recorded(
        "a nullable string keeps its digits",
        "glm47",
        glm("edit_file", note="007", path="価格 🙂"),
        call(0, "edit_file", '{"note": "007", "path": "価格 🙂"}'),
    ),
    Recorded(
        "what is not JSON is a string",
        "glm47",
        glm("bash", timeout="soon", background="NaN"),
        call(0, "bash", '{"timeout": "soon", "background": "NaN"}'),
    ),
    Recorded(
        "a tool that nobody declared",
        "glm47",
        glm("mcp.search:web", query="7", count='"x"'),
        call(0, "mcp.search:web", '{"query": 7, "count": "x"}'),
    ),
    Recorded("an empty value", "glm47", glm("bash", command=""), call(0, "bash", '{"command": ""}')),
    Recorded(
        "the end is missing",
        "glm47",
        glm("bash", command="ls").removesuffix("</tool_call>"),
        call(0, "bash", '{"command": "ls"}'),
    ),
    Recorded(
        "the end is cut",
        "glm47",
        glm("bash", command="ls").removesuffix("call>"),
        call(0, "bash", '{"command": "ls"}'),
    ),
    Recorded(
        "the end is missing before the next call",
        "glm47",
        glm("bash", command="ls").removesuffix("</tool_call>") + glm("now"),
        call(0, "bash", '{"command": "ls"}') + call(1, "now", "{}"),
    ),
    Recorded(
        "cut within a value",
        "glm47",
        "<tool_call>bash<arg_key>command</arg_key><arg_value>rm -rf /tmp/x</arg_v",
        call(0, "bash", '{"command": "rm -rf /tmp/x</arg_v')
        + broken(
            0,
            "<tool_call>bash<arg_key>command</arg_key><arg_value>rm -rf /tmp/x</arg_v",
            "the output ends inside argument 'command'",
        ),
    ),
    Recorded("cut within the name", "glm47", "a <tool_call>ba", said("a") + broken(0, "<tool_call>ba", NO_HEADER)),
    Recorded(
        "a value without its opening tag",
        "glm47",
        "<tool_call>bash<arg_key>command</arg_key>ls</arg_value></tool_call>ok",
        broken(0, "<tool_call>bash<arg_key>command</arg_key>ls</arg_value></tool_call>", NO_HEADER) + said("ok"),
    ),
    Recorded(
        "a key without its opening tag",
        "glm47",
        "<tool_call>bashcommand</arg_key><arg_value>ls</arg_value></tool_call>",
        broken(0, "<tool_call>bashcommand</arg_key><arg_value>ls</arg_value></tool_call>", NO_HEADER),
    ),
    Recorded(
        "another family's JSON",
        "glm47",
        '<tool_call>{"name": "bash", "arguments": {}}</tool_call>' + glm("now"),
        broken(0, '<tool_call>{"name": "bash", "arguments": {}}</tool_call>', NO_HEADER) + call(0, "now", "{}"),
    ),
    Recorded(
        "an argument twice",
        "glm47",
        "<tool_call>bash" + 2 * "<arg_key>command</arg_key><arg_value>a</arg_value>" + "</tool_call>",
        call(0, "bash", '{"command": "a"')
        + broken(
            0,
            "<tool_call>bash" + 2 * "<arg_key>command</arg_key><arg_value>a</arg_value>" + "</tool_call>",
            "argument 'command' is given twice",
        ),
    ),
    Recorded(
        "text between arguments",
        "glm47",
        "<tool_call>bash<arg_key>command</arg_key><arg_value>a</arg_value>, then</tool_call> b",
        call(0, "bash", '{"command": "a"')
        + broken(0, "<tool_call>bash<arg_key>command</arg_key><arg_value>a</arg_value>, then</tool_call>", NEITHER)
        + said(" b"),
    ),
    Recorded(
        "the opening tag is missing",
        "glm47",
        "bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>",
        said("bash") + broken(0, "<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>", NO_OPENING),
    ),
    Recorded(
        "an end too many",
        "glm47",
        glm("now") + "</tool_call>",
        call(0, "now", "{}") + broken(1, "</tool_call>", NO_OPENING),
    ),
    Recorded(
        "reasoning opened by the model",
        "glm45",
        "\n<think>Why <b>?\n</think>\nBecause of <think>.",
        thought("Why <b>?\n") + said("\nBecause of <think>."),
        reasoning=True,
    ),
    Recorded(
        "reasoning opened by the prompt, then a call",
        "glm47",
        "List files.</think>" + glm("bash", command="ls"),
        thought("List files.") + call(0, "bash", '{"command": "ls"}'),
        reasoning=True,
        in_reasoning=True,
    ),
    Recorded(
        "a call that ends the reasoning",
        "glm47",
        "<think>Say <tool_call> now: " + glm("now") + "</think>\n" + glm("now"),
        thought("Say <tool_call> now: ") + call(0, "now", "{}") + call(1, "now", "{}"),
        reasoning=True,
        in_reasoning=True,
    ),
    Recorded(
        "a call only talked about while reasoning",
        "glm47",
        "Use <tool_call>{name}</tool_call>?</think>No.",
        thought("Use <tool_call>{name}</tool_call>?") + said("No."),
        reasoning=True,
        in_reasoning=True,
    ),
    Recorded("reasoning without an end", "glm47", "hm </thin", thought("hm </thin"), reasoning=True, in_reasoning=True),
    Recorded("no reasoning after all", "glm45", "</think>\nHi", said("\nHi"), reasoning=True),
]
