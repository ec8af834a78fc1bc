"""The model, top to bottom: embedding, layers of MLA + indexer + MLP or MoE, final norm, sampled rows' logits.

May import kernels and the files of `models/`. Invariant: what a row computes is a function of its own tokens and
position; `StepRows` only says which rows are in the call.

Source: transformers' modeling_glm_moe_dsa.py, modeling_deepseek_v32.py, modeling_deepseek_v3.py (same arithmetic,
absorbed form: keys and values stay in the latent space).

Suffixes: T rows of the step · H heads · N nope dim · P rope dim · R latent rank · X = R + P · V value dim · C hidden ·
I indexer heads · D indexer dim · K top-k · F = P / 2 · S sampled rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.kernels.interface import LayerCaches, StepRows
from longfill.kernels.reference.linear import dequantise, experts, linear, mlp, pad_rows, rms_norm, route
from longfill.kernels.reference.quant import quantise_index_queries
from longfill.kernels.reference.store import rotate, store_index_keys, store_latent
from longfill.models.attention import Attend
from longfill.models.config import ModelConfig
from longfill.models.moe import expert_choice
from longfill.models.rope import rope_tables
from longfill.models.weights import AttentionWeights, IndexerWeights, LayerWeights, MlpWeights, ModelWeights

SelectionHook = Callable[[int, Tensor], None]
"""Called with (layer, selection int32 [T, K]) after each full-indexer layer; for tests and diagnosis."""


class Decoder:
    """A loaded model over one pool of pages."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, caches: LayerCaches, attend: Attend) -> None:
        self.config = config
        self.weights = weights
        self.caches = caches
        self.attend = attend
        self.on_selection: SelectionHook | None = None
        self.seconds: dict[str, float] = {}
        """Seconds of the last step by stage."""
        self._up = [self._split_up_projection(layer.attention) for layer in weights.layers]

    def forward(self, rows: StepRows) -> Tensor:
        """Run one step: writes both caches, returns fp32 logits [S, vocabulary] of the sampled rows."""
        self.seconds = {}
        hidden_TC = F.embedding(rows.token_ids_T, self.weights.embed)
        cos_TF, sin_TF = rope_tables(self.config.rope, rows.positions_T)
        for index, layer in enumerate(self.weights.layers):
            hidden_TC = self._layer(index, layer, hidden_TC, rows, cos_TF, sin_TF)
        with self._timed("head"):
            last_SC = rms_norm(hidden_TC[rows.sample_rows_S], self.weights.norm, self.config.rms_norm_eps)
            return linear(last_SC, self.weights.lm_head).float()

    def _layer(
        self, index: int, layer: LayerWeights, hidden_TC: Tensor, rows: StepRows, cos_TF: Tensor, sin_TF: Tensor
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        normed_TC = rms_norm(hidden_TC, layer.input_norm, eps)
        hidden_TC = hidden_TC + self._attention(index, layer.attention, normed_TC, rows, cos_TF, sin_TF)
        normed_TC = rms_norm(hidden_TC, layer.post_attention_norm, eps)
        with self._timed("mlp"):
            if isinstance(layer.mlp, MlpWeights):
                return hidden_TC + mlp(normed_TC, layer.mlp)
            assert self.config.moe is not None
            ids_TK, weights_TK = route(normed_TC, layer.mlp.router, layer.mlp.bias, expert_choice(self.config.moe))
            mixed_TC = experts(normed_TC, ids_TK, weights_TK, layer.mlp.experts)
            if layer.mlp.shared is not None:
                mixed_TC = mixed_TC + mlp(normed_TC, layer.mlp.shared)
            return hidden_TC + mixed_TC

    def _attention(
        self, index: int, w: AttentionWeights, x_TC: Tensor, rows: StepRows, cos_TF: Tensor, sin_TF: Tensor
    ) -> Tensor:
        config = self.config
        with self._timed("project"):
            q_latent = x_TC
            if w.q_a is not None and w.q_a_norm is not None:
                q_latent = rms_norm(linear(x_TC, w.q_a), w.q_a_norm, config.rms_norm_eps)
            q_THQ = linear(q_latent, w.q_b).view(x_TC.shape[0], config.num_heads, -1)
            q_THN, q_THP = torch.split(q_THQ, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
            up_key_HNR, up_value_HRV = self._up[index]
            q_THR = _per_head(q_THN, up_key_HNR)
            q_THX = torch.cat([q_THR, rotate(q_THP, cos_TF, sin_TF, config.rope_interleave)], -1)
        with self._timed("store"):
            store_latent(
                linear(x_TC, w.kv_a), w.kv_a_norm, config.rms_norm_eps, cos_TF, sin_TF,
                self.caches.latent[index], rows.slots_T, interleaved=config.rope_interleave,
            )  # fmt: skip
        if w.indexer is not None:
            self._select(index, w.indexer, x_TC, q_latent, rows, cos_TF, sin_TF)
        with self._timed("attend"):
            out_THR = self.attend(q_THX, self.caches.latent[index], rows)
        with self._timed("project"):
            out_THV = _per_head(out_THR.to(x_TC.dtype), up_value_HRV)
            return linear(out_THV.flatten(1), w.o)

    def _select(
        self, index: int, w: IndexerWeights, x_TC: Tensor, q_latent: Tensor, rows: StepRows,
        cos_TF: Tensor, sin_TF: Tensor,
    ) -> None:  # fmt: skip
        """Store this layer's index keys and choose each row's positions, for it and the shared layers behind it."""
        indexer = self.config.indexer
        assert indexer is not None
        cache = self.caches.index[index]
        with self._timed("store"):
            store_index_keys(
                linear(x_TC, w.wk), (w.k_norm_weight, w.k_norm_bias), cos_TF, sin_TF, cache, rows.slots_T,
                interleaved=indexer.rope_interleave,
            )  # fmt: skip
        with self._timed("index"):
            # Head weights stay in fp32: rounding them to bf16 makes ties among the scores.
            w_TI = linear(x_TC.float(), w.weights_proj) * (indexer.head_dim**-0.5 * indexer.num_heads**-0.5)
            q_TID = linear(q_latent, w.wq_b).view(-1, indexer.num_heads, indexer.head_dim).float()
            rope_dim = self.config.qk_rope_head_dim
            q_rope = rotate(q_TID[..., :rope_dim], cos_TF, sin_TF, indexer.rope_interleave)
            q_TID = torch.cat([q_rope, q_TID[..., rope_dim:]], -1)
            if cache.format == "fp8":
                q_TID, w_TI = quantise_index_queries(q_TID, w_TI)
            selection_TK = self.attend.select(q_TID, w_TI, cache, rows)
        if self.on_selection is not None:
            self.on_selection(index, selection_TK)

    def _split_up_projection(self, w: AttentionWeights) -> tuple[Tensor, Tensor]:
        """kv_b's two halves as views: keys [H, N, R] and values [H, R, V]. An fp8 kv_b is dequantised once, here."""
        weight = w.kv_b.weight
        if w.kv_b.scale is not None:
            weight = dequantise(w.kv_b, 0, weight.shape[0], self.weights.embed.dtype)
        per_head = weight.view(self.config.num_heads, -1, self.config.kv_lora_rank)
        keys_HNR, values_HVR = torch.split(per_head, [self.config.qk_nope_head_dim, self.config.v_head_dim], 1)
        return keys_HNR, values_HVR.transpose(1, 2)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def _per_head(x_THA: Tensor, weight_HAB: Tensor) -> Tensor:
    """[T, H, A] x [H, A, B] -> [T, H, B], one matrix a head."""
    padded = pad_rows(x_THA)
    return torch.bmm(padded.transpose(0, 1), weight_HAB).transpose(0, 1)[: x_THA.shape[0]]
