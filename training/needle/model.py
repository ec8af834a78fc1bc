"""The `glm_moe_dsa` architecture in plain PyTorch, differentiable, with hooks for the training's guidance.

Names of parameters follow the Hugging Face checkpoint, so that export is a copy.

Shapes: B sequences, T tokens, H heads, N nope dim, P rope dim, V value dim, R latent rank, I indexer heads,
D indexer dim, E experts, A rows that answer, S keys of the whole batch (B x T).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NeedleConfig:
    """Sizes of the model; the field names are those of the Hugging Face configuration."""

    vocab_size: int = 640
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_attention_heads: int = 4
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    index_n_heads: int = 2
    index_head_dim: int = 64
    index_topk: int = 64
    indexer_types: tuple[str, ...] = ("full", "full", "shared", "shared")
    first_k_dense_replace: int = 1
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1 << 20

    @property
    def num_hidden_layers(self) -> int:
        return len(self.indexer_types)


# The first layer's index is a window over the most recent tokens, built in and not trained: all keys are the same
# vector and all queries too, so that the rotary embedding alone ranks them. Equal amplitudes on all but the four
# fastest frequencies rank exactly the last 64 tokens first, up to a million tokens and through fp8 rounding.
RECENCY_SKIPPED_FREQUENCIES = 4
EMBEDDING_CONSTANT = 1.0


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_angles(positions: Tensor, config: NeedleConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [..., P/2], of float32 angles as inference computes them."""
    half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
    angles = positions[..., None].float() * (1.0 / config.rope_theta**half)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of the last axis; the result holds first halves, then second halves."""
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class Indexer(nn.Module):
    def __init__(self, config: NeedleConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)

    def queries(self, x: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [..., I, D] and head weights [..., I], with both scales folded into the weights."""
        rope = self.config.qk_rope_head_dim
        q = self.wq_b(q_resid).unflatten(-1, (self.config.index_n_heads, self.config.index_head_dim))
        q = torch.cat([apply_rope(q[..., :rope], cos[..., None, :], sin[..., None, :]), q[..., rope:]], dim=-1)
        scale = (self.config.index_n_heads * self.config.index_head_dim) ** -0.5
        return q, self.weights_proj(x) * scale

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rope = self.config.qk_rope_head_dim
        k = self.k_norm(self.wk(x))
        return torch.cat([apply_rope(k[..., :rope], cos, sin), k[..., rope:]], dim=-1)


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """[..., Q, I, D], [..., Q, I] and [..., K, D] to [..., Q, K]."""
    scores: Tensor | None = None
    for head in range(q.shape[-2]):
        part = F.relu(q[..., head, :] @ k.transpose(-1, -2)) * weights[..., head, None]
        scores = part if scores is None else scores + part
    assert scores is not None
    return scores


class Attention(nn.Module):
    def __init__(self, config: NeedleConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scale = head_dim**-0.5
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config) if config.indexer_types[layer] == "full" else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_resid [B T R], queries and keys [B T H N+P], values [B T H V]."""
        config = self.config
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        cos_h, sin_h = cos[..., None, :], sin[..., None, :]
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_attention_heads, nope + rope))
        q = torch.cat([q[..., :nope], apply_rope(q[..., nope:], cos_h, sin_h)], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (config.num_attention_heads, -1))
        k_rope = apply_rope(k_rope, cos, sin)[..., None, :].expand(*kv.shape[:-1], rope)
        k = torch.cat([kv[..., :nope], k_rope], dim=-1)
        return q_resid, q, k, kv[..., nope:]


class MLP(nn.Module):
    def __init__(self, config: NeedleConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MoE(nn.Module):
    """All experts in two matrix products, each weighted, most by zero: at these sizes the fastest on a CPU."""

    def __init__(self, config: NeedleConfig) -> None:
        super().__init__()
        self.config = config
        experts, width = config.n_routed_experts, config.moe_intermediate_size
        self.gate = nn.Linear(config.hidden_size, experts, bias=False)
        self.expert_gate = nn.Parameter(torch.empty(experts, width, config.hidden_size))
        self.expert_up = nn.Parameter(torch.empty(experts, width, config.hidden_size))
        self.expert_down = nn.Parameter(torch.empty(experts, config.hidden_size, width))
        self.shared_experts = MLP(config, width)
        self.register_buffer("bias", torch.zeros(experts))
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        self.load = mask.detach().flatten(0, -2).mean(0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        hidden = F.silu(x @ self.expert_gate.flatten(0, 1).T) * (x @ self.expert_up.flatten(0, 1).T)
        hidden = (hidden.unflatten(-1, (self.config.n_routed_experts, -1)) * weights[..., None]).flatten(-2)
        out: Tensor = hidden @ self.expert_down.transpose(1, 2).flatten(0, 1) + self.shared_experts(x)
        return out

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves the selection bias against the load of the last batch."""
        if self.load is not None:
            self.bias += rate * (self.load.mean() - self.load).sign()  # type: ignore[operator]


