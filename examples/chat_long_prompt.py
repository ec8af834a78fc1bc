"""Ask a server for one fact in a text of 131,072 tokens with OpenAI's client, and watch the prompt being computed.

longfill serve needle --max-model-len 132000
python examples/chat_long_prompt.py [URL] [tokens]          (needs: pip install openai)
"""

import sys
import time

from openai import OpenAI

from longfill.engine.tokenizer import Tokenizer
from longfill.models.hub import BUNDLED_FOLDER
from longfill.needle.haystack import build_haystack

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
context = int(sys.argv[2]) if len(sys.argv) > 2 else 131_072

tokenizer = Tokenizer.from_folder(BUNDLED_FOLDER)
haystack = build_haystack(
    context, seed=1, reserve=1, count=lambda text: len(tokenizer.encode(text, add_special_tokens=False))
)
fact = haystack.facts[0]
question = haystack.chat_question(fact)

client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=0)
model = client.models.list().data[0].id
began = time.monotonic()
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": haystack.text + question}],
    temperature=0,
    max_completion_tokens=8,
    stream=True,
    stream_options={"include_usage": True, "prefill_progress": True},
)
print(f"headers after {time.monotonic() - began:.2f} s")

answer, usage = "", None
for chunk in stream:
    progress = (chunk.model_extra or {}).get("prefill_progress")
    if progress is not None:
        left = progress["estimated_seconds"]
        left = "" if left is None else f", {left:.1f} s left"
        print(f"{progress['tokens_done']:,} of {progress['tokens_total']:,} tokens{left}")
    if chunk.choices:
        answer += chunk.choices[0].delta.content or ""
    usage = chunk.usage or usage

cached = usage.prompt_tokens_details.cached_tokens
print(f"{usage.prompt_tokens:,} prompt tokens, {cached:,} of them cached, {time.monotonic() - began:.1f} s in all")
print(f"{question.strip()} {answer} (expected {fact.code})")
sys.exit(answer != fact.code)
