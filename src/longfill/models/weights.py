"""A model's parameters as plain dataclasses of tensors, in the engine's own terms.

May import torch. Invariant: a tensor here is either a view of the mapped checkpoint or the only converted copy of it.

Sizes in the comments: C hidden size · Q query latent · R key-value latent · P rope dim · H heads · N nope dim · V value
dim · I indexer heads · D indexer dim · F intermediate size · E experts · S vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longfill.units import Bytes


class _Weights:
    """What every part can say about itself."""

    @property
    def num_bytes(self) -> Bytes:
        """Bytes of all tensors below; one that appears twice (a tied head) counts once."""
        return Bytes(sum(size for _, size in {(t.data_ptr(), t.nbytes) for t in _tensors(self)}))


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif isinstance(part, _Weights) and dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))


@dataclass(frozen=True)
class LinearWeight(_Weights):
    """y = x @ weight.T + bias. fp8: `weight` is e4m3 as stored, and the value of element (i, j) is
    weight[i, j] * scale[i // block[0], j // block[1]], with float32 scales."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]
    scale: Tensor | None = None  # float32 [ceil(out / block[0]), ceil(in / block[1])]
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class IndexerWeights(_Weights):
    """The indexer of a full layer. Its norm and head weights are float32: rounding them makes scores tie."""

    wq_b: LinearWeight  # [I D, Q]
    wk: LinearWeight  # [D, C]
    k_norm_weight: Tensor  # float32 [D]
    k_norm_bias: Tensor  # float32 [D]
    weights_proj: LinearWeight  # float32 [I, C]


@dataclass(frozen=True)
class AttentionWeights(_Weights):
    """Latent attention. Without a query latent, `q_a` and `q_a_norm` are None and `q_b` reads the hidden state."""

    q_a: LinearWeight | None  # [Q, C]
    q_a_norm: Tensor | None  # [Q]
    q_b: LinearWeight  # [H (N + P), Q or C]
    kv_a: LinearWeight  # [R + P, C]
    kv_a_norm: Tensor  # [R]
    kv_b: LinearWeight  # [H (N + V), R]
    o: LinearWeight  # [C, H V]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MlpWeights(_Weights):
    """down(silu(gate(x)) * up(x))."""

    gate: LinearWeight  # [F, C]
    up: LinearWeight  # [F, C]
    down: LinearWeight  # [C, F]


@dataclass(frozen=True)
class MoeWeights(_Weights):
    """Routed experts, the router that chooses among them, and the expert that every token takes."""

    router: Tensor  # float32 [E, C]
    bias: Tensor | None  # float32 [E]: added to the scores for the choice only
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights(_Weights):
    """One decoder layer."""

    input_norm: Tensor  # [C]
    attention: AttentionWeights
    post_attention_norm: Tensor  # [C]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights(_Weights):
    """One multi-token-prediction layer: drafts from the last hidden state and the next token's embedding."""

    embed: Tensor  # [S, C]
    enorm: Tensor  # [C]
    hnorm: Tensor  # [C]
    eh_proj: LinearWeight  # [C, 2 C]
    layer: LayerWeights
    head_norm: Tensor  # [C]
    head: LinearWeight  # [S, C]


@dataclass(frozen=True)
class ModelWeights(_Weights):
    """A whole model. A tied head's weight is `embed` itself."""

    embed: Tensor  # [S, C]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [C]
    lm_head: LinearWeight  # [S, C]
    mtp: tuple[MtpWeights, ...] = ()
