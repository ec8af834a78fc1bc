"""The half of a layer behind attention: a SwiGLU MLP or a mixture of experts, on one rank or in parts on several.

May import kernels, `parallel` and the files of `models/`. Invariant: with whole weights on one rank nothing is
gathered, cut or added.

Suffixes: A rows that the rank attends for · O rows that it holds · C hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import Mlp
from longfill.models.config import ModelConfig
from longfill.models.expert_parallel import ExpertParallel
from longfill.models.moe import expert_choice
from longfill.models.rows import RankRows
from longfill.models.shards import WeightShards
from longfill.models.sliced import SliceProduct, add_slices
from longfill.models.weights import LayerWeights, MoeWeights
from longfill.parallel.mesh import Mesh


class FeedForward:
    """Adds a layer's MLP or experts to the residual stream."""

    def __init__(self, config: ModelConfig, backend: Backend, mesh: Mesh, shards: WeightShards, all2all: str) -> None:
        self._config = config
        self._backend = backend
        self._tp = mesh.tp
        self._shards = shards
        self._choice = None if config.moe is None else expert_choice(config.moe)
        self._experts: ExpertParallel | None = None
        if config.moe is not None and self._choice is not None and shards.expert_parallel:
            self._experts = ExpertParallel(mesh.ep, backend, self._choice, config.moe.num_experts, all2all)

    def __call__(self, layer: LayerWeights, hidden_OC: Tensor, rows: RankRows, block_rows: int) -> None:
        """hidden += mlp(norm(hidden)). Experts take all rows at once, so that each one's weights are read once."""
        norm, eps, mlp = layer.post_attention_norm, self._config.rms_norm_eps, layer.mlp
        if isinstance(mlp, MoeWeights):
            x_OC = self._backend.rms_norm(hidden_OC, norm, eps)
            if self._experts is not None:
                hidden_OC += self._experts(x_OC, mlp, max(rows.held))
            else:
                hidden_OC += self._moe(x_OC, mlp, rows)
        elif self._shards.is_whole:
            for first in range(0, hidden_OC.shape[0], block_rows):
                block = hidden_OC[first : first + block_rows]
                assert mlp[0] is not None
                block += self._backend.mlp(self._backend.rms_norm(block, norm, eps), mlp[0])
        else:
            self._mlp(self._backend.rms_norm(hidden_OC, norm, eps), mlp, hidden_OC, rows, block_rows)

    def _mlp(
        self, x_OC: Tensor, slices: tuple[Mlp | None, ...], hidden_OC: Tensor, rows: RankRows, block_rows: int
    ) -> None:
        x_AC = self._tp.gather_rows("mlp_rows", x_OC, rows.tp_counts)
        partial = x_AC.new_empty(x_AC.shape, dtype=torch.float32 if self._shards.deterministic else x_AC.dtype)
        for first in range(0, x_AC.shape[0], block_rows):
            block = x_AC[first : first + block_rows]

            def product(i: int, dtype: torch.dtype, block: Tensor = block) -> Tensor | None:
                own = slices[i]
                return None if own is None else self._backend.mlp(block, own, dtype=dtype)

            partial[first : first + block_rows] = self._add(len(slices), product, block)
        hidden_OC += self._tp.sum_rows("mlp_out", partial, rows.tp_counts, dtype=hidden_OC.dtype)

    def _moe(self, x_OC: Tensor, moe: MoeWeights, rows: RankRows) -> Tensor:
        assert self._choice is not None
        x_AC = self._tp.gather_rows("mlp_rows", x_OC, rows.tp_counts)
        ids_AK, weights_AK = self._backend.route(x_AC, moe.router, moe.bias, self._choice)

        def product(i: int, dtype: torch.dtype) -> Tensor | None:
            own = moe.slices[i]
            if own is None:
                return None
            return self._backend.experts(x_AC, ids_AK, weights_AK, own.experts, own.shared, dtype=dtype)

        if self._shards.is_whole:
            whole = product(0, x_AC.dtype)
            assert whole is not None
            return whole
        partial = self._add(len(moe.slices), product, x_AC)
        return self._tp.sum_rows("mlp_out", partial, rows.tp_counts, dtype=x_OC.dtype)

    def _add(self, count: int, product: SliceProduct, x_TC: Tensor) -> Tensor:
        return add_slices(count, product, x_TC, x_TC.shape[1], deterministic=self._shards.deterministic)
