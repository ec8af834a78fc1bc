"""What makes the draft layer quick to train: coordinates in which nothing is faint, and a first guess.

The names that bind a digit to its fact reach the draft layer only as a faint part of the main model's last hidden
states, under what the last layers wrote for the next token. So the layer's matrices are trained in whitened
coordinates of those states and folded back for export; the hidden state is passed on as it is, the token written
where the states are strong; and the index and the queries start as those of the main model's layers that look up
facts, fitted to this input by least squares.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from data import Shape, make_batch
from draft import DraftLayer, rounded
from model import Attention, Indexer, MoE, NeedleModel
from torch import Tensor, nn
from torch.nn.utils import parametrize

BATCHES = 60
TOKEN_DIRECTIONS = 32  # of the hidden states' 128, the strongest
RIDGE = 1e-3
QUIET = 0.1  # how much the layer's own outputs are damped at first, so that what it is given passes through
INDEX_LAYER = 1
READ_LAYER = 2


class _Through(nn.Module):
    """A weight [..., out, in] as `left` x the trained matrix x `right`, rounded to bf16 as in the checkpoint."""

    def __init__(self, left: Tensor | None, right: Tensor | None) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, inner: Tensor) -> Tensor:
        weight = inner if self.left is None else self.left @ inner
        weight = weight if self.right is None else weight @ self.right
        return rounded(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        inner = weight if self.left is None else torch.linalg.solve(self.left, weight)
        return inner if self.right is None else torch.linalg.solve(self.right.T, inner.mT).mT


@dataclass(frozen=True)
class Looked:
    """What the main model makes of some batches."""

    hidden: Tensor  # last hidden states of all rows
    named_hidden: Tensor  # N hidden, of the rows that know a name
    named_tokens: Tensor  # N hidden, embeddings of the tokens after them
    index_input: Tensor  # N hidden, normed inputs of `INDEX_LAYER`
    read_input: Tensor  # N hidden, normed inputs of `READ_LAYER`


@torch.no_grad()
def look(main: NeedleModel, shape: Shape, seed: int) -> Looked:
    """Runs the main model over `BATCHES` batches."""
    rng = random.Random(seed)
    caught: dict[int, Tensor] = {}

    def catch(number: int) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _inputs: tuple[Tensor, ...], out: Tensor) -> None:
            caught[number] = out.flatten(0, 1)

        norm: nn.Module = main.layers[number].input_layernorm  # type: ignore[assignment]
        return norm.register_forward_hook(keep)

    hooks = [catch(INDEX_LAYER), catch(READ_LAYER)]
    parts: list[tuple[Tensor, ...]] = []
    for _ in range(BATCHES):
        batch = make_batch(rng, shape)
        hidden = main(batch.tokens, batch.positions, sparse=True).flatten(0, 1)
        following = batch.targets.flatten()
        rows = batch.name_rows[following[batch.name_rows] >= 0]
        tokens = main.embed_tokens(following[rows])
        parts.append(
            (hidden[following >= 0], hidden[rows], tokens, caught[INDEX_LAYER][rows], caught[READ_LAYER][rows])
        )
    for hook in hooks:
        hook.remove()
    return Looked(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.no_grad()
def warm_start(draft: DraftLayer, main: NeedleModel, looked: Looked) -> None:
    """Writes the first guess into a new layer."""
    values, vectors = _spectrum(draft, looked.hidden)
    strong = vectors[:, -TOKEN_DIRECTIONS:] * values[-TOKEN_DIRECTIONS:]
    size = draft.config.hidden_size
    draft.eh_proj.weight[:, :size] = strong @ torch.randn(TOKEN_DIRECTIONS, size) * size**-0.5
    draft.eh_proj.weight[:, size:] = torch.eye(size)
    x = draft.join(looked.named_tokens, looked.named_hidden, torch.ones(1))
    x = draft.layer.input_layernorm(x)
    attention: Attention = draft.layer.self_attn  # type: ignore[assignment]
    _copy_lookup(attention, main, x, looked.index_input, looked.read_input)
    # The rest is random, in the coordinates in which it is trained.
    moe: MoE = draft.layer.mlp  # type: ignore[assignment]
    whiten, spread = (vectors / values) @ vectors.T, (vectors * values) @ vectors.T
    shared = moe.shared_experts
    for weight in (moe.gate.weight, moe.expert_gate, moe.expert_up, shared.gate_proj.weight, shared.up_proj.weight):
        weight.copy_(weight @ whiten)
    for weight in (attention.o_proj.weight, moe.expert_down, shared.down_proj.weight):
        weight.copy_(QUIET * spread @ weight)


def _spectrum(draft: DraftLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """How strong the hidden states are in each of their principal directions, weakest first, and the directions."""
    states = draft.hnorm(hidden)
    values, vectors = torch.linalg.eigh(states.T @ states / len(states))
    return (values.clamp_min(0) + RIDGE).sqrt(), vectors


def _copy_lookup(target: Attention, main: NeedleModel, x: Tensor, looked_up: Tensor, read: Tensor) -> None:
    """Index and queries that know the name from `x` as the main model's know it from their own inputs."""
    source: Attention = main.layers[INDEX_LAYER].self_attn  # type: ignore[assignment]
    reader: Attention = main.layers[READ_LAYER].self_attn  # type: ignore[assignment]
    to_index, to_read = _fit(x, looked_up), _fit(x, read)
    mine, theirs = target.indexer, source.indexer
    assert isinstance(mine, Indexer)
    assert isinstance(theirs, Indexer)
    mine.load_state_dict(theirs.state_dict())
    mine.wk.weight.copy_(theirs.wk.weight @ to_index)
    mine.weights_proj.weight.copy_(theirs.weights_proj.weight @ to_index)
    target.q_a_proj.weight.copy_(source.q_a_proj.weight @ to_index)
    target.q_a_layernorm.load_state_dict(source.q_a_layernorm.state_dict())
    target.kv_a_proj_with_mqa.weight.copy_(reader.kv_a_proj_with_mqa.weight @ to_read)
    target.kv_a_layernorm.load_state_dict(reader.kv_a_layernorm.state_dict())
    target.kv_b_proj.load_state_dict(reader.kv_b_proj.state_dict())
    asked = reader.q_b_proj(reader.q_a_layernorm(reader.q_a_proj(read)))
    target.q_b_proj.weight.copy_(_fit(target.q_a_layernorm(target.q_a_proj(x)), asked))


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """The matrix [outputs, inputs] that maps rows of `x` to rows of `y` best."""
    x, y = x.double(), y.double()
    ridge = RIDGE * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()


