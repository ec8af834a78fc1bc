"""transformers as a peer: `python -m longfill_peers.transformers_prefill`, speaking `longfill.bench.child`'s protocol.

Two modes: `one-shot`, the whole prompt in one call, and `chunked`, calls of `chunk` tokens over one cache. Only the
last token's logits are computed, as in longfill.
"""

from __future__ import annotations

from typing import Any

import torch

from longfill.bench.child import ChildRequest, serve


class TransformersEngine:
    """The model as `from_pretrained` gives it, in the checkpoint's dtype."""

    def __init__(self, request: ChildRequest) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(request.threads)
        self._model = AutoModelForCausalLM.from_pretrained(request.folder, dtype="auto").eval()
        self._chunk = request.chunk if request.mode == "chunked" else None
        self._logits: list[float] = []

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> None:
        from transformers import DynamicCache

        ids = torch.tensor([token_ids])
        cache = DynamicCache(config=self._model.config)
        for part in torch.split(ids, self._chunk or len(token_ids), dim=1):
            out = self._model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._logits = out.logits[0, -1].float().tolist()

    def figures(self) -> dict[str, Any]:
        return {}

    def answer(self) -> dict[str, Any]:
        return {"logits": self._logits}


if __name__ == "__main__":
    serve(TransformersEngine, "transformers")
