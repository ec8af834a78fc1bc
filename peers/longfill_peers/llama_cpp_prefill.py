"""llama.cpp as a peer: `python -m longfill_peers.llama_cpp_prefill`, speaking `longfill.bench.child`'s protocol.

It always works through its own cache in batches of `chunk` tokens; only the last token's logits are asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from longfill.bench.child import ChildRequest, serve


class LlamaEngine:
    """A context just long enough for the prompt."""

    def __init__(self, request: ChildRequest) -> None:
        import llama_cpp

        self._api = llama_cpp
        file = gguf_of(Path(request.folder), Path(request.options["scratch"]))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = len(request.token_ids)
        params.n_batch = params.n_ubatch = min(request.chunk, len(request.token_ids))
        params.n_threads = params.n_threads_batch = request.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise MemoryError("llama.cpp cannot make a context")
        self._step = params.n_batch
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, token_ids: list[int]) -> None:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        batch = api.llama_batch_init(self._step, 0, 1)
        for first in range(0, len(token_ids), self._step):
            part = token_ids[first : first + self._step]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, first + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = first + i == len(token_ids) - 1
            code = api.llama_decode(self._context, batch)
            if code != 0:
                raise ValueError(f"llama_decode gave {code} at token {first:,}")
        api.llama_batch_free(batch)

    def figures(self) -> dict[str, Any]:
        return {}

    def answer(self) -> dict[str, Any]:
        values = self._api.llama_get_logits_ith(self._context, -1)
        return {"logits": [values[i] for i in range(self._vocab_size)]}


def gguf_of(folder: Path, scratch: Path) -> Path:
    """The checkpoint's GGUF in `scratch`, written unless it is there and newer."""
    file, source = scratch / f"{folder.name}.gguf", max(path.stat().st_mtime for path in folder.iterdir())
    if not file.is_file() or file.stat().st_mtime < source:
        command = [sys.executable, "-m", "longfill_peers.gguf_checkpoint", str(folder), str(file)]
        written = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if written.returncode != 0:
            raise ValueError(written.stderr.strip().splitlines()[-1])
    return file


if __name__ == "__main__":
    serve(LlamaEngine, "llama_cpp")
