"""Measures how many drafts of a needle checkpoint's draft layer the model accepts, greedily, three tokens ahead.

    python training/needle/evaluate_draft.py --model src/longfill/needle/model --contexts 1024 8192 32768 131072

Answers: drafts start from every token of an answer, in texts of the given lengths, with the numerics of `evaluate.py`.
Text: the model continues short texts by itself, and drafts start from every token that it wrote. A draft counts as
accepted when it and all before it from the same start are the tokens that the model says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from draft import DraftLayer, load_draft
from evaluate import Evaluator, Prompts, rms_norm
from export import load_checkpoint
from model import NeedleModel
from tokenizers import Tokenizer
from torch import Tensor
from vocabulary import BOS, encode

from longfill.needle.haystack import CODE_DIGITS, Haystack, build_haystack

STEPS_AHEAD = 3
TEXT_TOKENS = 160
WRITTEN_TOKENS = 48


def make_draft_prompts(tokenizer: Tokenizer, haystack: Haystack, asked: list[int], eos: int) -> Prompts:
    """A copy of each question for every token of its answer, up to this token, then what drafts two and three see.

    `answer_rows` are the rows that draft first, questions x 5; `expected` has the end token at its end.
    """
    text = tokenizer.encode(haystack.text).ids
    tokens, positions, owner = list(text), list(range(len(text))), [-1] * len(text)
    rows: list[list[int]] = []
    expected: list[list[int]] = []
    for fact in (haystack.facts[index] for index in asked):
        question = tokenizer.encode(haystack.question(fact), add_special_tokens=False).ids
        code = [*tokenizer.encode(fact.code, add_special_tokens=False).ids, eos]
        starts: list[int] = []
        for digit in range(CODE_DIGITS):
            suffix = (question + code)[: len(question) + digit + STEPS_AHEAD - 1]
            suffix += [eos] * (len(question) + digit + STEPS_AHEAD - 1 - len(suffix))
            starts.append(len(tokens) + len(question) + digit - 1)
            owner += [len(rows) * CODE_DIGITS + digit] * len(suffix)
            positions += range(len(text), len(text) + len(suffix))
            tokens += suffix
        rows.append(starts)
        expected.append(code)
    return Prompts(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        owner=torch.tensor(owner),
        text_rows=len(text),
        suffix_rows=0,
        answer_rows=torch.tensor(rows),
        expected=torch.tensor(expected),
        fact_rows=torch.empty(0),
    )


def draft_answers(evaluator: Evaluator, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Drafts [questions, 5, 3] from every token of the answers, and the model's own answers [questions, 6]."""
    weights, prefix = evaluator.weights, f"model.layers.{len(evaluator.types)}."
    rows = prompts.answer_rows.flatten()
    states = evaluator.states(prompts, torch.arange(len(prompts.tokens)))
    said = torch.cat([prompts.answer_rows, prompts.answer_rows[:, -1:] + 1], 1)
    said = evaluator.logits(states[said]).argmax(-1)

    def join(hidden: Tensor, embedded: Tensor) -> Tensor:
        embedded = rms_norm(embedded, weights[prefix + "enorm.weight"], evaluator.eps)
        hidden = rms_norm(hidden, weights[prefix + "hnorm.weight"], evaluator.eps)
        return torch.cat([embedded, hidden], -1) @ weights[prefix + "eh_proj.weight"].T

    embedding = weights["model.embed_tokens.weight"]
    # The row before a copy sees the first token of the first one, which is that of all.
    embedded = embedding[prompts.tokens.roll(-1)]
    embedded[prompts.positions == 0] = 0.0
    x = join(states, embedded)
    drafts: list[Tensor] = []
    for step in range(STEPS_AHEAD):
        y = evaluator.draft_layer(rows + step, x)
        z = rms_norm(y, weights[prefix + "shared_head.norm.weight"], evaluator.eps)
        drafts.append(evaluator.logits(z).argmax(-1))
        if step + 1 < STEPS_AHEAD:
            x[rows + step + 1] = join(z, embedding[drafts[-1]])
    return torch.stack(drafts, -1).view(*prompts.answer_rows.shape, STEPS_AHEAD), said


