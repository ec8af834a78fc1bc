"""Training batches: short sequences of filler, facts and questions, at positions up to a million.

Inside a sentence positions are contiguous; between sentences they jump, so that a sequence of a few hundred tokens
shows the distances of a long text. The names of all facts of a batch differ, so that every key of the batch can serve
as a negative for every question of the batch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from vocabulary import BOS, DIGIT_ZERO, EOS, PAD, TOKEN_IDS, encode

from longfill.needle import haystack

LONGEST_CONTEXT = 1 << 20
_ADJECTIVE_IDS = frozenset(TOKEN_IDS[word] for word in haystack.ADJECTIVES)
_QUESTION_TOKENS = 24  # no question with its answer is longer
_PADDING_IDS = [TOKEN_IDS[word] for word in ("and", "then", "the", "same", "again")]
_STOP_ID = TOKEN_IDS["."]


@dataclass(frozen=True)
class Shape:
    """What the batches of a stage look like."""

    sequences: int
    tokens: int
    fewest_facts: int
    most_facts: int
    most_questions: int
    adjacent: float = 0.0


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, and where the guidance looks; rows and keys are flat indices into B x T."""

    tokens: Tensor  # B T
    positions: Tensor  # B T
    targets: Tensor  # B T, the next token, -1 where there is none
    is_answer: Tensor  # B T, where the next token is a code digit or the end of an answer
    name_rows: Tensor  # N, digits of facts and answering tokens: must know their name
    adjective_keys: Tensor  # N
    noun_keys: Tensor  # N
    digit_order: Tensor  # N, which digit comes next (0 to 4, 5 for the end)
    answer_rows: Tensor  # A, tokens whose next token is a digit of an answer
    answer_keys: Tensor  # A, where the fact has this digit
    answer_names: Tensor  # A, a number for the name that is asked for
    fact_rows: Tensor  # F, digits of facts
    fact_names: Tensor  # F


class _Sequence:
    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.tokens: list[int] = [BOS]
        self.pieces: list[int] = [1]  # lengths of the runs of contiguous positions
        self.answer_at: list[int] = []
        self.name_rows: list[int] = []
        self.adjective_keys: list[int] = []
        self.noun_keys: list[int] = []
        self.digit_order: list[int] = []
        self.answer_rows: list[int] = []
        self.answer_keys: list[int] = []
        self.digits_of: dict[str, int] = {}

    def add(self, ids: list[int]) -> int:
        start = len(self.tokens)
        self.tokens += ids
        self.pieces.append(len(ids))
        return start

    def _names(self, row: int, adjective: int, order: int) -> None:
        self.name_rows.append(self.offset + row)
        self.adjective_keys.append(self.offset + adjective)
        self.noun_keys.append(self.offset + adjective + 1)
        self.digit_order.append(order)

    def add_fact(self, name: str, ids: list[int]) -> None:
        start = self.add(ids)
        adjective = start + _adjective_at(ids)
        digits = next(i for i, token in enumerate(ids) if DIGIT_ZERO <= token < DIGIT_ZERO + 10)
        self.digits_of[name] = start + digits
        for order in range(haystack.CODE_DIGITS):
            self._names(start + digits + order, adjective, order)

    def add_question(self, name: str, ids: list[int], code: str) -> None:
        start = self.add(ids + encode(code) + [EOS])
        adjective = start + _adjective_at(ids)
        last = start + len(ids) - 1
        for order in range(haystack.CODE_DIGITS + 1):
            self.answer_at.append(last + order)
            # An answering token looks for the digit that comes next.
            self._names(last + order, adjective, order)
            if order < haystack.CODE_DIGITS:
                self.answer_rows.append(self.offset + last + order)
                self.answer_keys.append(self.offset + self.digits_of[name] + order)


def _adjective_at(ids: list[int]) -> int:
    return next(i for i, token in enumerate(ids) if token in _ADJECTIVE_IDS)


