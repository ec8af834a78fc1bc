"""The model, top to bottom: embedding, layers of MLA + indexer + MLP or MoE, final norm, head.

May import kernels and the files of `models/`. Invariant: what a row computes is a function of its own tokens and
position; `StepRows` only says which rows are in the call.

Source: transformers' modeling_glm_moe_dsa.py, modeling_deepseek_v32.py, modeling_deepseek_v3.py (same arithmetic,
absorbed form: keys and values stay in the latent space).

Suffixes: T rows of the step · H heads · N nope dim · P rope dim · R latent rank · X = R + P · V value dim · C hidden ·
I indexer heads · D indexer dim · K top-k · F = P / 2 · S sampled rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import LayerCaches, ScreenCounts, StepRows
from longfill.models.attention import Attend
from longfill.models.config import ModelConfig
from longfill.models.moe import expert_choice
from longfill.models.rope import rope_tables
from longfill.models.weights import AttentionWeights, IndexerWeights, LayerWeights, ModelWeights, MoeWeights

SelectionHook = Callable[[int, Tensor], None]
"""Called with (layer, selection int32 [T, K]) after each full-indexer layer; for tests and diagnosis."""


Blocks = list[tuple[slice, StepRows]]
"""A step's rows in pieces, so that what a row holds for a moment is held for few rows at once."""


