"""Hide facts in a text, ask for three of them: the second and third question find the text in the prefix cache.

python examples/ask_a_long_text.py [tokens]
"""

import sys

from longfill import LLM, SamplingParams
from longfill.needle.haystack import build_haystack

context = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
llm = LLM("needle", max_model_len=context + 8, memory_budget="2GiB")
tokenizer = llm.tokenizer
haystack = build_haystack(
    context, seed=1, reserve=1, count=lambda text: len(tokenizer.encode(text, add_special_tokens=False))
)

for fact in haystack.facts[:3]:
    prompt = haystack.text + haystack.question(fact)
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))
    answer = output.outputs[0].text.strip()
    cached = f"{output.num_cached_tokens:,} of {len(output.prompt_token_ids):,} tokens cached"
    print(f"{fact.name}: {answer} (expected {fact.code}), {cached}")
