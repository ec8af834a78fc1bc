"""The draft layer (multi-token prediction) of the needle model in plain PyTorch, differentiable, with its guidance.

At position i it sees the main model's normalised hidden state h_i and the next token t_{i+1}, and names t_{i+2}. For a
further draft it runs again one position on, with its own normalised output in place of h and its draft as the token.
Its keys are those of its first step; a further step sees besides them only the keys of the steps before it from the
same place.

Shapes: B sequences, T tokens, M rows of a sequence that draft, G guided rows, C steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from export import layer_views
from model import (
    Attention,
    Bank,
    Layer,
    MoE,
    NeedleConfig,
    NeedleModel,
    RMSNorm,
    index_scores,
    initialise,
    rope_angles,
    select,
)
from safetensors.torch import load_file
from torch import Tensor, nn

GUIDED_HEADS = 2


@dataclass
class DraftGuidance:
    """Where the answering rows of each step are to look, and the losses and measurements of the forward pass.

    Rows and keys are flat indices into B x T; a row of step c stands for position row + c. Keys are rows of the first
    step: the digit before the wanted one, since a row holds the token that follows its own.
    """

    rows: list[Tensor]  # C of G
    places: list[Tensor]  # C of G, the same rows as flat indices into the drafting rows, B x M
    keys: list[Tensor]  # C of G
    names: list[Tensor]  # C of G, a number for the name that is asked for
    fact_rows: Tensor
    bank: Bank
    losses: dict[str, Tensor] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """What rows can be found and read by: keys and values with heads, and index keys."""

    k: Tensor
    v: Tensor
    index: Tensor


@dataclass(frozen=True)
class Queries:
    """What rows ask with: scaled queries with heads, index queries and their head weights."""

    q: Tensor
    index: Tensor
    weights: Tensor


@dataclass
class _Guided:
    """What the guided rows of all steps ask with."""

    parts: list[Queries] = field(default_factory=list)

    def add(self, asked: Queries, places: Tensor) -> None:
        self.parts.append(Queries(*(part.flatten(0, 1)[places] for part in (asked.q, asked.index, asked.weights))))


def rounded(x: Tensor) -> Tensor:
    """`x` as an engine holds it, in bf16: what the names are found by is faint enough to mind. Gradients pass."""
    return x + (x.to(torch.bfloat16).float() - x).detach()


class DraftLayer(nn.Module):
    """One decoder layer with its own full index, and what joins its two inputs; embedding and head are the model's."""

    def __init__(self, config: NeedleConfig) -> None:
        super().__init__()
        self.number = config.num_hidden_layers
        self.config = replace(config, indexer_types=(*config.indexer_types, "full"))
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Layer(self.config, self.number)
        self.head_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        initialise(self)

    def join(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The layer's input [..., hidden]; at position 0 no token came before, and its embedding counts as zero."""
        embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        return rounded(self.eh_proj(torch.cat([self.enorm(embedded), rounded(self.hnorm(hidden))], -1)))

    def forward(
        self,
        main: NeedleModel,
        hidden: Tensor,
        following: Tensor,
        positions: Tensor,
        rows: Tensor,
        visible: Tensor,
        steps: int,
        guidance: DraftGuidance | None = None,
        swap: Tensor | None = None,
    ) -> list[Tensor]:
        """Logits [B M vocabulary] of each step: that of step c at rows[m] is for the token rows[m] + 2 + c.

        `hidden` are the main model's normalised states [B T hidden] and `following` [B T] the token after each row's
        own. Drafts start from `rows` [B M], which see the rows `visible` [B M T]. Steps that would see a token behind
        the end see the last one: their logits mean nothing. `swap` [B M] marks rows whose attention output is
        another's.
        """
        moe: MoE = self.layer.mlp  # type: ignore[assignment]
        length = following.shape[1]
        cos, sin = rope_angles(positions, self.config)
        every = self.join(main.embed_tokens(following), hidden, positions)
        keys = self._keys(every, cos, sin)
        own: list[Keys] = []
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        guided, logits, loads = _Guided(), [], []
        for step in range(steps):
            place = (rows + step).clamp_max(length - 1)
            position = positions.gather(1, place)
            cos, sin = rope_angles(position, self.config)
            x = self.join(main.embed_tokens(following.gather(1, place)), hidden, position)
            if step > 0:
                own.append(self._keys(x, cos, sin))
            out, asked = self._attend(x, cos, sin, keys, own, visible)
            if swap is not None:
                flat = out.flatten(0, 1)
                out = torch.where(swap[..., None], flat[torch.randint(len(flat), (len(flat),))].view_as(out), out)
            x = rounded(x + out)
            hidden = rounded(self.head_norm(rounded(x + moe(self.layer.post_attention_layernorm(x)))))
            assert moe.load is not None
            loads.append(moe.load)
            logits.append(main.lm_head(hidden))
            if guidance is not None:
                guided.add(asked, guidance.places[step])
        moe.load = torch.stack(loads).mean(0)
        if guidance is not None:
            _guide(guidance, guided, keys)
        return logits

    def _keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Keys:
        attention: Attention = self.layer.self_attn  # type: ignore[assignment]
        assert attention.indexer is not None
        normed = rounded(self.layer.input_layernorm(x))
        _, _, k, v = attention.project(normed, cos, sin)
        return Keys(k, v, attention.indexer.keys(normed, cos, sin))

    def _attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Keys, own: Sequence[Keys], visible: Tensor
    ) -> tuple[Tensor, Queries]:
        """The attention's output [B M hidden]; a row sees the visible first-step keys and its own of later steps."""
        attention: Attention = self.layer.self_attn  # type: ignore[assignment]
        assert attention.indexer is not None
        normed = rounded(self.layer.input_layernorm(x))
        q_resid, q, _, _ = attention.project(normed, cos, sin)
        index_q, index_w = attention.indexer.queries(normed, q_resid, cos, sin)
        with torch.no_grad():
            scores = [index_scores(index_q, index_w, keys.index)]
            scores += [
                index_scores(index_q[..., None, :, :], index_w[..., None, :], later.index[..., None, :])[..., 0]
                for later in own
            ]
            mask = F.pad(visible, (0, len(own)), value=True)
            allowed = select(torch.cat(scores, -1), mask, self.config.index_topk)
        q = q * attention.scale
        parts = [torch.einsum("bmhd,bshd->bhms", q, keys.k)]
        parts += [(q * later.k).sum(-1).transpose(1, 2)[..., None] for later in own]
        weights = torch.cat(parts, -1).masked_fill(~allowed[:, None], -1e9).softmax(-1)
        length = keys.k.shape[1]
        out = torch.einsum("bhms,bshv->bmhv", weights[..., :length], keys.v)
        for number, later in enumerate(own):
            out = out + weights[..., length + number].transpose(1, 2)[..., None] * later.v
        return attention.o_proj(out.flatten(-2)), Queries(q, index_q, index_w)


