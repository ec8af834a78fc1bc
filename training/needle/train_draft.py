"""Trains the needle model's draft layer on one CPU core and writes the checkpoint folder with it.

    python training/needle/train_draft.py --model src/longfill/needle/model --out build/needle_draft

The main model stays as it is: its tensors are copied from `--model` byte for byte, and a draft layer that is stored
there is replaced. The layer learns to say what the model itself would say, three tokens ahead: its second and third
step see its own outputs and the tokens of the text.

Three stages: `find` (few facts), `many` (more facts, those of recent batches as further negatives, and text rows that
get another row's attention output, so that nothing hangs on what a text row gathers) and `long` (pieces of long texts,
whose hidden states differ from those of short ones).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Batch, Shape, make_batch
from draft import DraftGuidance, DraftLayer, draft_views, load_draft
from evaluate import Evaluator
from export import as_stored, load_checkpoint
from long_texts import LongBatch, LongText, make_long_batch, read_long_texts
from model import Bank, Disturbance, MoE, NeedleConfig, NeedleModel
from safetensors.torch import load_file, save_file
from stage import Pace, make_optimizer
from torch import Tensor
from torch.nn.utils import parametrize
from warm_start import lay_coordinates, look, warm_start

from longfill.needle.haystack import CODE_DIGITS

STEPS_AHEAD = 3
DRAFTING_ROWS = 80  # of each sequence: all that answer, and about as many others
BF16_ERROR = 2**-8
LOG_EVERY = 25
LOSS_WEIGHTS = {"answer": 1.0, "text": 0.3, "index": 0.5, "read": 0.3}


@dataclass(frozen=True)
class Stage(Pace):
    """A part of the curriculum."""

    bank: int  # how many batches of facts stay as negatives
    swap: float = 0.0  # share of text rows whose attention output, here and in the main model, is another row's
    long: float = 0.0  # share of steps that see pieces of long texts


STAGES = (
    Stage("find", 300, Shape(12, 192, 3, 8, 5), 2e-3, 2e-3, bank=4),
    Stage("many", 900, Shape(8, 288, 4, 13, 7, adjacent=0.15), 2e-3, 1e-5, bank=24, swap=0.2),
    Stage("long", 500, Shape(8, 288, 4, 13, 7, adjacent=0.15), 1.5e-3, 1e-5, bank=24, swap=0.2, long=0.75),
)


@dataclass(frozen=True)
class Drafting:
    """What a step of the training sees of B sequences with T rows each, and what it is to say there."""

    hidden: Tensor  # B T hidden, the main model's
    said: Tensor  # B T vocabulary, its logits
    following: Tensor  # B T, the token after each row's own
    positions: Tensor  # B T
    rows: Tensor  # B M, rows that draft
    visible: Tensor  # B M T
    answering: Tensor  # B T, where a digit of an answer or its end comes next
    texting: Tensor  # B T, where a known token of a text comes next
    guidance: DraftGuidance
    fact_names: Tensor  # of the guidance's `fact_rows`
    swap: Tensor | None = None  # B M, rows whose attention output is another's


def draft_short(main: NeedleModel, batch: Batch, swap: float, bank: Bank) -> Drafting:
    """Drafts from all rows that answer and from a draw of the others."""
    with torch.no_grad():
        disturbance = Disturbance(is_answer=batch.is_answer, swap=swap)
        hidden = main(batch.tokens, batch.positions, sparse=True, disturbance=disturbance)
        said = main.lm_head(hidden)
    rank = torch.rand(batch.tokens.shape) + batch.is_answer.float()
    rows = rank.topk(DRAFTING_ROWS, dim=1).indices.sort(1).values
    order, place = torch.full((batch.tokens.numel(),), -1), torch.full((batch.tokens.numel(),), -1)
    order[batch.name_rows] = batch.digit_order
    length = batch.tokens.shape[1]
    place[(rows + torch.arange(len(rows))[:, None] * length).flatten()] = torch.arange(rows.numel())
    # A step that names a digit finds it behind the digit before it.
    kept = [order[batch.answer_rows] + step < CODE_DIGITS - 1 for step in range(STEPS_AHEAD)]
    guided = [batch.answer_rows[part] for part in kept]
    return Drafting(
        hidden=_as_engine(hidden),
        said=said,
        following=F.pad(batch.tokens[:, 1:], (0, 1)),
        positions=batch.positions,
        rows=rows,
        visible=torch.arange(length) <= rows[..., None],
        answering=batch.is_answer,
        texting=(batch.targets >= 0) & ~batch.is_answer,
        guidance=DraftGuidance(
            rows=guided,
            places=[place[part] for part in guided],
            keys=[batch.answer_keys[part] + step for step, part in enumerate(kept)],
            names=[batch.answer_names[part] for part in kept],
            fact_rows=batch.fact_rows,
            bank=bank,
        ),
        fact_names=batch.fact_names,
        swap=(torch.rand(rows.shape) < swap) & ~batch.is_answer.gather(1, rows),
    )


def draft_long(main: NeedleModel, batch: LongBatch, bank: Bank) -> Drafting:
    """Drafts from the rows that answer and from some others of one long text."""
    with torch.no_grad():
        said = main.lm_head(batch.states[None])
    guided = [batch.answer_rows[:, : CODE_DIGITS - 1 - step] for step in range(STEPS_AHEAD)]
    first_place = len(batch.rows) - len(batch.answer_rows) * CODE_DIGITS
    places = first_place + torch.arange(len(batch.answer_rows) * CODE_DIGITS).view(-1, CODE_DIGITS)
    return Drafting(
        hidden=_as_engine(batch.states[None]),
        said=said,
        following=batch.following[None],
        positions=batch.positions[None],
        rows=batch.rows[None],
        visible=batch.visible[None],
        answering=batch.answering[None],
        texting=~batch.answering[None],
        guidance=DraftGuidance(
            rows=[part.flatten() for part in guided],
            places=[places[:, : part.shape[1]].flatten() for part in guided],
            keys=[batch.fact_rows[:, step : CODE_DIGITS - 1].flatten() for step in range(STEPS_AHEAD)],
            names=[batch.names.repeat_interleave(part.shape[1]) for part in guided],
            fact_rows=batch.fact_rows.flatten(),
            bank=bank,
        ),
        fact_names=batch.names.repeat_interleave(CODE_DIGITS),
    )


def _as_engine(hidden: Tensor) -> Tensor:
    """With an engine's rounding to bf16, in the residual stream and after the last norm."""
    return (hidden * (1 + torch.empty_like(hidden).uniform_(-BF16_ERROR, BF16_ERROR))).to(torch.bfloat16).float()


