"""Experts on other ranks: rows go to where their experts are, outputs come back and are added where the row is.

May import kernels and `parallel`. Invariant: a row's outputs come back one by one, in float32, and are added by the
row's own rank in ascending order of experts, as one rank adds them: so the number of ranks changes no bit.

Two forms. `high_throughput`: a row goes once to each rank that has any of its experts; how many go where is exchanged
first, and steps of many rows run in rounds, which bounds what a rank can be sent. `low_latency`: every pair of ranks
exchanges buffers with a fixed number of places for each expert, as many as a rank has rows at most: more bytes, but one
exchange less, and sizes that all know beforehand.

Suffixes: O rows that this rank holds · M rows that have come · S outputs, one for each (row, expert) · K experts a row
· C hidden · E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from longfill.kernels.backend import Backend
from longfill.kernels.interface import ExpertChoice, Mlp
from longfill.models.weights import MoeWeights
from longfill.parallel.group import Group
from longfill.partition.comm import expert_rounds, sends_fixed_buffers
from longfill.partition.lengths import even_cuts


class ExpertParallel:
    """Runs a layer's routed experts, which are spread over the ranks of a group, and the shared one here."""

    def __init__(self, group: Group, backend: Backend, choice: ExpertChoice, num_experts: int, form: str) -> None:
        """`form`: "high_throughput", "low_latency" or "auto"."""
        self._group = group
        self._backend = backend
        self._choice = choice
        self._form = form
        cuts = even_cuts(num_experts, group.size)
        self._ends = torch.tensor(cuts[1:])
        self._held = [end - first for first, end in pairwise(cuts)]
        self._first = cuts[group.rank]

    def __call__(self, x_OC: Tensor, weights: MoeWeights, most_rows: int) -> Tensor:
        """[O, C] in the dtype of x: all chosen experts and the shared one. `most_rows`: the largest O of all ranks."""
        (own,) = weights.slices
        assert own is not None
        ids_OK, factors_OK = self._backend.route(x_OC, weights.router, weights.bias, self._choice)
        shared_OC = None if own.shared is None else self._backend.mlp(x_OC, own.shared, dtype=torch.float32)
        num_experts, row_bytes = sum(self._held), x_OC.shape[1] * x_OC.element_size()
        fixed = sends_fixed_buffers(self._form, most_rows, num_experts=num_experts, row_bytes=row_bytes)
        outputs = num_experts if fixed else self._choice.experts_per_token * self._group.size
        rounds = expert_rounds(most_rows, hidden=x_OC.shape[1], outputs=outputs)
        out_OC, first = torch.empty_like(x_OC), 0
        for rows in rounds:
            at = slice(first, min(first + rows, x_OC.shape[0]))
            if fixed:
                y_SC, slots_OK = self._fixed(x_OC[at], ids_OK[at], own.experts, rows)
            else:
                y_SC, slots_OK = self._by_rank(x_OC[at], ids_OK[at], own.experts)
            out_OC[at] = self._backend.fold_experts(
                y_SC, slots_OK, factors_OK[at], None if shared_OC is None else shared_OC[at], dtype=x_OC.dtype
            )
            first += rows
        return out_OC

    def _by_rank(self, x_OC: Tensor, ids_OK: Tensor, experts: Sequence[Mlp]) -> tuple[Tensor, Tensor]:
        """Each row once to every rank that has an expert of it."""
        group = self._group
        owner_OK = torch.searchsorted(self._ends, ids_OK, right=True)
        rows_of = [(owner_OK == rank).any(1).nonzero()[:, 0] for rank in range(group.size)]
        send = [rows.numel() for rows in rows_of]
        ones = [1] * group.size
        receive = group.exchange_rows("expert_counts", torch.tensor(send), ones, ones).tolist()
        sent = torch.cat(rows_of)
        wanted = [torch.where(owner_OK[rows] == rank, ids_OK[rows], -1) for rank, rows in enumerate(rows_of)]
        x_MC = group.exchange_rows("expert_rows", x_OC[sent], send, receive)
        ids_MK = group.exchange_rows("expert_ids", torch.cat(wanted).to(torch.int16), send, receive)
        rows_S, columns_S = (ids_MK >= 0).nonzero(as_tuple=True)
        y_SC = self._outputs(x_MC[rows_S], ids_MK[rows_S, columns_S].long() - self._first, experts)
        returned = [int(n) for n in torch.stack([(part >= 0).sum() for part in torch.split(ids_MK, receive)])]
        expected = [int((ids >= 0).sum()) for ids in wanted]
        outputs = group.exchange_rows("expert_outputs", y_SC, returned, expected)
        slots_S = torch.empty(ids_OK.numel(), dtype=torch.int64)
        slots_S[owner_OK.flatten().argsort(stable=True)] = torch.arange(ids_OK.numel())
        return outputs, slots_S.view_as(ids_OK)

    def _fixed(self, x_OC: Tensor, ids_OK: Tensor, experts: Sequence[Mlp], rows: int) -> tuple[Tensor, Tensor]:
        """`rows` places for each expert, filled from the front."""
        group, width = self._group, x_OC.shape[1]
        num_experts, own = sum(self._held), self._held[group.rank]
        flat = ids_OK.flatten()
        order = flat.argsort(stable=True)
        counts_E = torch.bincount(flat, minlength=num_experts)
        places_S = torch.empty_like(flat)
        places_S[order] = torch.arange(flat.numel()) - (counts_E.cumsum(0) - counts_E)[flat[order]]
        buffer_EOC = x_OC.new_zeros(num_experts, rows, width)
        buffer_EOC[flat, places_S] = x_OC.repeat_interleave(ids_OK.shape[1], 0)
        mine = [own] * group.size
        filled = group.exchange_rows("expert_counts", counts_E.to(torch.int32), self._held, mine)
        received = group.exchange_rows("expert_rows", buffer_EOC, self._held, mine)
        taken = (torch.arange(rows) < filled[:, None]).nonzero(as_tuple=True)
        outputs = torch.zeros(received.shape)
        outputs[taken] = self._outputs(received[taken], taken[0] % max(own, 1), experts)
        y_EOC = group.exchange_rows("expert_outputs", outputs, mine, self._held)
        return y_EOC.flatten(0, 1), (flat * rows + places_S).view_as(ids_OK)

    def _outputs(self, x_SC: Tensor, local_S: Tensor, experts: Sequence[Mlp]) -> Tensor:
        """fp32 [S, C]: one expert's output for each row, as it is before it is weighed."""
        if not experts:  # there are more ranks than experts
            return torch.empty(0, x_SC.shape[1])
        ones = torch.ones(x_SC.shape[0], 1)
        return self._backend.experts(x_SC, local_S[:, None], ones, experts, None, dtype=torch.float32)