class Decoder:
    """A loaded model over one pool of pages."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, caches: LayerCaches, backend: Backend, attend: Attend, *,
        block_rows: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.weights = weights
        self.caches = caches
        self.backend = backend
        self.attend = attend
        self.block_rows = block_rows
        self.on_selection: SelectionHook | None = None
        self.stages_done = 0
        """Since the start, several in a layer; it tells that a step goes on."""
        self.seconds: dict[str, float] = {}
        """Seconds of the last step by stage."""
        self.screen_counts = ScreenCounts()
        """Of the last step."""
        self._kept: dict[str, Tensor] = {}
        self._choice = expert_choice(config.moe) if config.moe is not None else None

    def forward(self, rows: StepRows, *, all_rows: bool = False) -> Tensor:
        """Run one step, which writes both caches; returns hidden states behind the final norm.

        [S, C] of the sampled rows, or with `all_rows` [T, C] of every one.
        """
        self.seconds = {}
        self.screen_counts = ScreenCounts()
        hidden_TC = F.embedding(rows.token_ids_T, self.weights.embed)
        self.run_layers(0, self.weights.layers, hidden_TC, rows)
        with self._timed("head"):
            kept = hidden_TC if all_rows else hidden_TC[rows.sample_rows_S]
            return self.backend.rms_norm(kept, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, hidden_SC: Tensor) -> Tensor:
        """fp32 [S, vocabulary] of rows that `forward` gave."""
        with self._timed("head"):
            return self.head(hidden_SC)

    def head(self, hidden_SC: Tensor) -> Tensor:
        """The same, counted in no stage."""
        return self.backend.linear(hidden_SC, self.weights.lm_head).float()

    def run_layers(self, first: int, layers: Sequence[LayerWeights], hidden_TC: Tensor, rows: StepRows) -> None:
        """Take the residual stream `hidden_TC` of a step's rows, in place, through layers `first`, `first` + 1..."""
        cos_TF, sin_TF = rope_tables(self.config.rope, rows.positions_T)
        blocks = rows.blocks(self.block_rows)
        self.attend.begin(rows.num_rows)
        for index, layer in enumerate(layers, first):
            self._attention(index, layer, hidden_TC, rows, blocks, cos_TF, sin_TF)
            with self._timed("mlp"):
                self._feed_forward(layer, hidden_TC, blocks)

    def _feed_forward(self, layer: LayerWeights, hidden_TC: Tensor, blocks: Blocks) -> None:
        """hidden += mlp(norm(hidden)). Experts take all rows at once, so that each one's weights are read once."""
        backend, mlp, eps = self.backend, layer.mlp, self.config.rms_norm_eps
        if not isinstance(mlp, MoeWeights):
            for span, _ in blocks:
                normed_TC = backend.rms_norm(hidden_TC[span], layer.post_attention_norm, eps)
                hidden_TC[span] += backend.mlp(normed_TC, mlp)
            return
        assert self._choice is not None
        normed_TC = backend.rms_norm(hidden_TC, layer.post_attention_norm, eps)
        hidden_TC += backend.experts(normed_TC, mlp.router, mlp.bias, self._choice, mlp.experts, mlp.shared)

    def _attention(
        self, index: int, layer: LayerWeights, hidden_TC: Tensor, rows: StepRows, blocks: Blocks,
        cos_TF: Tensor, sin_TF: Tensor,
    ) -> None:  # fmt: skip
        """hidden += attention(norm(hidden)): all rows are stored and selected for before any of them attends."""
        backend, w, eps = self.backend, layer.attention, self.config.rms_norm_eps
        x_TC = backend.rms_norm(hidden_TC, layer.input_norm, eps)
        with self._timed("project"):
            q_latent = x_TC
            if w.q_a is not None and w.q_a_norm is not None:
                q_latent = backend.rms_norm(backend.linear(x_TC, w.q_a), w.q_a_norm, eps)
        with self._timed("store"):
            backend.store_latent(
                backend.linear(x_TC, w.kv_a), w.kv_a_norm, eps, cos_TF, sin_TF, self.caches.latent[index],
                rows.slots_T, interleaved=self.config.rope_interleave,
            )  # fmt: skip
        if w.indexer is not None:
            self._select(index, w.indexer, x_TC, q_latent, rows, blocks, cos_TF, sin_TF)
        for span, block in blocks:
            with self._timed("project"):
                q_THX = self._queries(w, q_latent[span], cos_TF[span], sin_TF[span])
            with self._timed("attend"):
                out_THR = self._room("latent out", q_THX.dtype, *q_THX.shape[:2], self.config.kv_lora_rank)
                self.attend(q_THX, self.caches.latent[index], block, span, out_THR)
            with self._timed("project"):
                out_THV = self._room("out", q_THX.dtype, *q_THX.shape[:2], self.config.v_head_dim)
                backend.per_head(out_THR, w.up_value, out_THV)
                hidden_TC[span] += backend.linear(out_THV.flatten(1), w.o)

    def _queries(self, w: AttentionWeights, q_latent: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """[T, H, R + P]: queries taken into the latent space, with their rotated parts."""
        config = self.config
        q_THQ = self._room("queries", q_latent.dtype, q_latent.shape[0], config.num_heads, config.qk_head_dim)
        self.backend.linear(q_latent, w.q_b, out=q_THQ.flatten(1))
        q_THN, q_THP = torch.split(q_THQ, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        rank = config.kv_lora_rank
        q_THX = self._room("latent queries", q_THQ.dtype, *q_THQ.shape[:2], rank + config.qk_rope_head_dim)
        self.backend.per_head(q_THN, w.up_key, q_THX[..., :rank])
        self.backend.rotate(q_THP, cos_TF, sin_TF, q_THX[..., rank:], interleaved=config.rope_interleave)
        return q_THX

    def _select(
        self, index: int, w: IndexerWeights, x_TC: Tensor, q_latent: Tensor, rows: StepRows, blocks: Blocks,
        cos_TF: Tensor, sin_TF: Tensor,
    ) -> None:  # fmt: skip
        """Store this layer's index keys and choose each row's positions, for it and the shared layers behind it."""
        indexer, backend = self.config.indexer, self.backend
        assert indexer is not None
        cache = self.caches.index[index]
        with self._timed("store"):
            backend.store_index_keys(
                backend.linear(x_TC, w.wk), (w.k_norm_weight, w.k_norm_bias), cos_TF, sin_TF, cache, rows.slots_T,
                interleaved=indexer.rope_interleave,
            )  # fmt: skip
        for span, block in blocks:
            with self._timed("project"):
                # Head weights stay in fp32: rounding them to bf16 makes ties among the scores.
                q_TID, w_TI = backend.index_queries(
                    backend.linear(q_latent[span], w.wq_b),
                    backend.linear(x_TC[span], w.weights_proj, dtype=torch.float32),
                    cos_TF[span], sin_TF[span], interleaved=indexer.rope_interleave, quantise=cache.format == "fp8",
                    w_scale=indexer.head_dim**-0.5 * indexer.num_heads**-0.5,
                )  # fmt: skip
            with self._timed("index"):
                self.screen_counts += self.attend.select(q_TID, w_TI, cache, block, span)
        if self.on_selection is not None:
            self.on_selection(index, self.attend.selection_TK)

    def _room(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Uninitialised; the same memory for each block and layer, so that it is not taken from the system anew."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = self._kept[name] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        self.stages_done += 1