def train_step(
    main: NeedleModel, draft: DraftLayer, optimizer: torch.optim.Optimizer, task: Drafting
) -> dict[str, float]:
    """One optimiser step; returns losses and measurements."""
    with parametrize.cached():
        logits = draft(
            main,
            task.hidden,
            task.following,
            task.positions,
            task.rows,
            task.visible,
            STEPS_AHEAD,
            task.guidance,
            task.swap,
        )
    task.guidance.bank.names.append(task.fact_names)
    losses, measured = task.guidance.losses, task.guidance.measured
    shares: dict[str, list[Tensor]] = {"answer": [], "text": []}
    rows, last = task.rows, task.following.shape[1] - 1
    kinds = {"answer": task.answering.gather(1, rows), "text": task.texting.gather(1, rows)}
    for step, drafted in enumerate(logits):
        at = rows + step + 1
        for name, every in (("answer", task.answering), ("text", task.texting)):
            # An answer ends with the end token; drafts beyond it, or from a text into an answer, are never used.
            kinds[name] = kinds[name] & every.gather(1, at.clamp_max(last)) & (at <= last)
            mine = drafted[kinds[name]]
            wanted = task.said.gather(1, at.clamp_max(last)[..., None].expand(-1, -1, task.said.shape[-1]))[kinds[name]]
            shares[name].append(F.cross_entropy(mine, wanted.softmax(-1)))
            measured[f"{name}{step + 1}"] = (mine.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    losses |= {name: torch.stack(parts).mean() for name, parts in shares.items()}
    total = torch.stack([LOSS_WEIGHTS[name] * loss for name, loss in losses.items()]).sum()
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    assert isinstance(draft.layer.mlp, MoE)
    draft.layer.mlp.balance(1e-3)
    return {**{name: loss.item() for name, loss in losses.items()}, **measured}


def train(
    main: NeedleModel, draft: DraftLayer, source: Path, out: Path, seed: int, first_stage: str, scale: float
) -> None:
    """Runs all stages from `first_stage` on, each with `scale` times its steps."""
    rng = random.Random(seed)
    started = time.monotonic()
    texts: list[LongText] = []
    names = [stage.name for stage in STAGES]
    for stage in STAGES[names.index(first_stage) :]:
        if stage.long and not texts:
            texts = read_long_texts(Evaluator(source), seed)
        optimizer = make_optimizer(list(draft.parameters()))
        bank = Bank(stage.bank)
        sums: dict[str, float] = {}
        steps = max(1, round(stage.steps * scale))
        for step in range(steps):
            stage.set_rate(optimizer, step, steps)
            if rng.random() < stage.long:
                task = draft_long(main, make_long_batch(rng, rng.choice(texts)), bank)
            else:
                task = draft_short(main, make_batch(rng, stage.shape), stage.swap, bank)
            for name, value in train_step(main, draft, optimizer, task).items():
                sums[name] = sums.get(name, 0.0) + value
            if (step + 1) % LOG_EVERY == 0:
                line = " ".join(f"{name} {value / LOG_EVERY:.3f}" for name, value in sums.items())
                minutes = (time.monotonic() - started) / 60
                print(f"{minutes:5.1f} min {stage.name} {step + 1}/{steps}: {line}", flush=True)
                sums = {}
                export(draft, source, out)
    export(draft, source, out)


@torch.no_grad()
def fold(draft: DraftLayer) -> DraftLayer:
    """A copy with plain matrices, without the coordinates of the training."""
    plain = DraftLayer(NeedleConfig())
    for name, tensor in plain.state_dict().items():
        tensor.copy_(attrgetter(name)(draft))
    return plain


def export(draft: DraftLayer, source: Path, out: Path) -> None:
    """Copies the folder `source` with this draft layer in place of the one it may hold."""
    out.mkdir(parents=True, exist_ok=True)
    draft = fold(draft)
    tensors = as_stored(draft_views(draft))
    prefix = f"model.layers.{draft.number}."
    kept = load_file(source / "model.safetensors")
    main = {name: tensor for name, tensor in kept.items() if not name.startswith(prefix)}
    if out != source:
        shutil.copytree(source, out, dirs_exist_ok=True)
    save_file({**main, **tensors}, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the trained main model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--first-stage",
        default=STAGES[0].name,
        choices=[stage.name for stage in STAGES],
        help="a later one goes on with the draft layer in --model",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of every stage")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    main_model = load_checkpoint(arguments.model)
    first = arguments.first_stage
    draft = DraftLayer(main_model.config) if first == STAGES[0].name else load_draft(arguments.model)
    states = look(main_model, STAGES[-1].shape, arguments.seed)
    if first == STAGES[0].name:
        warm_start(draft, main_model, states)
    lay_coordinates(draft, states.hidden)
    print(f"{sum(parameter.numel() for parameter in draft.parameters()):,} parameters")
    train(main_model, draft, arguments.model, arguments.out, arguments.seed, first, arguments.scale)


if __name__ == "__main__":
    main()
