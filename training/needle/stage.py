"""What every stage of a training has: a name, steps, the shape of its texts, and how fast it learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from data import Shape

WARM_UP_STEPS = 50


@dataclass(frozen=True)
class Pace:
    """After a warm-up the learning rate goes linearly from `rate` to `last_rate`."""

    name: str
    steps: int
    shape: Shape
    rate: float
    last_rate: float

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
        """The learning rate of a step, from 0, of `steps`."""
        rate = self.rate + (self.last_rate - self.rate) * step / steps
        rate *= min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over those that are trained, with weight decay on matrices only."""
    decayed = [p for p in parameters if p.requires_grad and p.dim() >= 2]
    others = [p for p in parameters if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