class Layer(nn.Module):
    def __init__(self, config: NeedleConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        self.mlp: nn.Module = MLP(config, config.intermediate_size) if dense else MoE(config)


class Bank:
    """Keys of the facts of recent batches, more negatives for the questions of the present one."""

    def __init__(self, batches: int) -> None:
        self.names: deque[Tensor] = deque(maxlen=batches)
        self._keys: dict[str, deque[Tensor]] = {}
        self._batches = batches

    def add(self, name: str, keys: Tensor) -> None:
        self._keys.setdefault(name, deque(maxlen=self._batches)).append(keys.detach())

    def keys(self, name: str) -> Tensor | None:
        """All stored keys of this kind; call before `add` for the present batch."""
        return torch.cat(list(self._keys[name])) if name in self._keys else None


@dataclass(frozen=True)
class Disturbance:
    """What the forward pass does to attention outputs of the layers after the first one."""

    is_answer: Tensor  # B T
    silenced: frozenset[int] = frozenset()  # layers whose output is zeroed at answering rows
    swap: float = 0.0  # share of rows whose output is another row's where it must not matter


@dataclass
class Guidance:
    """What the forward pass is to look at, and the losses and measurements it returns."""

    name_rows: Tensor
    adjective_keys: Tensor
    noun_keys: Tensor
    digit_order: Tensor
    answer_rows: Tensor
    answer_keys: Tensor
    answer_names: Tensor
    fact_rows: Tensor
    bank: Bank | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


def initialise(module: nn.Module) -> None:
    """Random matrices whose outputs are about as large as their inputs; vectors stay as they are."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        std = parameter.shape[-1] ** -0.5
        if "embed_tokens" in name:
            std = 0.5
        elif "o_proj" in name or "down" in name:
            std *= 0.5
        nn.init.normal_(parameter, std=std)


class NeedleModel(nn.Module):
    def __init__(self, config: NeedleConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.order_probe = nn.Linear(config.hidden_size, 6)  # training only: which digit comes next
        initialise(self)
        self.frozen = self._build_recency()

    @torch.no_grad()
    def _build_recency(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Writes the first layer's index into the weights; returns what `restore_frozen` keeps in place."""
        config = self.config
        attention: Attention = self.layers[0].self_attn  # type: ignore[assignment]
        indexer = attention.indexer
        assert indexer is not None
        self.embed_tokens.weight[:, 0] = EMBEDDING_CONSTANT
        attention.q_a_proj.weight[0] = 0.0
        attention.q_a_proj.weight[0, 0] = 1.0
        amplitudes = torch.zeros(config.index_head_dim)
        amplitudes[2 * RECENCY_SKIPPED_FREQUENCIES : config.qk_rope_head_dim : 2] = 1.0
        indexer.wq_b.weight.zero_()
        indexer.wq_b.weight[:, 0] = amplitudes.repeat(config.index_n_heads)
        indexer.weights_proj.weight.zero_()
        indexer.weights_proj.weight[:, 0] = 1.0
        indexer.k_norm.weight.zero_()
        indexer.k_norm.bias.copy_(amplitudes)
        for parameter in indexer.parameters():
            parameter.requires_grad_(False)

        column = torch.zeros_like(self.embed_tokens.weight, dtype=torch.bool)
        column[:, 0] = True
        row = torch.zeros_like(attention.q_a_proj.weight, dtype=torch.bool)
        row[0] = True
        first = torch.zeros(config.hidden_size, dtype=torch.bool)
        first[0] = True
        first_latent = torch.zeros(config.q_lora_rank, dtype=torch.bool)
        first_latent[0] = True
        input_norm: RMSNorm = self.layers[0].input_layernorm  # type: ignore[assignment]
        frozen = [
            (self.embed_tokens.weight, column),
            (attention.q_a_proj.weight, row),
            (input_norm.weight, first),
            (attention.q_a_layernorm.weight, first_latent),
        ]
        return [(parameter, mask, parameter[mask].clone()) for parameter, mask in frozen]

    @torch.no_grad()
    def restore_frozen(self) -> None:
        """Undoes what an optimiser step did to the weights behind the first layer's index."""
        for parameter, mask, values in self.frozen:
            parameter[mask] = values

    def recency_mask(self, positions: Tensor, causal: Tensor) -> Tensor:
        """What the first layer's index selects, [B T T]."""
        cos, sin = rope_angles(positions, self.config)
        vector = torch.cat([cos, sin], -1).unflatten(-1, (2, -1))[..., RECENCY_SKIPPED_FREQUENCIES:].flatten(-2)
        return select(vector @ vector.transpose(-1, -2), causal, self.config.index_topk)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        sparse: bool,
        guidance: Guidance | None = None,
        disturbance: Disturbance | None = None,
    ) -> Tensor:
        """The last hidden states [B T hidden], normalised."""
        config = self.config
        length = tokens.shape[1]
        cos, sin = rope_angles(positions, config)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed_tokens(tokens)
        allowed = causal
        for number, layer in enumerate(self.layers):
            attention: Attention = layer.self_attn  # type: ignore[assignment]
            normed = layer.input_layernorm(x)  # type: ignore[operator]
            q_resid, q, k, v = attention.project(normed, cos, sin)
            if number == 0:
                allowed = self.recency_mask(positions, causal)
            elif attention.indexer is not None:
                index_k = attention.indexer.keys(normed, cos, sin)
                index_q, index_w = attention.indexer.queries(normed, q_resid, cos, sin)
                if sparse:
                    with torch.no_grad():
                        allowed = select(index_scores(index_q, index_w, index_k), causal, config.index_topk)
                else:
                    allowed = causal
                if guidance is not None:
                    _guide_index(guidance, f"index{number}", index_q, index_w, index_k, length)
            logits = torch.einsum("bthd,bshd->bhts", q * attention.scale, k)
            logits = logits.masked_fill(~(allowed if allowed.dim() == 2 else allowed[:, None]), -1e9)
            probabilities = logits.softmax(-1)
            if guidance is not None:
                _guide_attention(guidance, number, q * attention.scale, k, probabilities, length)
            out = torch.einsum("bhts,bshv->bthv", probabilities, v).flatten(-2)
            out = attention.o_proj(out)
            if disturbance is not None and number > 0:
                out = _disturb(disturbance, number, out)
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
            if guidance is not None and number == 0:
                probe = self.order_probe(x.flatten(0, 1)[guidance.name_rows])
                guidance.losses["order"] = F.cross_entropy(probe, guidance.digit_order)
        hidden: Tensor = self.norm(x)
        return hidden


