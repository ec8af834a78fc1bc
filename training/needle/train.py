"""Trains the bundled needle model on two CPU cores and writes a checkpoint folder.

    python training/needle/train.py --out build/needle

Needs torch, safetensors and tokenizers, and `longfill` on the path (or PYTHONPATH=src). About 40 minutes on an idle
two-core machine; where cores are shared, one thread is faster than two.

The curriculum, in the order the skills build on each other: `names` and `binding` (dense attention: fetch the name to
a digit's place, find the digit by name), `sparse` (the index chooses, layers are silenced at random, retrieval moves
into the layers that share the index), `many` (the facts of recent batches as further negatives), `counting` (a guided
head to count digits), `near` (facts right before their question) and `polish` (a second, slower anneal).
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Batch, Shape, make_batch
from export import export_checkpoint
from model import Bank, Disturbance, Guidance, MoE, NeedleConfig, NeedleModel
from stage import Pace, make_optimizer

LOSS_WEIGHTS = {
    "answer": 1.0,
    "text": 0.1,
    "name0": 0.3,
    "name1": 0.3,
    "order": 0.3,
    "count": 0.3,
    "index1": 0.5,
    "leave1": 0.5,
    "read2": 0.4,
    "read3": 0.4,
}


@dataclass(frozen=True)
class Stage(Pace):
    """A part of the curriculum."""

    sparse: bool = True
    count: bool = False  # guide the head that counts digits
    swap: float = 0.0  # share of rows whose attention output is another row's, where it must not matter
    silence: float = 0.0  # share of batches in which one layer's attention is zeroed at answering rows
    bank: int = 0  # how many batches of facts stay as negatives


STAGES = (
    Stage("names", 250, Shape(16, 128, 2, 4, 2), 2e-3, 2e-3, sparse=False),
    Stage("binding", 300, Shape(16, 256, 4, 10, 5), 2e-3, 2e-3, sparse=False),
    Stage("sparse", 150, Shape(12, 384, 6, 18, 8), 2e-3, 2e-3, swap=0.1, silence=0.3),
    Stage("many", 700, Shape(8, 288, 4, 13, 7), 2e-3, 2e-5, swap=0.1, silence=0.3, bank=16),
    Stage("counting", 600, Shape(8, 288, 4, 13, 7), 1.5e-3, 2e-4, count=True, swap=0.1, silence=0.3, bank=16),
    Stage("near", 450, Shape(8, 288, 4, 13, 7, adjacent=0.2), 1e-3, 1e-5, count=True, swap=0.2, silence=0.3, bank=32),
    Stage(
        "polish", 400, Shape(8, 288, 4, 13, 7, adjacent=0.15), 8e-4, 4e-6, count=True, swap=0.2, silence=0.3, bank=32
    ),
)


def train_step(
    model: NeedleModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    stage: Stage,
    rng: random.Random,
    bank: Bank | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """One optimiser step; returns losses and measurements."""
    guidance = Guidance(
        name_rows=batch.name_rows,
        adjective_keys=batch.adjective_keys,
        noun_keys=batch.noun_keys,
        digit_order=batch.digit_order,
        answer_rows=batch.answer_rows,
        answer_keys=batch.answer_keys,
        answer_names=batch.answer_names,
        fact_rows=batch.fact_rows,
        bank=bank,
    )
    disturbance = Disturbance(
        is_answer=batch.is_answer,
        silenced=frozenset([rng.choice((1, 1, 2, 3))]) if rng.random() < stage.silence else frozenset(),
        swap=stage.swap,
    )
    hidden = model(batch.tokens, batch.positions, sparse=stage.sparse, guidance=guidance, disturbance=disturbance)
    if bank is not None:
        bank.names.append(batch.fact_names)
    known = batch.targets >= 0
    answers, texts = known & batch.is_answer, known & ~batch.is_answer
    answer_logits = model.lm_head(hidden[answers])
    losses = guidance.losses
    losses["answer"] = F.cross_entropy(answer_logits, batch.targets[answers])
    losses["text"] = F.cross_entropy(model.lm_head(hidden[texts]), batch.targets[texts])
    if not stage.count:
        del losses["count"]
    total = torch.stack([LOSS_WEIGHTS[name] * loss for name, loss in losses.items()]).sum()
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.restore_frozen()
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.balance(1e-3)
    right = (answer_logits.argmax(-1) == batch.targets[answers]).float().mean().item()
    measured = {"right": right, **guidance.measured}
    return {name: loss.item() for name, loss in losses.items()}, measured


def train(model: NeedleModel, seed: int, log_every: int, out: Path, first_stage: str, scale: float) -> None:
    """Runs all stages from `first_stage` on, each with `scale` times its steps."""
    rng = random.Random(seed)
    started = time.monotonic()
    names = [stage.name for stage in STAGES]
    for stage in STAGES[names.index(first_stage) :]:
        optimizer = make_optimizer(list(model.parameters()))
        sums: dict[str, float] = {}
        bank = Bank(stage.bank) if stage.bank else None
        steps = max(1, round(stage.steps * scale))
        for step in range(steps):
            stage.set_rate(optimizer, step, steps)
            losses, measured = train_step(model, optimizer, make_batch(rng, stage.shape), stage, rng, bank)
            for name, value in {**losses, **measured}.items():
                sums[name] = sums.get(name, 0.0) + value
            if (step + 1) % log_every == 0:
                values = " ".join(f"{name} {value / log_every:.3f}" for name, value in sums.items())
                minutes = (time.monotonic() - started) / 60
                print(f"{minutes:5.1f} min {stage.name} {step + 1}/{steps}: {values}", flush=True)
                sums = {}
                export_checkpoint(model, out)
        export_checkpoint(model, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="a .pt file to start from")
    parser.add_argument("--first-stage", default=STAGES[0].name, choices=[stage.name for stage in STAGES])
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of every stage")
    parser.add_argument("--log-every", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = NeedleModel(NeedleConfig())
    if arguments.resume is not None:
        model.load_state_dict(torch.load(arguments.resume, weights_only=True))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    train(model, arguments.seed, arguments.log_every, arguments.out, arguments.first_stage, arguments.scale)


if __name__ == "__main__":
    main()