def accepted(drafts: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each draft is accepted, and whether it stands for a token of the answer; both [questions, 5, 3]."""
    wanted = torch.arange(CODE_DIGITS)[:, None] + 1 + torch.arange(STEPS_AHEAD)
    right = drafts == said[:, wanted.clamp_max(CODE_DIGITS)]
    return right.cumprod(-1).bool(), (wanted <= CODE_DIGITS).expand_as(right)


def steps_after_prefill(right: Tensor, ahead: int) -> float:
    """Steps that an answer takes on average after its first token, with `ahead` drafts each; five without drafts."""
    total = 0
    for answer in right[..., :ahead].sum(-1).tolist():
        known = 1
        while known <= CODE_DIGITS:
            known += 1 + answer[known - 1]
            total += 1
    return total / len(right)


def evaluate_answers(evaluator: Evaluator, context: int, seed: int, questions: int) -> tuple[Tensor, Tensor]:
    """Drafts for questions spread over all depths of one text; returns what `accepted` does."""
    started = time.monotonic()
    haystack = build_haystack(
        context,
        seed=seed,
        count=lambda text: len(evaluator.tokenizer.encode(text, add_special_tokens=False).ids),
        reserve=1,
    )
    by_depth = sorted(range(len(haystack.facts)), key=lambda index: haystack.facts[index].depth)
    questions = min(questions, len(by_depth))
    asked = [by_depth[i * (len(by_depth) - 1) // max(1, questions - 1)] for i in range(questions)]
    prompts = make_draft_prompts(evaluator.tokenizer, haystack, asked, evaluator.config["eos_token_id"])
    drafts, said = draft_answers(evaluator, prompts)
    exact = int((said == prompts.expected).all(-1).sum())
    seconds = time.monotonic() - started
    print(f"context {context:,} seed {seed}: model exact {exact}/{questions}, {seconds:.0f} s", flush=True)
    return accepted(drafts, said)


def shares(right: Tensor, counted: Tensor) -> str:
    return " ".join(
        f"{int((right & counted)[..., step].sum())}/{int(counted[..., step].sum())}" for step in range(STEPS_AHEAD)
    )


def write_texts(main: NeedleModel, texts: int) -> Tensor:
    """Tokens [texts, T] that begin as haystacks and go on for `WRITTEN_TOKENS` as the model says."""
    begun = [
        build_haystack(TEXT_TOKENS, seed=seed, facts=2, count=lambda t: len(encode(t)), reserve=1).text
        for seed in range(texts)
    ]
    tokens = torch.tensor([[BOS, *encode(text)] for text in begun])
    for _ in range(WRITTEN_TOKENS):
        said = main.lm_head(main(tokens, _positions(tokens), sparse=True)[:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, said], 1)
    return tokens


def evaluate_texts(main: NeedleModel, draft: DraftLayer, tokens: Tensor) -> Tensor:
    """Whether each draft from the last `WRITTEN_TOKENS` tokens is accepted, [N 3]."""
    hidden = main(tokens, _positions(tokens), sparse=True)
    said = main.lm_head(hidden).argmax(-1)
    length = tokens.shape[1]
    rows = torch.arange(length - WRITTEN_TOKENS - 1, length - STEPS_AHEAD - 1).expand(len(tokens), -1)
    visible = torch.arange(length) <= rows[..., None]
    logits = draft(main, hidden, tokens.roll(-1, 1), _positions(tokens), rows, visible, STEPS_AHEAD)
    right = [drafted.argmax(-1) == said.gather(1, rows + step + 1) for step, drafted in enumerate(logits)]
    return torch.stack(right, -1).flatten(0, 1).cumprod(-1).bool()


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--questions", type=int, default=32, help="questions over each text")
    parser.add_argument("--texts", type=int, default=32, help="texts that the model continues")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    evaluator = Evaluator(arguments.model)
    with torch.inference_mode():
        for context in arguments.contexts:
            results = [evaluate_answers(evaluator, context, seed, arguments.questions) for seed in arguments.seeds]
            right, counted = (torch.cat(part) for part in zip(*results, strict=True))
            steps = " ".join(f"{steps_after_prefill(right, ahead):.2f}" for ahead in range(1, STEPS_AHEAD + 1))
            print(f"context {context:,}: accepted {shares(right, counted)}; steps after prefill {steps}", flush=True)
        model, draft = load_checkpoint(arguments.model), load_draft(arguments.model)
        right = evaluate_texts(model, draft, write_texts(model, arguments.texts))
        print(f"text: accepted {shares(right, torch.ones_like(right))}", flush=True)


if __name__ == "__main__":
    main()
