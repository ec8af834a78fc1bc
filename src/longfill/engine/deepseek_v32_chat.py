"""DeepSeek-V3.2's conversations as text: its folder ships no Jinja template but a program, whose format this writes.

May import errors. Invariant: equal messages and arguments give equal text. A longer history begins with the text of a
shorter one, but when thinking: a new user message takes the reasoning of earlier turns out of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from longfill.errors import RequestError

Message = Mapping[str, Any]
Turn = tuple[int, Message]
"""A message and its index in the request."""

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THINK_END = "<think>", "</think>"

# The model was trained on exactly these words.
_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply \
to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def render(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
    enable_thinking: bool | None = None,
    drop_thinking: bool = True,
    response_format: Any = None,
    **unknown: Any,
) -> str:
    """The prompt's text. The model thinks only if `thinking` or `enable_thinking` is true.

    `tools` and `response_format` (a JSON schema) join a system message that comes first, or stand in its place.
    Earlier turns' reasoning is never in the prompt; `drop_thinking` leaves out earlier developer messages too, as the
    published encoder does. Raises RequestError, with the index of the message, for what the format cannot say.
    """
    flags = {"thinking": thinking, "enable_thinking": enable_thinking, "drop_thinking": drop_thinking}
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"{name}: expected true or false, got {value!r}")
    for name, value in unknown.items():
        if value is not None:
            raise RequestError(f"{name}: the chat format of DeepSeek-V3.2 has no such variable")
    if not messages:
        raise RequestError("messages: there must be at least one")
    thinks = bool(thinking or enable_thinking)
    turns = _with_given(messages, {"tools": tools, "response_format": response_format})
    if thinks and drop_thinking:
        last = _last_asked(turns)
        turns = [turn for at, turn in enumerate(turns) if at >= last or turn[1].get("role") != "developer"]
    return _BOS + "".join(_parts(turns, thinks, add_generation_prompt))


def _with_given(messages: Sequence[Message], given: Mapping[str, Any]) -> list[Turn]:
    turns = list(enumerate(messages))
    given = {name: value for name, value in given.items() if value}
    if given and messages[0].get("role") == "system":
        turns[0] = (0, {**messages[0], **given})
    elif given:
        turns.insert(0, (0, {"role": "system", "content": "", **given}))
    return turns


def _last_asked(turns: Sequence[Turn]) -> int:
    """Where the last message stands that the model answers; -1 if there is none."""
    asked = (at for at, (_, message) in enumerate(turns) if message.get("role") in ("user", "developer"))
    return max(asked, default=-1)


def _parts(turns: Sequence[Turn], thinks: bool, add_generation_prompt: bool) -> Iterator[str]:
    last_asked = _last_asked(turns)
    at = 0
    while at < len(turns):
        index, message = turns[at]
        role = message.get("role")
        at += 1
        current = at > last_asked
        opening = _THINK if thinks and current else _THINK_END
        match role:
            case "system":
                yield _text(index, message) + _extras(index, message)
            case "user" | "developer":
                yield _USER + (_developer(index, message) if role == "developer" else _text(index, message))
                opening = _ASSISTANT + opening
            case "assistant":
                calls = _calls(index, message)
                yield _assistant(index, message, calls, with_reasoning=thinks and current)
                results = list(takewhile(lambda turn: turn[1].get("role") == "tool", turns[at:]))
                at += len(results)
                yield _results(calls, results)
                opening = "\n\n" + opening if results else ""
            case "tool":
                raise RequestError(f"messages[{index}]: the result of a tool, but no message with tool_calls before it")
            case _:
                known = "system, developer, user, assistant and tool"
                raise RequestError(f"messages[{index}]: role {role!r}; DeepSeek-V3.2 knows {known}")
        if role != "system" and (at < len(turns) or add_generation_prompt):
            yield opening
    if add_generation_prompt and (role == "system" or not opening):
        raise RequestError(
            f"messages[{index}]: the last message must be a user's or a tool's; this one is not answered"
        )


def _text(index: int, message: Message) -> str:
    """A message's content; the texts of its parts stand on lines of their own."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text", "")) for part in content)
    if content is None and message.get("role") in ("system", "assistant"):
        return ""
    if not isinstance(content, str):
        raise RequestError(f"messages[{index}]: content must be text for DeepSeek-V3.2, got {content!r:.100}")
    return content


def _extras(index: int, message: Message) -> str:
    """Tools and response format, which the system or the developer may give."""
    text = ""
    if tools := message.get("tools"):
        schemas = "\n".join(_json(_function(index, "tools", tool)) for tool in tools)
        text += "\n\n" + _TOOLS.replace("{schemas}", schemas)
    if response_format := message.get("response_format"):
        text += "\n\n" + _RESPONSE_FORMAT + _json(response_format)
    return text


def _developer(index: int, message: Message) -> str:
    content = _text(index, message)
    if not content:
        raise RequestError(f"messages[{index}]: the developer's content is empty")
    return f"{_extras(index, message)}\n\n# The user's message is: {content}"


def _function(index: int, field: str, entry: Any) -> Mapping[str, Any]:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"messages[{index}]: {field} must be objects with a function that has a name, got {entry!r:.100}"
        )
    return function


def _calls(index: int, message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"messages[{index}]: tool_calls must be a list, got {calls!r:.100}")
    for call in calls:
        _function(index, "tool_calls", call)
    return calls


def _assistant(index: int, message: Message, calls: Sequence[Mapping[str, Any]], *, with_reasoning: bool) -> str:
    text = _text(index, message)
    if with_reasoning:
        reasoning = message.get("reasoning_content") or ""
        if not isinstance(reasoning, str):
            raise RequestError(f"messages[{index}]: reasoning_content must be text, got {reasoning!r:.100}")
        if not reasoning and not calls:
            raise RequestError(
                f"messages[{index}]: an answer to the last user message needs its reasoning_content when thinking"
            )
        text = reasoning + _THINK_END + text
    if calls:
        invokes = "\n".join(_invoke(index, call["function"]) for call in calls)
        text += f"\n\n<｜DSML｜function_calls>\n{invokes}\n</｜DSML｜function_calls>"
    return text + _EOS


def _invoke(index: int, function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"messages[{index}]: arguments of {function['name']} are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"messages[{index}]: arguments of {function['name']} must be an object, got {arguments!r:.100}"
        )
    parameters = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</｜DSML｜parameter>"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{function["name"]}">\n{parameters}\n</｜DSML｜invoke>'


def _results(calls: Sequence[Mapping[str, Any]], results: Sequence[Turn]) -> str:
    """The results of a turn's calls in the order of the calls, which is all that tells which is whose."""
    if not results:
        return ""
    last, _ = results[-1]
    if len(results) != len(calls):
        raise RequestError(f"messages[{last}]: {len(results)} results of tools follow {len(calls)} tool_calls")
    ids = [message.get("tool_call_id") for _, message in results]
    if any(ids):
        place = {call.get("id"): at for at, call in enumerate(calls)}
        if set(ids) != set(place):
            raise RequestError(f"messages[{last}]: the tool_call_ids of the results are not those of the tool_calls")
        results = sorted(results, key=lambda turn: place[turn[1].get("tool_call_id")])
    lines = "".join(f"\n<result>{_text(index, message)}</result>" for index, message in results)
    return f"\n\n<function_results>{lines}\n</function_results>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
