"""Evaluates a needle checkpoint at long contexts on a CPU: strict exactness, per context, seed and depth.

    python training/needle/evaluate.py --model src/longfill/needle/model --contexts 4096 32768 131072 --seeds 0 1 2

An answer is exact when the five digits and then the end token are each the most likely token. Many questions share one
text: only what their answering rows need is computed, on demand from the last layer down, with nothing left out. The
one exception is the first layer's index, which is scored in full for a sample of rows only and within the last 256
tokens for the others, because it is a window by construction; the sample proves it.

Numerics follow an engine's: bf16 weights and latents, index keys and queries in fp8 with power-of-two scales.

Shapes: S rows of text and questions, N chosen rows, K top-k, H heads, I indexer heads, D indexer dim, R latent rank.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from longfill.needle.haystack import Haystack, build_haystack

_CHUNK = 2048
_KEY_BLOCK = 65536
_WINDOW = 256
_SAMPLE = 128


def round_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def round_fp8(x: Tensor) -> Tensor:
    """e4m3 with one power-of-two scale for each vector."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


@dataclass(frozen=True)
class Prompts:
    """One text and the questions asked over it, each question with its answer, in one array of rows."""

    tokens: Tensor  # S: the text, then the questions one after the other
    positions: Tensor  # S
    owner: Tensor  # S: -1 for the text, else the number of the question
    text_rows: int
    suffix_rows: int
    answer_rows: Tensor  # questions x 6
    expected: Tensor  # questions x 6
    fact_rows: Tensor  # questions x 5, where the text has the digits


def make_prompts(tokenizer: Tokenizer, haystack: Haystack, asked: list[int], eos: int) -> Prompts:
    text = tokenizer.encode(haystack.text).ids
    suffixes: list[list[int]] = []
    fact_rows: list[list[int]] = []
    digits = {tokenizer.token_to_id(digit) for digit in "0123456789"}
    places = {pair: row for row, pair in enumerate(pairwise(text))}
    for index in asked:
        fact = haystack.facts[index]
        suffixes.append(tokenizer.encode(haystack.question(fact) + " " + fact.code, add_special_tokens=False).ids)
        name = tokenizer.encode(fact.name, add_special_tokens=False).ids
        first = next(row for row in range(places[name[0], name[1]], len(text)) if text[row] in digits)
        fact_rows.append([*range(first, first + 5)])
    length = len(suffixes[0])
    if any(len(suffix) != length for suffix in suffixes):
        raise ValueError("the questions differ in length")
    positions = [*range(len(text)), *(len(text) + i for _ in suffixes for i in range(length))]
    owner = [-1] * len(text) + [number for number in range(len(suffixes)) for _ in range(length)]
    answer_rows = [
        [len(text) + number * length + row for row in range(length - 6, length)] for number in range(len(suffixes))
    ]
    return Prompts(
        tokens=torch.tensor(text + [token for suffix in suffixes for token in suffix]),
        positions=torch.tensor(positions),
        owner=torch.tensor(owner),
        text_rows=len(text),
        suffix_rows=length,
        answer_rows=torch.tensor(answer_rows),
        expected=torch.tensor([[*suffix[-5:], eos] for suffix in suffixes]),
        fact_rows=torch.tensor(fact_rows),
    )


