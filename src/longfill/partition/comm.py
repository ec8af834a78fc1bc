"""Bytes that a rank sends to others in a step, by what they are: counted before anything is sent.

May import NumPy and `partition/`. Invariant: each figure is what the operation of that name counts when it runs.

Bytes are those that leave a rank for another one: a gather sends a rank's rows to each of the others, a sum the rows of
each of the others to it. They follow from the plan alone, but for experts in the high-throughput form: where rows go is
the router's choice, of which `expert_comm` takes the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longfill.partition.dcp import dcp_local_lens
from longfill.partition.lengths import Int64Array, even_cuts
from longfill.partition.spread import Cut, Pick
from longfill.partition.step import StepPlan

FLOAT_BYTES = 4
INDEX_BYTES = 4
TOKEN_BYTES = 8
EXPERT_ID_BYTES = 2


@dataclass(frozen=True)
class LayerKind:
    """What a layer exchanges besides attention."""

    full_indexer: bool
    moe: bool


@dataclass(frozen=True)
class CommSizes:
    """A model's widths in elements, and how its parts are exchanged."""

    hidden: int
    element_bytes: int
    """Of activations."""
    heads: int
    latent_rank: int
    latent_width: int
    """Latent rank and rotary part together."""
    query_latent: int
    """Width of what queries are projected from: the query latent, or the hidden state."""
    latent_row_bytes: int
    index_value_bytes: int
    index_scale_bytes: int
    """Of a cached index key; 0 without an indexer, as the next two."""
    index_heads: int
    topk: int
    vocab: int
    num_experts: int
    experts_per_token: int
    layers: tuple[LayerKind, ...]
    expert_parallel: bool
    all2all: str
    deterministic: bool
    reduces_parts: bool
    """Whether parts of attention are weighed and reduced (`ag_rs`) instead of exchanged (`a2a`)."""


def layers_comm(plan: StepPlan, cut: Cut, sizes: CommSizes, layers: Sequence[LayerKind]) -> Counter[str]:
    """Bytes of one pass through `layers`, without those of expert parallelism."""
    total: Counter[str] = Counter()
    for layer in layers:
        total += _attention(plan, cut, sizes, layer)
        if not (layer.moe and sizes.expert_parallel):
            total += _feed_forward(plan, cut, sizes)
    return total


def step_comm(plan: StepPlan, cut: Cut, sizes: CommSizes) -> Counter[str]:
    """Bytes of a whole step, but for a draft layer's and those of experts in the high-throughput form."""
    total = layers_comm(plan, cut, sizes, sizes.layers) + collect_comm(plan.share.pick(plan.sample_rows), cut, sizes)
    if not sizes.expert_parallel:
        return total
    most = max(plan.share.held)
    row_bytes = sizes.hidden * sizes.element_bytes
    if sends_fixed_buffers(sizes.all2all, most, num_experts=sizes.num_experts, row_bytes=row_bytes):
        rounds = expert_rounds(most, hidden=sizes.hidden, outputs=sizes.num_experts)
        for layer in sizes.layers:
            if layer.moe:
                total += fixed_expert_comm(rounds, cut, sizes)
    return total


def collect_comm(pick: Pick, cut: Cut, sizes: CommSizes) -> Counter[str]:
    """Bytes of bringing some rows together on all ranks, and of their logits on the first one."""
    shape = cut.shape
    rows = shape.group("rows", cut.rank)
    total = Counter(hidden=pick.counts[rows.index(cut.rank)] * sizes.hidden * sizes.element_bytes * (len(rows) - 1))
    if 0 < cut.rank < shape.tp:
        own = int(np.diff(even_cuts(sizes.vocab, shape.tp))[cut.rank])
        total["logits"] = own * sum(pick.counts) * FLOAT_BYTES
    return +total


def tokens_comm(plan: StepPlan, cut: Cut) -> Counter[str]:
    """Bytes of telling all ranks what was sampled, for a draft layer."""
    sampling = [r for r in plan.requests if r.samples]
    if cut.rank:
        return Counter()
    width = 1 + max((r.num_drafts for r in sampling), default=0)
    return +Counter(sampled_tokens=len(sampling) * width * TOKEN_BYTES * (cut.shape.world - 1))


def _attention(plan: StepPlan, cut: Cut, sizes: CommSizes, layer: LayerKind) -> Counter[str]:
    shape, share = cut.shape, plan.share
    held = share.own.stop - share.own.start
    others = len(shape.group("rows", cut.rank)) - 1
    index_bytes = sizes.index_value_bytes + sizes.index_scale_bytes if layer.full_indexer else 0
    total = Counter(
        new_keys=held * (sizes.latent_row_bytes + index_bytes) * others,
        query_latents=held * sizes.query_latent * sizes.element_bytes * (shape.tp - 1),
        attention_out=_partial(plan, sizes),
    )
    if layer.full_indexer:
        total["head_weights"] = held * sizes.index_heads * FLOAT_BYTES * (shape.tp - 1)
        if plan.score_counts is not None:
            own = plan.score_counts[shape.place(cut.rank)["tp"]]
            total["selection"] = own * sizes.topk * INDEX_BYTES * (shape.tp - 1)
    if shape.dcp > 1:
        total += _shards(plan, cut, sizes, layer) + _contexts(plan, cut, sizes, layer)
    return +total


