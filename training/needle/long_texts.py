"""What the main model makes of long texts, and batches of it for the draft layer.

In a long text the middle layers gather other things than in a short one, and the last hidden states, under which the
draft layer looks for names, are not those of short sequences with jumping positions. So the states of some long texts
are computed once, and the draft layer is shown pieces of them: all pieces that its questions need, and others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from evaluate import Evaluator, make_prompts
from torch import Tensor
from vocabulary import TOKEN_IDS, encode

from longfill.needle.haystack import CODE_DIGITS, build_haystack

# Tokens and facts of each text.
LONG_TEXTS = ((8192, 64), (8192, 256), (16384, 128), (8192, 128), (16384, 512), (32768, 256)) * 2
ASKED = 128
PIECE = 16  # tokens
PIECE_SHARE = 0.25
QUESTIONS = 32
TEXT_ROWS = 96


@dataclass(frozen=True)
class LongText:
    """A text of `text_rows` tokens and Q questions over it with their answers; S rows in all."""

    text_rows: int
    tokens: Tensor  # S
    positions: Tensor  # S
    states: Tensor  # S hidden, bf16, the main model's normalised last hidden states
    answer_rows: Tensor  # Q 6, tokens whose next token is a digit of an answer or its end
    fact_rows: Tensor  # Q 5, where the text has the digits
    names: Tensor  # Q, a number for the name that is asked for


@dataclass(frozen=True)
class LongBatch:
    """Pieces of a text and some of its questions, T rows in order; rows and keys are indices into T."""

    states: Tensor  # T hidden
    following: Tensor  # T, the token after each row's own
    positions: Tensor  # T
    rows: Tensor  # M, rows that draft
    visible: Tensor  # M T, what each of them sees
    answering: Tensor  # T
    answer_rows: Tensor  # Q 6
    fact_rows: Tensor  # Q 5
    names: Tensor  # Q


def read_long_texts(evaluator: Evaluator, seed: int) -> list[LongText]:
    """Runs the main model over texts of `LONG_TEXTS`; minutes."""
    rng = random.Random(seed)
    texts = []
    for context, facts in LONG_TEXTS:
        haystack = build_haystack(
            context, seed=rng.randrange(1 << 40) + 1000, facts=facts, count=lambda text: len(encode(text)), reserve=1
        )
        asked = rng.sample(range(facts), min(facts, ASKED))
        prompts = make_prompts(evaluator.tokenizer, haystack, asked, evaluator.config["eos_token_id"])
        with torch.inference_mode():
            states = evaluator.states(prompts, torch.arange(len(prompts.tokens))).to(torch.bfloat16)
        words = [encode(haystack.facts[index].name) for index in asked]
        texts.append(
            LongText(
                text_rows=prompts.text_rows,
                tokens=prompts.tokens,
                positions=prompts.positions,
                states=states.clone(),
                answer_rows=prompts.answer_rows,
                fact_rows=prompts.fact_rows,
                names=torch.tensor([adjective * len(TOKEN_IDS) + noun for adjective, noun in words]),
            )
        )
        print(f"read a text of {context:,} tokens with {facts} facts", flush=True)
    return texts


def make_long_batch(rng: random.Random, text: LongText) -> LongBatch:
    """Some questions over a text, with the pieces of it that hold their facts and a draw of the others."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
    asked = torch.randperm(len(text.names), generator=generator)[:QUESTIONS]
    # The last piece goes with the questions: its rows see the first token of a question.
    kept = torch.rand(text.text_rows // PIECE, generator=generator) < PIECE_SHARE
    kept[(text.fact_rows[asked] // PIECE).flatten().clamp_max(len(kept) - 1)] = True
    pieces = (kept.nonzero() * PIECE + torch.arange(PIECE)).flatten()
    tail = torch.arange(len(kept) * PIECE, text.text_rows)
    length = int(text.answer_rows[1, 0] - text.answer_rows[0, 0])
    questions = text.answer_rows[asked, -1:] + torch.arange(1 - length, 1)
    source = torch.cat([pieces, tail, questions.flatten()])
    place = torch.full((len(text.tokens),), -1)
    place[source] = torch.arange(len(source))
    answer_rows, fact_rows = place[text.answer_rows[asked]], place[text.fact_rows[asked]]
    answering = torch.zeros(len(source), dtype=torch.bool)
    answering[answer_rows] = True
    # A draft and those after it stay inside a piece.
    starts = torch.arange(len(pieces)).view(-1, PIECE)[:, : PIECE - 4].flatten()
    drawn = starts[torch.randperm(len(starts), generator=generator)[:TEXT_ROWS]]
    rows = torch.cat([drawn, answer_rows[:, :CODE_DIGITS].flatten()])
    owner = torch.full((len(source),), -1)
    owner[len(pieces) + len(tail) :] = torch.arange(len(asked)).repeat_interleave(length)
    visible = (torch.arange(len(source)) <= rows[:, None]) & ((owner < 0) | (owner == owner[rows, None]))
    return LongBatch(
        states=text.states[source].float(),
        following=text.tokens.roll(-1)[source],
        positions=text.positions[source],
        rows=rows,
        visible=visible,
        answering=answering,
        answer_rows=answer_rows,
        fact_rows=fact_rows,
        names=text.names[asked],
    )