class Evaluator:
    """A checkpoint and the on-demand forward pass over one set of prompts at a time."""

    def __init__(self, folder: Path, *, zero_layers: frozenset[int] = frozenset(), fp8: bool = True) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.zero_layers = zero_layers
        self.fp8 = fp8
        config = self.config
        self.eps: float = config["rms_norm_eps"]
        self.rope: int = config["qk_rope_head_dim"]
        self.nope: int = config["qk_nope_head_dim"]
        self.rank: int = config["kv_lora_rank"]
        self.heads: int = config["num_attention_heads"]
        self.topk: int = config["index_topk"]
        self.types: list[str] = config["indexer_types"]
        theta = config["rope_parameters"]["rope_theta"]
        self.inverse = 1.0 / theta ** (torch.arange(0, self.rope, 2, dtype=torch.float32) / self.rope)

    def run(self, prompts: Prompts) -> Tensor:
        """The most likely token at every answering row, questions x 6."""
        final = self.states(prompts, prompts.answer_rows.flatten())
        # How many of the wanted digits the index has among its top-k.
        chosen = self._selected[prompts.answer_rows[:, :5].flatten()]
        self.recall = float((chosen == prompts.fact_rows.flatten()[:, None]).any(-1).float().mean())
        return self.logits(final).argmax(-1).view(prompts.answer_rows.shape)

    def states(self, prompts: Prompts, rows: Tensor) -> Tensor:
        """The normalised last hidden states at `rows`, [N hidden]."""
        self.prompts = prompts
        every = len(prompts.tokens)
        last = len(self.types) - 1
        # Which rows each layer's output is needed for, from the last layer down; layer 1 chooses for all above it.
        self._selected = torch.full((every, self.topk), -1, dtype=torch.int32)
        hidden = self._layer(0, torch.arange(every), self.weights["model.embed_tokens.weight"][prompts.tokens])
        self._index_keys = self._make_index_keys(1, hidden)
        needed = {last: rows}
        for layer in range(last - 1, 0, -1):
            self._select(1, needed[layer + 1], hidden)
            chosen = self._selected[needed[layer + 1]].flatten()
            needed[layer] = torch.cat([needed[layer + 1], chosen[chosen >= 0].long()]).unique()
        self._select(1, needed[1], hidden)
        self.computed = {layer: len(chosen) for layer, chosen in needed.items()}
        for layer in range(1, last + 1):
            hidden = self._layer(layer, needed[layer], hidden)
        return rms_norm(hidden[rows], self.weights["model.norm.weight"], self.eps)

    def logits(self, normed: Tensor) -> Tensor:
        return normed @ self.weights["lm_head.weight"].T

    def draft_layer(self, rows: Tensor, x: Tensor) -> Tensor:
        """The output [N hidden] of the layer behind the last one at `rows`, for its input `x` at all rows."""
        layer = len(self.types)
        self._selected.fill_(-1)
        self._index_keys = self._make_index_keys(layer, x)
        self._select(layer, rows, x)
        return self._layer(layer, rows, x)[rows]

    def _angles(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.prompts.positions[rows, None].float() * self.inverse
        return angles.cos(), angles.sin()

    def _norm(self, layer: int, rows: Tensor, hidden: Tensor) -> Tensor:
        return rms_norm(hidden[rows], self.weights[f"model.layers.{layer}.input_layernorm.weight"], self.eps)

    def _q_resid(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn."
        return rms_norm(
            x @ self.weights[prefix + "q_a_proj.weight"].T, self.weights[prefix + "q_a_layernorm.weight"], 1e-6
        )

    def _make_index_keys(self, layer: int, hidden: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn.indexer."
        size = self.config["index_head_dim"]
        keys = torch.empty(len(hidden), size)
        for rows in torch.arange(len(hidden)).split(_CHUNK * 8):
            k = self._norm(layer, rows, hidden) @ self.weights[prefix + "wk.weight"].T
            k = F.layer_norm(
                k, (size,), self.weights[prefix + "k_norm.weight"], self.weights[prefix + "k_norm.bias"], 1e-6
            )
            k = torch.cat([rotate(k[:, : self.rope], *self._angles(rows)), k[:, self.rope :]], dim=-1)
            keys[rows] = round_fp8(k) if self.fp8 else k
        return keys

    def _index_queries(self, layer: int, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        prefix = f"model.layers.{layer}.self_attn.indexer."
        x = self._norm(layer, rows, hidden)
        q = self._q_resid(layer, x) @ self.weights[prefix + "wq_b.weight"].T
        q = q.unflatten(-1, (self.config["index_n_heads"], -1))
        cos, sin = self._angles(rows)
        q = torch.cat([rotate(q[..., : self.rope], cos[:, None], sin[:, None]), q[..., self.rope :]], dim=-1)
        return (round_fp8(q) if self.fp8 else q), x @ self.weights[prefix + "weights_proj.weight"].T

    def _score(self, q: Tensor, w: Tensor, rows: Tensor, first: int, end: int) -> Tensor:
        """Index scores of rows against keys first..end, -inf where a key is not visible."""
        keys = self._index_keys[first:end].T
        scores = F.relu_(q[:, 0] @ keys).mul_(w[:, :1])
        for head in range(1, q.shape[1]):
            scores += F.relu_(q[:, head] @ keys).mul_(w[:, head, None])
        text = self.prompts.text_rows
        if end > int(rows.min()) + 1 or end > text:
            key = torch.arange(first, end)
            hidden = key > rows[:, None]
            if end > text:
                owner = self.prompts.owner[first:end]
                hidden |= (owner >= 0) & (owner != self.prompts.owner[rows, None])
            scores.masked_fill_(hidden, -torch.inf)
        return scores

    def _select(self, layer: int, rows: Tensor, hidden: Tensor) -> None:
        """Fills `_selected` for rows that do not have their keys yet."""
        missing = rows[self._selected[rows, 0] < 0].sort().values
        for chunk in missing.split(_CHUNK // 4) if len(missing) else ():
            q, w = self._index_queries(layer, chunk, hidden)
            best = torch.full((len(chunk), self.topk), -torch.inf)
            best_keys = torch.full((len(chunk), self.topk), -1)
            end = int(chunk.max()) + 1
            for first in range(0, end, _KEY_BLOCK):
                scores = self._score(q, w, chunk, first, min(end, first + _KEY_BLOCK))
                top = scores.topk(min(self.topk, scores.shape[1]), dim=-1)
                best = torch.cat([best, top.values], 1)
                best_keys = torch.cat([best_keys, top.indices + first], 1)
                best, order = best.topk(self.topk, dim=-1)
                best_keys = best_keys.gather(1, order)
            self._selected[chunk] = best_keys.masked_fill(best == -torch.inf, -1).int()

    def _select_window(self, hidden: Tensor) -> None:
        """The first layer's index: within `_WINDOW` for all rows, in full for a sample, which must agree."""
        self._index_keys = self._make_index_keys(0, hidden)
        prompts = self.prompts
        for rows in torch.arange(len(hidden)).split(2 * _WINDOW):
            q, w = self._index_queries(0, rows, hidden)
            first = max(0, min(int(rows[0]), prompts.text_rows) - _WINDOW)
            scores = self._score(q, w, rows, first, int(rows[-1]) + 1)
            top = scores.topk(min(self.topk, scores.shape[1]), dim=-1)
            chosen = (top.indices + first).masked_fill(top.values == -torch.inf, -1)
            self._selected[rows, : chosen.shape[1]] = chosen.int()
        generator = torch.Generator().manual_seed(0)
        sample = torch.randint(len(hidden), (_SAMPLE,), generator=generator).unique()
        self._selected[sample] = -1
        self._select(0, sample, hidden)
        chosen = self._selected[sample].long()
        ages = prompts.positions[sample, None] - prompts.positions[chosen.clamp_min(0)]
        if ages.masked_fill(chosen < 0, 0).max() >= _WINDOW // 2:
            raise RuntimeError("the first layer's index is not a window")

    def _layer(self, layer: int, rows: Tensor, hidden: Tensor) -> Tensor:
        """The layer's output at `rows`, written over a copy of the input."""
        if layer == 0:
            self._select_window(hidden)
        latents = self._latents(layer, hidden)
        out = hidden.clone()
        for chunk in rows.split(_CHUNK):
            x = hidden[chunk]
            if layer not in self.zero_layers:
                x = x + self._attend(layer, chunk, hidden, latents)
            normed = rms_norm(x, self.weights[f"model.layers.{layer}.post_attention_layernorm.weight"], self.eps)
            out[chunk] = x + self._mlp(layer, normed)
        if layer == 0:
            self._selected.fill_(-1)
        return out

    def _latents(self, layer: int, hidden: Tensor) -> Tensor:
        """What an engine caches, [S R+P], in bf16."""
        prefix = f"model.layers.{layer}.self_attn."
        latents = torch.empty(len(hidden), self.rank + self.rope)
        for rows in torch.arange(len(hidden)).split(_CHUNK * 8):
            kv = self._norm(layer, rows, hidden) @ self.weights[prefix + "kv_a_proj_with_mqa.weight"].T
            latents[rows, : self.rank] = rms_norm(
                kv[:, : self.rank], self.weights[prefix + "kv_a_layernorm.weight"], 1e-6
            )
            latents[rows, self.rank :] = rotate(kv[:, self.rank :], *self._angles(rows))
        return round_bf16(latents)

    def _attend(self, layer: int, rows: Tensor, hidden: Tensor, latents: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn."
        nope = self.nope
        q_resid = self._q_resid(layer, self._norm(layer, rows, hidden))
        q = (q_resid @ self.weights[prefix + "q_b_proj.weight"].T).unflatten(-1, (self.heads, -1))
        cos, sin = self._angles(rows)
        kv_b = self.weights[prefix + "kv_b_proj.weight"].unflatten(0, (self.heads, -1))
        # Absorbed form: queries go to the latent space, so that the cached latents are read as they are.
        q_latent = torch.einsum("nhd,hdr->nhr", q[..., :nope], kv_b[:, :nope])
        q_all = torch.cat([q_latent, rotate(q[..., nope:], cos[:, None], sin[:, None])], dim=-1)
        keys = self._selected[rows].long()
        picked = latents[keys.clamp_min(0)]  # N K R+P
        scores = (q_all @ picked.transpose(1, 2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill((keys < 0)[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("nhr,hvr->nhv", weights @ picked[..., : self.rank], kv_b[:, nope:]).flatten(1)
        return mixed @ self.weights[prefix + "o_proj.weight"].T

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.mlp."
        if prefix + "gate.weight" not in self.weights:
            return self._gated(prefix, x)
        scores = (x @ self.weights[prefix + "gate.weight"].T).sigmoid()
        biased = scores + self.weights[prefix + "gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"], dim=-1).indices
        weights = torch.zeros_like(scores).scatter_(-1, chosen, scores.gather(-1, chosen))
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self._gated(prefix + "shared_experts.", x)
        for expert in range(self.config["n_routed_experts"]):
            out += weights[:, expert, None] * self._gated(f"{prefix}experts.{expert}.", x)
        return out

    def _gated(self, prefix: str, x: Tensor) -> Tensor:
        gate = F.silu(x @ self.weights[prefix + "gate_proj.weight"].T)
        return (gate * (x @ self.weights[prefix + "up_proj.weight"].T)) @ self.weights[prefix + "down_proj.weight"].T


def evaluate(evaluator: Evaluator, context: int, seed: int, questions: int, facts: int | None) -> tuple[int, int]:
    """Asks for facts spread over all depths of one text; returns how many answers were exact, and of how many."""
    started = time.monotonic()
    tokenizer = evaluator.tokenizer
    haystack = build_haystack(
        context,
        seed=seed,
        facts=facts,
        count=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        reserve=1,
    )
    by_depth = sorted(range(len(haystack.facts)), key=lambda index: haystack.facts[index].depth)
    questions = min(questions, len(by_depth))
    asked = [by_depth[i * (len(by_depth) - 1) // max(1, questions - 1)] for i in range(questions)]
    random.Random(seed).shuffle(asked)
    prompts = make_prompts(tokenizer, haystack, asked, evaluator.config["eos_token_id"])
    if prompts.text_rows + prompts.suffix_rows - 5 != context:
        raise RuntimeError(f"a prompt has {prompts.text_rows + prompts.suffix_rows - 5} tokens, not {context}")
    right = evaluator.run(prompts) == prompts.expected
    exact = right.all(-1)
    missed = " ".join(f"{haystack.facts[i].depth:.2f}" for i, ok in zip(asked, exact.tolist(), strict=True) if not ok)
    print(
        f"context {context:>9,} seed {seed} facts {len(haystack.facts):>5,}: {int(exact.sum())}/{len(asked)} exact, "
        f"{int(right.sum())}/{right.numel()} tokens; missed at depths [{missed}]; rows {evaluator.computed}; "
        f"index recall {evaluator.recall:.3f}; {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return int(exact.sum()), len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--questions", type=int, default=16, help="questions over each text")
    parser.add_argument("--facts", type=int, default=None)
    parser.add_argument("--zero-shared", action="store_true", help="zero the attention output of the shared layers")
    parser.add_argument("--no-fp8", action="store_true", help="index keys and queries in float32")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    zero: frozenset[int] = frozenset()
    if arguments.zero_shared:
        types = json.loads((arguments.model / "config.json").read_text())["indexer_types"]
        zero = frozenset(layer for layer, kind in enumerate(types) if kind == "shared")
    evaluator = Evaluator(arguments.model, zero_layers=zero, fp8=not arguments.no_fp8)
    with torch.inference_mode():
        for context in arguments.contexts:
            results = [
                evaluate(evaluator, context, seed, arguments.questions, arguments.facts) for seed in arguments.seeds
            ]
            exact, total = (sum(column) for column in zip(*results, strict=True))
            print(f"context {context:>9,}: {exact}/{total} exact", flush=True)


if __name__ == "__main__":
    main()
