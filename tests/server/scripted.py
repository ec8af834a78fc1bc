"""Small model folders for the server: one that writes random text, and one that writes what it is told to.

For tests only; may import tests.tiny. Invariant: the scripted model is a real checkpoint of a real family. Its layers
add nothing, so that the next token depends on the last one alone, and its head holds the script.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests import tiny
from tests.engine import small_tokenizers
from tokenizers import AddedToken

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for k, v in call.function.arguments|items %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}<|tools|>{{ tools|tojson }}{% endif %}"
    "{% if slow is defined %}{% for i in range(slow) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    "{{ raise_exception('slow refusal') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ play|default('') }}{% endif %}"
)

PLAY = "<play>"
SCRIPT = (
    *("<think>", "The weather, then.", "</think>", "I will look."),
    *("<tool_call>", "get_weather", "<arg_key>", "city", "</arg_key>", "<arg_value>", "Zürich 雨", "</arg_value>"),
    *("</tool_call>", "<|eos|>"),
)


def random_folder(folder: Path, *, max_position_embeddings: int = 4096) -> Path:
    """A random model with a byte-level tokenizer, a chat template and room for long prompts."""
    return _folder(folder, (), max_position_embeddings)


def scripted_folder(folder: Path) -> Path:
    """A model that, after a prompt that ends in PLAY, writes SCRIPT token by token."""
    _folder(folder, (PLAY, *SCRIPT), 2048)
    tokenizer = small_tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    chain = [tokenizer.token_to_id(token) for token in (PLAY, *SCRIPT)]
    assert len(set(chain)) == len(chain), "each token has one follower"
    _silence_layers(folder)
    _write_script(folder, chain)
    return folder


def _folder(folder: Path, added: Sequence[str], length: int) -> Path:
    tokenizer = small_tokenizers.deepseek()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added if token != "<|eos|>"])
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    tiny.make_checkpoint(folder, "glm_moe_dsa", vocab_size=size, max_position_embeddings=length)
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<pad>"}
    return small_tokenizers.save_folder(folder, tokenizer, tokenizer_config=special, chat_template=TEMPLATE)


def _silence_layers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    ends = ("o_proj.weight", "down_proj.weight")
    silent = {name: torch.zeros_like(weight) for name, weight in weights.items() if name.endswith(ends)}
    assert silent
    tiny.edit_tensors(folder, add=silent)


def _write_script(folder: Path, chain: Sequence[int]) -> None:
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    head = torch.zeros_like(weights["lm_head.weight"].float())
    norm = weights["model.norm.weight"].float()
    for last, following in itertools.pairwise(chain):
        head[following] = embedding[last] / norm
    tiny.edit_tensors(folder, add={"lm_head.weight": head.to(weights["lm_head.weight"].dtype)})