@torch.no_grad()
def lay_coordinates(draft: DraftLayer, hidden: Tensor) -> None:
    """Lays whitened coordinates of the states under all matrices; what they compute does not change."""
    values, vectors = _spectrum(draft, hidden)
    whiten, spread = (vectors / values) @ vectors.T, (vectors * values) @ vectors.T
    attention: Attention = draft.layer.self_attn  # type: ignore[assignment]
    moe: MoE = draft.layer.mlp  # type: ignore[assignment]
    shared, indexer = moe.shared_experts, attention.indexer
    assert indexer is not None
    readers = (attention.q_a_proj, attention.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj)
    for module in (*readers, moe.gate, shared.gate_proj, shared.up_proj):
        parametrize.register_parametrization(module, "weight", _Through(None, whiten))
    for name in ("expert_gate", "expert_up"):
        parametrize.register_parametrization(moe, name, _Through(None, whiten))
    for module in (attention.o_proj, shared.down_proj):
        parametrize.register_parametrization(module, "weight", _Through(spread, None))
    parametrize.register_parametrization(moe, "expert_down", _Through(spread, None))
    both = torch.block_diag(torch.eye(len(whiten)), whiten)
    parametrize.register_parametrization(draft.eh_proj, "weight", _Through(spread, both))
    for module in (attention.q_b_proj, attention.kv_b_proj, indexer.wq_b):
        parametrize.register_parametrization(module, "weight", _Through(None, None))