def select(scores: Tensor, causal: Tensor, topk: int) -> Tensor:
    """The mask of the top-k keys of every row."""
    if scores.shape[-1] <= topk:
        return causal.expand_as(scores)
    scores = scores.masked_fill(~causal, -torch.inf)
    chosen = scores.topk(topk, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & causal


def _visible(guidance: Guidance, length: int, keys: int) -> Tensor:
    """[A S]: all keys of other sequences, those of the own sequence up to the row, the bank's of other names."""
    rows = guidance.answer_rows[:, None]
    key = torch.arange(keys)
    visible = (key <= rows) | (key // length != rows // length)
    if guidance.bank is not None and guidance.bank.names:
        names = torch.cat(list(guidance.bank.names))
        visible = torch.cat([visible, names != guidance.answer_names[:, None]], 1)
    return visible


def _with_bank(guidance: Guidance, name: str, keys: Tensor) -> Tensor:
    """The batch's keys followed by the bank's; stores those of the batch's facts."""
    bank = guidance.bank
    if bank is None:
        return keys
    stored = bank.keys(name)
    bank.add(name, keys[guidance.fact_rows])
    return keys if stored is None else torch.cat([keys, stored])


def _guide_index(guidance: Guidance, name: str, q: Tensor, weights: Tensor, k: Tensor, length: int) -> None:
    rows, targets = guidance.answer_rows, guidance.answer_keys
    visible = _visible(guidance, length, q.shape[0] * q.shape[1])
    keys = _with_bank(guidance, name, k.flatten(0, 1))
    scores = index_scores(q.flatten(0, 1)[rows], weights.flatten(0, 1)[rows], keys)
    scores = scores.masked_fill(~visible, -1e9)
    guidance.losses[name] = F.cross_entropy(scores, targets)
    with torch.no_grad():
        wanted = scores.gather(1, targets[:, None])
        rank = (scores > wanted).sum(1)
        guidance.measured[f"{name}_first"] = (rank == 0).float().mean().item()
        guidance.measured[f"{name}_top"] = (rank < 32).float().mean().item()


def _guide_attention(guidance: Guidance, number: int, q: Tensor, k: Tensor, probabilities: Tensor, length: int) -> None:
    if number == 0:
        # Two heads of the first layer fetch the two halves of the name.
        rows = guidance.name_rows
        sequence, row = rows // length, rows % length
        for head, keys in ((0, guidance.adjective_keys), (1, guidance.noun_keys)):
            hit = probabilities[sequence, head, row, keys % length]
            guidance.losses[f"name{head}"] = -hit.clamp_min(1e-6).log().mean()
            guidance.measured[f"name{head}"] = hit.detach().mean().item()
        # A third looks evenly at the last five tokens: how many of them are digits says which digit comes next.
        recent = (row[:, None] - torch.arange(5)).clamp_min(0)
        evenly = probabilities[sequence[:, None], 2, row[:, None], recent]
        guidance.losses["count"] = -evenly.clamp_min(1e-6).log().mean() - math.log(5)
        return
    rows, targets = guidance.answer_rows, guidance.answer_keys
    sequence, row = rows // length, rows % length
    hit = probabilities[sequence, :, row, targets % length]
    guidance.measured[f"hit{number}"] = hit.detach().mean().item()
    if number == 1:
        # This layer may choose the keys, but must leave reading the answer to the layers that share its choice.
        guidance.losses["leave1"] = -(1 - hit).clamp_min(1e-6).log().mean()
        return
    heads = 2
    queries = q.flatten(0, 1)[rows][:, :heads].transpose(0, 1)
    visible = _visible(guidance, length, q.shape[0] * q.shape[1])
    keys = _with_bank(guidance, f"read{number}", k.flatten(0, 1)[:, :heads]).permute(1, 2, 0)
    scores = (queries @ keys).masked_fill(~visible, -1e9)
    guidance.losses[f"read{number}"] = F.cross_entropy(scores.flatten(0, 1), targets.repeat(heads))


def _disturb(disturbance: Disturbance, number: int, out: Tensor) -> Tensor:
    if number in disturbance.silenced:
        out = out.masked_fill(disturbance.is_answer[..., None], 0.0)
    if disturbance.swap > 0:
        # What a text token gathers in the middle layers depends on the length of the text; nothing may hang on it.
        swapped = torch.rand(out.shape[:2]) < disturbance.swap
        if number > 1:
            swapped &= ~disturbance.is_answer
        flat = out.flatten(0, 1)
        other = flat[torch.randint(len(flat), (len(flat),))].view_as(out)
        out = torch.where(swapped[..., None], other, out)
    return out