def _shards(plan: StepPlan, cut: Cut, sizes: CommSizes, layer: LayerKind) -> Counter[str]:
    """Of rows that every DCP rank attends for over its own keys."""
    shape, rows, others = cut.shape, plan.share.whole_rows, cut.shape.dcp - 1
    own_heads = sizes.heads // shape.tp
    head_ranks = shape.dcp if shape.pcp == 1 else shape.tp if shape.dcp > shape.pcp else 1
    total = Counter(
        dcp_queries=rows * own_heads * sizes.latent_width * sizes.element_bytes * (head_ranks - 1),
    )
    if layer.full_indexer:
        total["index_candidates"] = rows * 2 * sizes.topk * INDEX_BYTES * others
    if sizes.reduces_parts:
        total["dcp_lse"] = rows * own_heads * head_ranks * FLOAT_BYTES * others
        total["dcp_parts"] = rows * own_heads * sizes.latent_rank * FLOAT_BYTES * others
    else:
        total["dcp_parts"] = rows * own_heads * (sizes.latent_rank + 1) * FLOAT_BYTES * others
    return total


def _contexts(plan: StepPlan, cut: Cut, sizes: CommSizes, layer: LayerKind) -> Counter[str]:
    """Of split prompts, whose contexts are gathered."""
    shape = cut.shape
    lens = [plan.requests[i].seq_len for chunk in plan.context_chunks for i in chunk.requests]
    own = dcp_local_lens(lens, ranks=shape.dcp, rank=cut.dcp_rank, interleave=cut.interleave)
    keys = int(own.sum()) * (shape.dcp - 1)
    total = Counter(context_latents=keys * sizes.latent_row_bytes)
    if layer.full_indexer:
        total["context_index_keys"] = keys * sizes.index_value_bytes
        total["context_index_scales"] = keys * sizes.index_scale_bytes
    return total


def _feed_forward(plan: StepPlan, cut: Cut, sizes: CommSizes) -> Counter[str]:
    held = plan.share.own.stop - plan.share.own.start
    rows = held * sizes.hidden * sizes.element_bytes * (cut.shape.tp - 1)
    return +Counter(mlp_rows=rows, mlp_out=_partial(plan, sizes))


def _partial(plan: StepPlan, sizes: CommSizes) -> int:
    """Bytes of the partial results of rows that other TP ranks hold."""
    held = plan.share.own.stop - plan.share.own.start
    part_bytes = FLOAT_BYTES if sizes.deterministic else sizes.element_bytes
    others: int = plan.share.rows.size - held
    return others * sizes.hidden * part_bytes


ROUND_BYTES = 256 * 2**20
"""Bytes that the outputs of all rows of a round can have at most, which bounds what a rank can be sent."""
FIXED_BUFFER_BYTES = 2**18
"""Bytes of fixed buffers up to which `auto` sends them."""


def expert_rounds(most_rows: int, *, hidden: int, outputs: int) -> tuple[int, ...]:
    """Rows of a rank that each round of a layer's experts takes; `most_rows`: of the rank that has most.

    `outputs`: what a rank may hold at once for every such row: in the high-throughput form those of as many rows of
    each rank, in the low-latency form a place for each expert.
    """
    size = max(1, ROUND_BYTES // (FLOAT_BYTES * hidden * outputs))
    return tuple(min(size, most_rows - first) for first in range(0, most_rows, size))


def sends_fixed_buffers(form: str, most_rows: int, *, num_experts: int, row_bytes: int) -> bool:
    """Whether a step's experts run in the low-latency form."""
    if form != "auto":
        return form == "low_latency"
    return most_rows * num_experts * row_bytes <= FIXED_BUFFER_BYTES


def fixed_expert_comm(rounds: Sequence[int], cut: Cut, sizes: CommSizes) -> Counter[str]:
    """Bytes of one layer's experts in the low-latency form; `rounds`: places for each expert, round by round."""
    group = cut.shape.group("ep", cut.rank)
    held = np.diff(even_cuts(sizes.num_experts, len(group)))
    own = int(held[group.index(cut.rank)])
    others = sizes.num_experts - own
    places = sum(rounds)
    return +Counter(
        expert_counts=others * 4 * len(rounds),
        expert_rows=others * places * sizes.hidden * sizes.element_bytes,
        expert_outputs=own * (len(group) - 1) * places * sizes.hidden * FLOAT_BYTES,
    )


def expert_comm(ids: Sequence[Int64Array], cut: Cut, sizes: CommSizes, num_rounds: int) -> Counter[str]:
    """The same in the high-throughput form. `ids`: int64 [O, K] of every rank of the group, the experts of its rows."""
    group = cut.shape.group("ep", cut.rank)
    me = group.index(cut.rank)
    ends = np.array(even_cuts(sizes.num_experts, len(group))[1:])
    owners = [np.searchsorted(ends, rank_ids, side="right") for rank_ids in ids]
    sent = sum(int((owners[me] == rank).any(1).sum()) for rank in range(len(group)) if rank != me)
    returned = sum(int((owners[rank] == me).sum()) for rank in range(len(group)) if rank != me)
    return +Counter(
        expert_counts=TOKEN_BYTES * (len(group) - 1) * num_rounds,
        expert_rows=sent * sizes.hidden * sizes.element_bytes,
        expert_ids=sent * sizes.experts_per_token * EXPERT_ID_BYTES,
        expert_outputs=returned * sizes.hidden * FLOAT_BYTES,
    )
