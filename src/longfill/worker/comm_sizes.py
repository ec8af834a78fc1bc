"""A model's widths as `partition.comm` counts them.

May import config, the record layout, the model's config and partition. Invariant: the figures are those of the tensors
that the worker's model exchanges.
"""

from __future__ import annotations

from longfill.cache.layout import RecordLayout
from longfill.config import EngineArgs
from longfill.models.config import ModelConfig
from longfill.partition.comm import CommSizes, LayerKind


def comm_sizes(args: EngineArgs, config: ModelConfig, layout: RecordLayout) -> CommSizes:
    """For a model with these arguments; `layout` is that of its pages."""
    indexer, moe = config.indexer, config.moe
    quantised = layout.index_format == "fp8"
    return CommSizes(
        hidden=config.hidden_size,
        element_bytes=4 if config.dtype == "float32" else 2,
        heads=config.num_heads,
        latent_rank=config.kv_lora_rank,
        latent_width=config.kv_lora_rank + config.qk_rope_head_dim,
        query_latent=config.q_lora_rank or config.hidden_size,
        latent_row_bytes=layout.latent_row_bytes,
        index_value_bytes=0 if indexer is None else indexer.head_dim * (1 if quantised else 4),
        index_scale_bytes=4 if indexer is not None and quantised else 0,
        index_heads=0 if indexer is None else indexer.num_heads,
        topk=0 if indexer is None else indexer.topk,
        vocab=config.vocab_size,
        num_experts=0 if moe is None else moe.num_experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
        layers=tuple(
            LayerKind(layer in config.full_indexer_layers, is_moe) for layer, is_moe in enumerate(config.moe_layers)
        ),
        expert_parallel=args.enable_expert_parallel,
        all2all=args.all2all_backend,
        deterministic=args.deterministic,
        reduces_parts=args.dcp_comm_backend == "ag_rs",
    )
