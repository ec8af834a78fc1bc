"""One prompt, four step sizes, one digest: the bits of the logits do not depend on how the work is cut.

python examples/same_bits.py [model]
"""

import sys

from longfill import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "needle"
prompt = "The old lamp was near the river. Every morning the baker walked to the market. " * 60

digests = set()
for step in (64, 333, 1024, 4096):
    llm = LLM(model, max_model_len=4096, max_num_batched_tokens=step, memory_budget="2GiB", digest=True)
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print(f"steps of {step:>4} tokens: {output.metrics.steps:>3} steps, digest {output.digest}")
    digests.add(output.digest)
    del llm

sys.exit(len(digests) != 1)