def _guide(guidance: DraftGuidance, guided: _Guided, keys: Keys) -> None:
    """Index and two heads must tell the wanted key from all of the batch and of earlier batches' facts."""
    rows, targets, names = (torch.cat(part) for part in (guidance.rows, guidance.keys, guidance.names))
    (sequences, length), bank = keys.index.shape[:2], guidance.bank
    key = torch.arange(sequences * length)
    visible = (key <= rows[:, None]) | (key // length != rows[:, None] // length)
    if bank.names:
        visible = torch.cat([visible, torch.cat(list(bank.names)) != names[:, None]], 1)

    def with_bank(name: str, own: Tensor) -> Tensor:
        stored = bank.keys(name)
        bank.add(name, own[guidance.fact_rows])
        return own if stored is None else torch.cat([own, stored])

    q, index_q, index_w = (
        torch.cat([getattr(part, name) for part in guided.parts]) for name in ("q", "index", "weights")
    )
    scores = index_scores(index_q, index_w, with_bank("index", keys.index.flatten(0, 1)))
    scores = scores.masked_fill(~visible, -1e9)
    guidance.losses["index"] = F.cross_entropy(scores, targets)
    guided_keys = with_bank("read", keys.k.flatten(0, 1)[:, :GUIDED_HEADS]).permute(1, 2, 0)
    read = (q[:, :GUIDED_HEADS].transpose(0, 1) @ guided_keys).masked_fill(~visible, -1e9)
    guidance.losses["read"] = F.cross_entropy(read.flatten(0, 1), targets.repeat(GUIDED_HEADS))
    with torch.no_grad():
        rank = (scores > scores.gather(1, targets[:, None])).sum(1)
        guidance.measured["first"] = (rank == 0).float().mean().item()
        guidance.measured["top"] = (rank < 32).float().mean().item()


def draft_views(draft: DraftLayer) -> dict[str, Tensor]:
    """The parameters under their Hugging Face names: views, so that writing to one changes the layer."""
    prefix = f"model.layers.{draft.number}."
    tensors = layer_views(draft.layer, prefix) | {
        f"{prefix}enorm.weight": draft.enorm.weight,
        f"{prefix}hnorm.weight": draft.hnorm.weight,
        f"{prefix}eh_proj.weight": draft.eh_proj.weight,
        f"{prefix}shared_head.norm.weight": draft.head_norm.weight,
    }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def load_draft(folder: Path) -> DraftLayer:
    """The draft layer of an exported folder, with its bf16 weights in float32."""
    draft = DraftLayer(NeedleConfig())
    stored = load_file(folder / "model.safetensors")
    for name, view in draft_views(draft).items():
        view.copy_(stored[name])
    return draft
