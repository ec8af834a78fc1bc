"""A model's parameters as plain dataclasses of tensors, in the engine's own terms.

May import torch and the kernels' interface. Invariant: a tensor here is either a view of the mapped checkpoint or the
only converted or packed copy of it.

Sizes in the comments (of this rank's part, where weights are split): C hidden size · Q query latent · R key-value
latent · P rope dim · H heads · N nope dim · V value dim · I indexer heads · D indexer dim · F intermediate size · E
experts · S vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longfill.kernels.interface import Heads, Linear, Mlp
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
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))


@dataclass(frozen=True)
class IndexerWeights(_Weights):
    """The indexer of a full layer. Its norm and head weights are float32: rounding them makes scores tie."""

    wq_b: Linear  # [I D, Q]
    wk: Linear  # [D, C]
    k_norm_weight: Tensor  # float32 [D]
    k_norm_bias: Tensor  # float32 [D]
    weights_proj: Linear  # float32 [I, C]


@dataclass(frozen=True)
class AttentionWeights(_Weights):
    """Latent attention. Without a query latent, `q_a` and `q_a_norm` are None and `q_b` reads the hidden state."""

    q_a: Linear | None  # [Q, C]
    q_a_norm: Tensor | None  # [Q]
    q_b: Linear  # [H (N + P), Q or C]
    kv_a: Linear  # [R + P, C]
    kv_a_norm: Tensor  # [R]
    up_key: Heads  # N -> R
    up_value: Heads  # R -> V
    o: tuple[Linear | None, ...]  # [C, H V], in slices of heads (see `models.shards`); None is an empty one
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class ExpertWeights(_Weights):
    """Routed experts, or a slice of each one's inner width, and the expert that every token takes."""

    experts: tuple[Mlp, ...]
    shared: Mlp | None


@dataclass(frozen=True)
class MoeWeights(_Weights):
    """The router and the experts that it chooses among; with expert parallelism this rank's, in one whole slice."""

    router: Linear  # float32 [E, C]
    bias: Tensor | None  # float32 [E]: added to the scores for the choice only
    slices: tuple[ExpertWeights | None, ...]


@dataclass(frozen=True)
class LayerWeights(_Weights):
    """One decoder layer."""

    input_norm: Tensor  # [C]
    attention: AttentionWeights
    post_attention_norm: Tensor  # [C]
    mlp: tuple[Mlp | None, ...] | MoeWeights  # an MLP in slices of its inner width


@dataclass(frozen=True)
class MtpWeights(_Weights):
    """The multi-token-prediction layer: drafts from a hidden state and the next token's embedding."""

    embed: Tensor  # [S, C]
    enorm: Tensor  # [C]
    hnorm: Tensor  # [C]
    eh_proj: Linear  # [C, 2 C]
    layer: LayerWeights
    head_norm: Tensor  # [C]
    head: Linear  # [S, C]


@dataclass(frozen=True)
class ModelWeights(_Weights):
    """A whole model. A tied head's weight is `embed` itself; `mtp` is None unless drafts are wanted."""

    embed: Tensor  # [S, C]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [C]
    lm_head: Linear  # [S, C]
    mtp: MtpWeights | None = None
