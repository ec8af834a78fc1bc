"""How a family's router chooses experts, from its config.

May import kernels' interface and `models/config.py`. Invariant: one function maps every spelling to one `ExpertChoice`.
"""

from __future__ import annotations

from longfill.kernels.interface import ExpertChoice
from longfill.models.config import MoeConfig


def expert_choice(moe: MoeConfig) -> ExpertChoice:
    """DeepSeek-V3 and GLM rank groups by the sum of their two best biased scores, V2's group_limited_greedy by their
    best; V2's greedy has no groups."""
    group_value = {"noaux_tc": "top2", "group_limited_greedy": "max", "greedy": None}[moe.topk_method]
    return ExpertChoice(
        scoring=moe.scoring,
        experts_per_token=moe.experts_per_token,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
        group_value=group_value,
        normalise=moe.norm_topk_prob,
        scale=moe.routed_scaling_factor,
    )
