"""The model, top to bottom: embedding, layers of MLA + indexer + MLP or MoE, final norm, head.

May import kernels, `parallel` and the files of `models/`. Invariant: what a row computes is a function of its own
tokens and position; `RankRows` only says which rows are in the call and on which rank.

The residual stream of a row lives on one rank. What attention and MLPs need of all rows of a TP group is gathered
before them: the query latents, the rows behind the norm. What they put out is added when it comes back to the stream.

Source: transformers' modeling_glm_moe_dsa.py, modeling_deepseek_v32.py, modeling_deepseek_v3.py (same arithmetic,
absorbed form: keys and values stay in the latent space).

Suffixes: T rows · A rows that the rank attends for · O rows that it holds · H its heads · N nope dim · P rope dim ·
R latent rank · X = R + P · V value dim · C hidden · I indexer heads · D indexer dim · K top-k · F = P / 2 · S some
rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import LayerCaches, Linear, ScreenCounts
from longfill.models.attention import Attend
from longfill.models.config import ModelConfig
from longfill.models.exchange import Arriving, NewKeys
from longfill.models.feed_forward import FeedForward
from longfill.models.rope import rope_tables
from longfill.models.row_parts import RowPart, row_parts
from longfill.models.rows import RankRows
from longfill.models.shard_attention import ShardAttend
from longfill.models.shards import WeightShards
from longfill.models.sliced import add_slices
from longfill.models.weights import AttentionWeights, IndexerWeights, LayerWeights, ModelWeights
from longfill.parallel.group import Pending
from longfill.parallel.mesh import Mesh
from longfill.partition.lengths import even_cuts
from longfill.partition.spread import Pick

SelectionHook = Callable[[int, Tensor], None]
"""Called with (layer, selection int32 [A, K]) after each full-indexer layer; for tests and diagnosis."""


class Decoder:
    """This rank's part of a loaded model, over its pool of pages."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, caches: LayerCaches, backend: Backend, attend: Attend,
        shard_attend: ShardAttend | None, mesh: Mesh, shards: WeightShards, *, block_rows: int, interleave: int,
        all2all: str,
    ) -> None:  # fmt: skip
        """`shard_attend`: for rows whose keys lie on several ranks; None without decode context parallelism."""
        self.config = config
        self.weights = weights
        self.caches = caches
        self.backend = backend
        self.attend = attend
        self.mesh = mesh
        self.block_rows = block_rows
        self.num_heads = len(shards.outputs(config.num_heads))
        self.on_selection: SelectionHook | None = None
        self.stages_done = 0
        """Since the start, several in a layer; it tells that a step goes on."""
        self.seconds: dict[str, float] = {}
        """Seconds of the last step by stage."""
        self.screen_counts = ScreenCounts()
        """Of the last step."""
        self._shard_attend = shard_attend
        self._shards = shards
        self._interleave = interleave
        self._new_keys = NewKeys(config, backend, caches, mesh.rows)
        self._feed_forward = FeedForward(config, backend, mesh, shards, all2all)
        self._kept: dict[str, Tensor] = {}

    def forward(self, rows: RankRows) -> Tensor:
        """Run one step, which writes both caches; returns the residual stream [O, C] of the rows held here."""
        self.seconds = {}
        self.screen_counts = ScreenCounts()
        hidden_OC = F.embedding(rows.token_ids_O, self.weights.embed)
        self.run_layers(0, self.weights.layers, hidden_OC, rows)
        return hidden_OC

    def norm(self, hidden_OC: Tensor) -> Tensor:
        """Rows behind the final norm."""
        with self._timed("head"):
            return self.backend.rms_norm(hidden_OC, self.weights.norm, self.config.rms_norm_eps)

    def collect(self, hidden_OC: Tensor, pick: Pick) -> Tensor:
        """[S, C]: some rows of the batch, on every rank, from those that hold them."""
        local = torch.from_numpy(pick.local[self.mesh.rows.rank])
        gathered = self.mesh.rows.gather_rows("hidden", hidden_OC[local], pick.counts)
        return gathered[torch.from_numpy(pick.order)]

    def logits(self, hidden_SC: Tensor) -> Tensor | None:
        """fp32 [S, vocabulary] of rows behind the final norm; None on all ranks but the first."""
        with self._timed("head"):
            return self.head(hidden_SC, self.weights.lm_head)

    def head(self, hidden_SC: Tensor, head: Linear) -> Tensor | None:
        """The same by any head, counted in no stage."""
        mesh = self.mesh
        if mesh.rank >= mesh.tp.size:
            return None
        own_SV = self.backend.linear(hidden_SC, head).float()
        if mesh.tp.size == 1:
            return own_SV
        counts = [end - first for first, end in pairwise(even_cuts(self.config.vocab_size, mesh.tp.size))]
        logits_VS = mesh.tp.to_first("logits", own_SV.T.contiguous(), counts)
        return None if logits_VS is None else logits_VS.T.contiguous()

    def run_layers(self, first: int, layers: Sequence[LayerWeights], hidden_OC: Tensor, rows: RankRows) -> None:
        """Take the residual stream `hidden_OC` of a step's rows, in place, through layers `first`, `first` + 1..."""
        cos_AF, sin_AF = rope_tables(self.config.rope, rows.attend.positions_T)
        self.attend.begin(rows.attend.num_rows)
        parts = row_parts(
            rows, self.attend, self._shard_attend, self.mesh, block_rows=self.block_rows,
            interleave=self._interleave, page_size=self.caches.latent[0].rows_NBX.shape[1],
        )  # fmt: skip
        for index, layer in enumerate(layers, first):
            self._attention(index, layer, hidden_OC, rows, parts, cos_AF, sin_AF)
            with self._timed("mlp"):
                self._feed_forward(layer, hidden_OC, rows, self.block_rows)

    def _attention(
        self, index: int, layer: LayerWeights, hidden_OC: Tensor, rows: RankRows, parts: list[RowPart],
        cos_AF: Tensor, sin_AF: Tensor,
    ) -> None:  # fmt: skip
        """hidden += attention(norm(hidden)): all rows are stored and selected for before any of them attends.

        What ranks need of each other's rows travels meanwhile: latents while keys are computed, keys while queries are.
        """
        backend, w, eps, mesh = self.backend, layer.attention, self.config.rms_norm_eps, self.mesh
        x_OC = backend.rms_norm(hidden_OC, layer.input_norm, eps)
        with self._timed("project"):
            q_latent = x_OC
            if w.q_a is not None and w.q_a_norm is not None:
                q_latent = backend.rms_norm(backend.linear(x_OC, w.q_a), w.q_a_norm, eps)
            latents = mesh.tp.start_gather("query_latents", q_latent, rows.tp_counts)
        with self._timed("store"):
            arriving = self._new_keys.start(index, w, x_OC, cos_AF[rows.own], sin_AF[rows.own], rows)
        with self._timed("project"):
            head_weights: Pending | None = None
            if w.indexer is not None:
                # Head weights stay in fp32: rounding them to bf16 makes ties among the scores.
                w_OI = backend.linear(x_OC, w.indexer.weights_proj, dtype=torch.float32)
                head_weights = mesh.tp.start_gather("head_weights", w_OI, rows.tp_counts)
            q_latent = latents.wait()
            w_AI = None if head_weights is None else head_weights.wait()
        if w.indexer is not None and w_AI is not None:
            self._select(index, w.indexer, w_AI, q_latent, rows, parts, cos_AF, sin_AF, arriving)
        partial: Tensor | None = None
        if not self._shards.is_whole:
            dtype = torch.float32 if self._shards.deterministic else hidden_OC.dtype
            partial = torch.empty(rows.attend.num_rows, hidden_OC.shape[1], dtype=dtype)
        for part in parts:
            cache = self.caches.latent[index]
            if part.context is not None:
                self._store(arriving)
                cache = part.context.latent(cache)
            for span, block in part.blocks:
                with self._timed("project"):
                    q_THX = self._queries(w, q_latent[span], cos_AF[span], sin_AF[span])
                self._store(arriving)
                with self._timed("attend"):
                    out_THR = self._room("latent out", q_THX.dtype, *q_THX.shape[:2], self.config.kv_lora_rank)
                    part.attend(q_THX, cache, block, span, out_THR)
                with self._timed("project"):
                    out_THV = self._room("out", q_THX.dtype, *q_THX.shape[:2], self.config.v_head_dim)
                    backend.per_head(out_THR, w.up_value, out_THV)
                    if partial is None:
                        assert w.o[0] is not None
                        hidden_OC[span] += backend.linear(out_THV.flatten(1), w.o[0])
                    else:
                        partial[span] = self._output(w, out_THV.flatten(1))
        self._store(arriving)  # of a rank without any row
        if partial is not None:
            with self._timed("project"):
                hidden_OC += mesh.tp.sum_rows("attention_out", partial, rows.tp_counts, dtype=hidden_OC.dtype)

    def _store(self, arriving: Arriving) -> None:
        with self._timed("store"):
            arriving.finish()

    def _output(self, w: AttentionWeights, out_TJ: Tensor) -> Tensor:
        """[T, C]: what this rank's heads put out, slice by slice."""
        ends = [0]
        for weight in w.o:
            ends.append(ends[-1] + (0 if weight is None else weight.in_size))

        def product(i: int, dtype: torch.dtype) -> Tensor | None:
            weight = w.o[i]
            if weight is None:
                return None
            return self.backend.linear(out_TJ[:, ends[i] : ends[i + 1]], weight, dtype=dtype)

        return add_slices(len(w.o), product, out_TJ, self.config.hidden_size, deterministic=self._shards.deterministic)

    def _queries(self, w: AttentionWeights, q_latent: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """[T, H, R + P]: queries taken into the latent space, with their rotated parts."""
        config = self.config
        q_THQ = self._room("queries", q_latent.dtype, q_latent.shape[0], self.num_heads, config.qk_head_dim)
        self.backend.linear(q_latent, w.q_b, out=q_THQ.flatten(1))
        q_THN, q_THP = torch.split(q_THQ, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        rank = config.kv_lora_rank
        q_THX = self._room("latent queries", q_THQ.dtype, *q_THQ.shape[:2], rank + config.qk_rope_head_dim)
        self.backend.per_head(q_THN, w.up_key, q_THX[..., :rank])
        self.backend.rotate(q_THP, cos_TF, sin_TF, q_THX[..., rank:], interleaved=config.rope_interleave)
        return q_THX

    def _select(
        self, index: int, w: IndexerWeights, w_AI: Tensor, q_latent: Tensor, rows: RankRows, parts: list[RowPart],
        cos_AF: Tensor, sin_AF: Tensor, arriving: Arriving,
    ) -> None:  # fmt: skip
        """Choose each row's positions, for this layer and the shared ones behind it."""
        indexer, backend, tp = self.config.indexer, self.backend, self.mesh.tp
        assert indexer is not None
        for part in parts:
            cache = self.caches.index[index]
            if part.context is not None:
                self._store(arriving)
                cache = part.context.index(cache)
            for span, block in part.scored_blocks:
                with self._timed("project"):
                    q_TID, w_TI = backend.index_queries(
                        backend.linear(q_latent[span], w.wq_b), w_AI[span], cos_AF[span], sin_AF[span],
                        interleaved=indexer.rope_interleave, quantise=cache.format == "fp8",
                        w_scale=indexer.head_dim**-0.5 * indexer.num_heads**-0.5,
                    )  # fmt: skip
                self._store(arriving)
                with self._timed("index"):
                    self.screen_counts += part.attend.select(q_TID, w_TI, cache, block, span)
        if rows.score_counts is not None:
            with self._timed("index"):
                (only,) = parts
                selection_TK = self.attend.selection_TK
                tp.gather_rows("selection", selection_TK[only.scored], rows.score_counts, out=selection_TK)
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