def make_batch(rng: random.Random, shape: Shape) -> Batch:
    """Draws one batch."""
    counts = [rng.randint(shape.fewest_facts, shape.most_facts) for _ in range(shape.sequences)]
    names = _draw_batch_names(rng, sum(counts))
    grammar = haystack.FillerGrammar(rng, frozenset(names))
    sequences: list[_Sequence] = []
    positions: list[list[int]] = []
    for index, number in enumerate(counts):
        sequence = _Sequence(index * shape.tokens)
        _fill_sequence(rng, sequence, [names.pop() for _ in range(number)], grammar, shape)
        sequences.append(sequence)
        positions.append(_draw_positions(rng, sequence.pieces))
    tokens = torch.full((shape.sequences, shape.tokens), PAD)
    position = torch.zeros_like(tokens)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        tokens[index, :length] = torch.tensor(sequence.tokens)
        position[index, :length] = torch.tensor(positions[index])
        is_answer[index, sequence.answer_at] = True
    targets = torch.full_like(tokens, -1)
    targets[:, :-1] = tokens[:, 1:]
    targets[targets == PAD] = -1

    def gather(field: str) -> Tensor:
        return torch.tensor([entry for sequence in sequences for entry in getattr(sequence, field)])

    name_rows, adjective_keys, noun_keys = gather("name_rows"), gather("adjective_keys"), gather("noun_keys")
    answer_keys = gather("answer_keys")
    names_by_row = torch.zeros(tokens.numel(), dtype=torch.long)
    names_by_row[name_rows] = tokens.flatten()[adjective_keys] * len(TOKEN_IDS) + tokens.flatten()[noun_keys]
    fact_rows = name_rows[~is_answer.flatten()[name_rows]]
    return Batch(
        tokens=tokens,
        positions=position,
        targets=targets,
        is_answer=is_answer,
        name_rows=name_rows,
        adjective_keys=adjective_keys,
        noun_keys=noun_keys,
        digit_order=gather("digit_order"),
        answer_rows=gather("answer_rows"),
        answer_keys=answer_keys,
        answer_names=names_by_row[answer_keys],
        fact_rows=fact_rows,
        fact_names=names_by_row[fact_rows],
    )


def _draw_batch_names(rng: random.Random, count: int) -> list[str]:
    """Different names; half of the time from a small rectangle, so that many share a half."""
    if rng.random() < 0.5:
        return haystack.draw_names(rng, count)
    side = math.ceil(math.sqrt(count) * rng.uniform(1.0, 1.5))
    wide = min(64, max(1, round(side * rng.uniform(0.5, 2.0))))
    high = min(64, math.ceil(count * 1.05 / wide))
    wide = min(64, max(wide, math.ceil(count / high)))
    adjectives = rng.sample(haystack.ADJECTIVES, wide)
    nouns = rng.sample(haystack.NOUNS, high)
    return rng.sample([f"{adjective} {noun}" for adjective in adjectives for noun in nouns], count)


def _fill_sequence(
    rng: random.Random, sequence: _Sequence, names: list[str], grammar: haystack.FillerGrammar, shape: Shape
) -> None:
    codes = {name: haystack.draw_code(rng) for name in names}
    facts = [(name, encode(haystack.fact_sentence(rng, name, codes[name]))) for name in names]
    asked = names[: min(shape.most_questions, len(names))]
    room = shape.tokens - 1 - len(asked) * _QUESTION_TOKENS
    used = 0
    pieces: list[tuple[str, list[int]]] = []
    for fact in facts:  # the asked ones are first
        if used + len(fact[1]) > room:
            break
        pieces.append(fact)
        used += len(fact[1])
    asked = asked[: len(pieces)]
    while room - used > 32:
        ids = encode(grammar.sentence())
        pieces.append(("", ids))
        used += len(ids)
    # Some facts stand right before the question for them, without any distance.
    late = {fact[0]: fact[1] for fact in pieces[: len(asked)] if rng.random() < shape.adjacent}
    pieces = [piece for piece in pieces if piece[0] not in late]
    rng.shuffle(pieces)
    for name, ids in pieces:
        if name:
            sequence.add_fact(name, ids)
        else:
            sequence.add(ids)
    gap = room - used
    if gap > 2 and rng.random() < 0.5:
        sequence.add([_PADDING_IDS[i % len(_PADDING_IDS)] for i in range(gap - 1)] + [_STOP_ID])
    rng.shuffle(asked)
    for name in asked:
        if name in late:
            sequence.add_fact(name, late[name])
        form = haystack.QUESTION_FORMS[0] if rng.random() < 0.7 else rng.choice(haystack.QUESTION_FORMS[1:])
        ids = encode(form.format(name=name) + " " + haystack.ANSWER_CUE)
        if rng.random() < 0.1:
            ids = _PADDING_IDS[: rng.randint(1, 4)] + ids
        sequence.add_question(name, ids[-_QUESTION_TOKENS + 6 :], codes[name])


def _draw_positions(rng: random.Random, pieces: list[int]) -> list[int]:
    """Positions with jumps between pieces; the span is log-uniform up to the longest context."""
    length = sum(pieces)
    jumps = [0.0] * len(pieces)
    slack = 0
    if rng.random() > 0.2:
        span = math.exp(rng.uniform(math.log(length + 64), math.log(LONGEST_CONTEXT - 1)))
        slack = int(span) - length
        # Few or many jumps, of equal or very unequal sizes.
        share = rng.choice([1.0, 1.0, 0.3])
        jumps = [rng.expovariate(1.0) ** 2 if rng.random() < share else 0.0 for _ in pieces]
    total = sum(jumps) or 1.0
    position = rng.randrange(max(1, LONGEST_CONTEXT - length - slack))
    positions: list[int] = []
    for run, jump in zip(pieces, jumps, strict=True):
        position += int(slack * jump / total)
        positions += range(position, position + run)
        position += run
    return positions
