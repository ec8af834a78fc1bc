"""A tool call and its result: the model asks for a file card, the script reads it, the model answers from it.

longfill serve needle
python examples/tools.py [URL]          (needs: pip install openai)

The call is streamed and forced, since the bundled model makes none of its own accord; with GLM-5 or DeepSeek-V3.2 leave
`tool_choice` out.
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

CARDS = {"A": "The access code of amber Kestrel is 48213.", "B": "The access code of amber Kestrel is 31284."}
tools = [
    {
        "type": "function",
        "function": {
            "name": "read_card",
            "description": "The text of a file card",
            "parameters": {
                "type": "object",
                "properties": {"card": {"type": "string", "enum": list(CARDS)}},
                "required": ["card"],
                "additionalProperties": False,
            },
        },
    }
]
question = {"role": "user", "content": "What is the access code of amber Kestrel?"}

name = arguments = call_id = ""
for chunk in client.chat.completions.create(
    model=model,
    messages=[question],
    tools=tools,
    tool_choice={"type": "function", "function": {"name": "read_card"}},
    temperature=0,
    max_completion_tokens=100,
    stream=True,
):
    delta = chunk.choices[0].delta
    for error in (delta.model_extra or {}).get("tool_call_errors", []):
        raise SystemExit(f"no call: {error['why']}: {error['text']!r}")
    for part in delta.tool_calls or []:
        call_id, name = part.id or call_id, part.function.name or name
        arguments += part.function.arguments or ""
print(f"call:   {name}({json.loads(arguments)})")

card = CARDS[json.loads(arguments)["card"]]
print(f"result: {card}")

call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
history = [
    question,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": call_id, "content": card},
    question,  # the bundled model answers what stands last
]
answer = client.chat.completions.create(model=model, messages=history, temperature=0, max_completion_tokens=8)
print(f"answer: {answer.choices[0].message.content}")
sys.exit((answer.choices[0].message.content or "") not in card)
