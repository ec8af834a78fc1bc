"""Answers that must have a form: one of several words, a regular expression, a JSON schema.

longfill serve needle
python examples/structured_output.py [URL]          (needs: pip install openai)

The bundled model knows access codes and nothing else: the form of its JSON is right, the number in it is not.
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
question = "The access code of amber Kestrel is 48213. What is the access code of amber Kestrel?"


def ask(**form: object) -> str:
    """The answer in a form."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_completion_tokens=100,
        **form,
    )
    choice = answer.choices[0]
    if choice.finish_reason != "stop":  # cut off by the limit: it has the beginning of the form only
        raise SystemExit(f"the answer did not end: {choice.message.content!r}")
    return choice.message.content or ""


# vLLM's field, for what OpenAI's API has no name for.
print("choice:     ", ask(extra_body={"structured_outputs": {"choice": ["48213", "31284", "unknown"]}}))
print("regex:      ", ask(extra_body={"structured_outputs": {"regex": "[0-9]{5}"}}))

schema = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["code"],
    "additionalProperties": False,
    # Keeps a model that was not trained on JSON from filling its answer with blanks.
    "x-guidance": {"whitespace_flexible": False},
}
text = ask(response_format={"type": "json_schema", "json_schema": {"name": "access", "schema": schema}})
print("JSON schema:", json.loads(text))
