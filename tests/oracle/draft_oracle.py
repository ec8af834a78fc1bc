"""The draft layer computed by transformers' own decoder layer, whole sequences at once.

For tests only; imports transformers. The model is loaded once more with the draft layer as its last one, whose input a
hook replaces: the joining of embedding and hidden state, the norms and the head are written out here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import write_tensors

JOINING = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")
EXTENDED = {"indexer_types": "full", "mlp_layer_types": "sparse", "layer_types": None}


class DraftOracle:
    """Float32; suffixes: L positions · C hidden · V vocabulary."""

    def __init__(self, folder: Path, model: transformers.PreTrainedModel, scratch: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.prefix = f"model.layers.{model.config.num_hidden_layers}."
        config = copy.deepcopy(model.config)
        config.num_hidden_layers += 1
        for name, kind in EXTENDED.items():
            values = getattr(config, name, None)
            if values:
                setattr(config, name, [*values, kind or values[-1]])
        scratch.mkdir()
        config.save_pretrained(scratch)
        joining = tuple(self.prefix + name for name in JOINING)
        write_tensors(scratch, {name: t for name, t in self.tensors.items() if not name.startswith(joining)})
        self.model = type(model).from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager").eval()
        self.eps = config.rms_norm_eps

    def drafts(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor, Tensor]:
        """What follows a prompt, greedily: its next token and `count` drafts of those behind; y [L, C] of the prompt's
        positions and of the `count - 1` behind, and the drafts' logits [count, V]."""
        hidden_LC, logits_V = self._hidden(prompt)
        tokens = [int(logits_V.argmax())]
        behind = [*prompt[1:], tokens[0]]
        x_LC = self._join(behind, list(range(len(prompt))), hidden_LC)
        y_LC = self._layer([*prompt, tokens[0]], x_LC)
        logits = []
        for position in range(len(prompt), len(prompt) + count):
            logits.append(self._head(y_LC[-1]))
            tokens.append(int(logits[-1].argmax()))
            if len(logits) < count:
                z_LC = self._norm(y_LC[-1:], "shared_head.norm")
                x_LC = torch.cat([x_LC, self._join([tokens[-1]], [position], z_LC)])
                y_LC = self._layer([*prompt, *tokens], x_LC)
        return tokens, y_LC, torch.stack(logits)

    @torch.no_grad()
    def _hidden(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states behind the main model's last norm, [L, C], and the last position's logits [V]."""
        found: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_pre_hook(lambda _module, args: found.append(args[0][0]))
        try:
            self.model(torch.tensor([list(token_ids)]))
        finally:
            hook.remove()
        hidden_LC = self.model.model.norm(found[0])
        return hidden_LC, self.model.lm_head(hidden_LC[-1])

    def _join(self, behind: Sequence[int], positions: Sequence[int], hidden_LC: Tensor) -> Tensor:
        embedded_LC = F.embedding(torch.tensor(behind), self._tensor("embed_tokens"))
        embedded_LC[torch.tensor(positions) == 0] = 0
        both = [self._norm(embedded_LC, "enorm"), self._norm(hidden_LC, "hnorm")]
        return torch.cat(both, -1) @ self._tensor("eh_proj").T

    @torch.no_grad()
    def _layer(self, token_ids: Sequence[int], x_LC: Tensor) -> Tensor:
        """The last layer's output for inputs `x_LC`; the tokens only say how many rows the model runs."""
        found: list[Tensor] = []

        def give(_module: Any, args: Any) -> Any:
            return (x_LC[None], *args[1:])

        def keep(_module: Any, _args: Any, out: Any) -> None:
            found.append((out[0] if isinstance(out, tuple) else out)[0])

        layer = self.model.model.layers[-1]
        hooks = [layer.register_forward_pre_hook(give), layer.register_forward_hook(keep)]
        try:
            self.model(torch.tensor([list(token_ids)[: x_LC.shape[0]]]))
        finally:
            for hook in hooks:
                hook.remove()
        return found[0]

    def _head(self, y_C: Tensor) -> Tensor:
        return self._norm(y_C, "shared_head.norm") @ self._tensor("shared_head.head").T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]
