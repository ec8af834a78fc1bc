"""Known faults of sparse attention, each as a check against transformers: rotary pairing, shared layers, k, boundaries.

`index_topk` is 16 unless a test says otherwise, so that a short prompt already selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.kernels import workspace
from longfill.kernels.reference import attention, indexer
from longfill.models.config import ModelConfig
from tests.oracle.harness import Rows, assert_same, engine, oracle, run, tokens
from tests.tiny import DSA_FAMILIES, NUM_LAYERS, edit_config, make_checkpoint, tiny_config

K = 16
ALL_FULL = ["full"] * NUM_LAYERS


def other_model(model: transformers.PreTrainedModel, family: str, **fields: Any) -> transformers.PreTrainedModel:
    """The same tensors in another family's transformers model (those it has no place for are dropped)."""
    name = {"deepseek_v32": "DeepseekV32", "deepseek_v3": "DeepseekV3", "glm_moe_dsa": "GlmMoeDsa"}[family]
    config = getattr(transformers, f"{name}Config")(**tiny_config(family, **fields))
    config._attn_implementation = "eager"
    other = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    missing, _ = other.load_state_dict(model.state_dict(), strict=False)
    assert not [key for key in missing if "inv_freq" not in key]
    return other


def dense(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """fp32 logits [L, V] of dense latent attention with the same weights: DeepSeek-V3 has no indexer."""
    return oracle(other_model(model, "deepseek_v3", n_group=1), token_ids).logits


def assert_close(got: Tensor, want: Tensor) -> None:
    error = (got - want).abs().max() / want.abs().max()
    assert error <= 1e-4, f"logits differ by {error:.2e}"


def run_growing(llm: LLM, prompt: list[int], outputs: int) -> tuple[Rows, list[int]]:
    """Prefill `prompt`, then decode; every computed row, and all tokens that were fed."""
    decoder = llm.engine.worker.decoder
    forward = decoder.forward
    logits: list[Tensor] = []
    selected: dict[int, list[frozenset[int]]] = {}

    def every_row(rows: Any) -> Tensor:
        hidden_TC = forward(rows)
        logits.append(decoder.logits(decoder.norm(hidden_TC)))
        return hidden_TC

    def keep(layer: int, selection_TK: Tensor) -> None:
        selected.setdefault(layer, []).extend(frozenset(row) - {-1} for row in selection_TK.tolist())

    decoder.forward, decoder.on_selection = every_row, keep  # type: ignore[method-assign]
    try:
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True))[0]
    finally:
        decoder.forward, decoder.on_selection = forward, None  # type: ignore[method-assign]
    return Rows(torch.cat(logits), selected), prompt + out.outputs[0].token_ids[:-1]


@pytest.mark.parametrize("family", DSA_FAMILIES)
def test_dsa_01_the_indexers_rotary_pairing_is_the_configs(tmp_path: Path, family: str) -> None:
    types = {"indexer_types": ALL_FULL} if family == "glm_moe_dsa" else {}
    model = make_checkpoint(tmp_path, family, **types)
    # transformers knows GLM's indexer as interleaved and DeepSeek's as half-split; both share all other arithmetic.
    oracles = {
        True: other_model(model, "glm_moe_dsa", indexer_types=ALL_FULL),
        False: other_model(model, "deepseek_v32"),
    }
    own = family == "glm_moe_dsa"
    prompt = tokens(4 * K)
    seen: dict[bool, Rows] = {}
    for setting in (True, False, None):
        edit_config(tmp_path, indexer_rope_interleave=setting)
        interleaved = own if setting is None else setting
        want = oracle(oracles[interleaved], prompt)
        llm = engine(tmp_path, enable_prefix_caching=False)
        for length in (K // 2, K, K + 1, 4 * K):
            got = run(llm, prompt[:length])
            assert_same(got, Rows(want.logits[:length], {k: v[:length] for k, v in want.selected.items()}))
        seen[interleaved] = got
    assert seen[True].selected[0] != seen[False].selected[0], "the key changes nothing: it is ignored"


def test_dsa_01_the_main_attentions_rotary_does_not_follow_the_indexers_key(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    prompt = tokens(4 * K)
    logits = []
    for setting in (True, False):
        edit_config(tmp_path, indexer_rope_interleave=setting)
        # With every key selected the indexer decides nothing, so only the main path could differ.
        llm = engine(tmp_path, hf_overrides={"index_topk": 4 * K}, sparse_mla_force_mqa=True)
        logits.append(run(llm, prompt).logits)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("types", [["full", "shared", "shared", "full"], ["full", "full", "shared", "shared"], None])
def test_dsa_02_shared_layers_attend_to_the_selection_of_the_full_layer_before(
    tmp_path: Path, types: list[str] | None
) -> None:
    model = make_checkpoint(tmp_path, "glm_moe_dsa", **({} if types is None else {"indexer_types": types}))
    chunk = 23
    llm = engine(tmp_path, max_num_batched_tokens=chunk)
    decoder = llm.engine.worker.decoder
    attend = decoder.attend
    used: list[Tensor] = []

    class Spy:
        def __call__(self, *args: Any) -> None:
            used.append(attend.selection_TK.clone())
            attend(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(attend, name)

    decoder.attend = Spy()  # type: ignore[assignment]
    prompt = tokens(4 * K)
    assert_same(run(llm, prompt), oracle(model, prompt))
    full = set(llm.model_config.full_indexer_layers)
    assert full == ({0, 1, 2, 3} if types is None else {i for i, kind in enumerate(types) if kind == "full"})
    assert len(used) == NUM_LAYERS * -(-len(prompt) // chunk)
    for step in range(len(used) // NUM_LAYERS):
        scored = slice(max(0, K - step * chunk), None)
        for layer in range(1, NUM_LAYERS):
            here, before = used[step * NUM_LAYERS + layer], used[step * NUM_LAYERS + layer - 1]
            if layer not in full:
                assert torch.equal(here, before), f"shared layer {layer} does not use the selection before it"
                continue
            # A row just past k leaves out a key or two, by chance sometimes the same ones.
            own = (here[scored] != before[scored]).any(-1)
            assert own.float().mean() >= 0.75, f"full layer {layer} did not select for itself"


DSA_05 = [(16, n) for n in (1, 2, 15, 16, 17)] + [(512, n) for n in (1, 511, 512, 513)] + [(4096, 40)]
DSA_05 += [(2048, n) for n in (2, 2047, 2048, 2049)]
DSA_05_LONG = [(4096, n) for n in (4095, 4096, 4097)]


@pytest.mark.parametrize(
    ("k", "length"), [*DSA_05, *[pytest.param(k, n, marks=pytest.mark.slow) for k, n in DSA_05_LONG]]
)
def test_dsa_05_any_k_on_any_length(tmp_path: Path, k: int, length: int) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v32", index_topk=k, num_hidden_layers=2, max_position_embeddings=8192)
    prompt = tokens(length)
    llm = engine(tmp_path, max_model_len=length + 8)
    got = run(llm, prompt)
    for rows in got.selected.values():
        for position, row in enumerate(rows):
            assert len(row) == min(position + 1, k)
            assert max(row) <= position
    fields = {"num_hidden_layers": 2, "max_position_embeddings": 8192, "n_group": 1}
    want = oracle(other_model(model, "deepseek_v3", **fields), prompt).logits
    assert_close(got.logits[:k], want[:k])
    if length > k:
        assert_same(got, oracle(model, prompt))


BOUNDARIES = {"page": 8, "chunk": 24, "k": 8, "key tile": 64, "row tile": 16, "context tile": 32, "block": 8}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size inside the kernels that a sequence can cross, small enough to be crossed by a short one."""
    sizes = {"KEY_TILE": 64, "KEY_STEP": 16, "ROW_TILE": 16, "SELECT_TILE": 256, "CONTEXT_TILE": 32}
    for module in (workspace, indexer, attention):
        for name, size in sizes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


def crossing(limit: int) -> list[int]:
    """Every boundary's multiples up to `limit`, and one to either side."""
    multiples = {n for size in BOUNDARIES.values() for n in range(size, limit, size)}
    # From 2 k blocks on the top-k is pruned.
    return sorted(n for n in {m + d for m in multiples | {2 * 8 * 8} for d in (-1, 0, 1)} if 0 < n <= limit)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", DSA_FAMILIES)
@pytest.mark.parametrize("path", ["paged", "workspace"])
def test_dsa_06_no_step_at_any_size_boundary_by_prefill(tmp_path: Path, family: str, path: str) -> None:
    model = make_checkpoint(tmp_path, family, index_topk=8, index_n_heads=16, num_hidden_layers=2)
    prompt = tokens(200)
    want = oracle(model, prompt)
    llm = engine(
        tmp_path, block_size=8, max_num_batched_tokens=24, enable_prefix_caching=False, attention_path=path
    )  # fmt: skip
    lengths = [n for n in crossing(200) if n <= 34 or n % 32 in (0, 1, 31) or n % 24 in (1, 23)]
    for length in lengths:
        got = run(llm, prompt[:length])
        assert_same(got, Rows(want.logits[:length], {k: v[:length] for k, v in want.selected.items()}))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", DSA_FAMILIES)
def test_dsa_06_no_step_at_any_size_boundary_by_decode_growth(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path, family, index_topk=8, index_n_heads=16, num_hidden_layers=2)
    llm = engine(tmp_path, block_size=8, max_num_batched_tokens=24)
    got, fed = run_growing(llm, tokens(3), 160)
    assert len(fed) == got.logits.shape[0] == 162
    want = oracle(model, fed)
    assert_same(got, want)
    errors = (got.logits - want.logits).abs().amax(-1)
    at_boundary = torch.zeros(162, dtype=torch.bool)
    at_boundary[[n - 1 for n in crossing(162)]] = True
    elsewhere = errors[~at_boundary].median()
    assert errors[at_boundary].median() <= 1.5 * elsewhere
    assert errors[at_boundary].max() <= 4 * elsewhere


def indexer_inputs(folder: Path, config: ModelConfig, prompt: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What layer 0's indexer scores with, from the checkpoint's own tensors and without the engine, all fp64.

    (queries [L, I, D], keys [L, D], head weights [L, I], head weights as products of bf16). Arithmetic is fp32 or
    better; what a model of `dtype` keeps in `dtype` between two operations is rounded to it.
    """
    stored = load_file(folder / "model.safetensors")
    assert config.indexer is not None

    def weight(name: str) -> Tensor:
        return stored[f"model.layers.0.{name}.weight"].double()

    def kept(x: Tensor) -> Tensor:
        return x.float().to(dtype).double()

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return kept(scale * kept(x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()))

    angles_LF = torch.arange(len(prompt))[:, None] * config.rope.theta ** (
        -torch.arange(0, config.rope.dim, 2) / config.rope.dim
    )
    turn_LF = torch.polar(torch.ones_like(angles_LF), angles_LF).to(torch.complex128)

    def rotated(x: Tensor) -> Tensor:
        """Pairs (i, i + P / 2) of the first P values, as DeepSeek-V3.2's indexer has them."""
        half = config.rope.dim // 2
        turn = turn_LF if x.dim() == 2 else turn_LF[:, None]
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)

    x_LC = norm(stored["model.embed_tokens.weight"].double()[prompt], weight("input_layernorm"))
    latent_LQ = norm(kept(x_LC @ weight("self_attn.q_a_proj").T), weight("self_attn.q_a_layernorm"))
    q_LID = kept(latent_LQ @ weight("self_attn.indexer.wq_b").T).unflatten(-1, (-1, config.indexer.head_dim))
    k_LD = kept(x_LC @ weight("self_attn.indexer.wk").T)
    bias = stored["model.layers.0.self_attn.indexer.k_norm.bias"].double()
    k_LD = F.layer_norm(k_LD, k_LD.shape[-1:], weight("self_attn.indexer.k_norm"), bias, eps=1e-6)
    w_LI = x_LC @ weight("self_attn.indexer.weights_proj").T
    return rotated(q_LID), rotated(k_LD), w_LI, w_LI.bfloat16().double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dsa_10_head_weights_in_fp32_keep_the_selection(tmp_path: Path, dtype: torch.dtype) -> None:
    """1,000 rows against scores made outside the engine; head weights rounded to bf16 would be seen."""
    make_checkpoint(tmp_path, "deepseek_v32", dtype=torch.bfloat16, num_hidden_layers=1, index_n_heads=16)
    count = 1000 + K
    prompt = tokens(count)
    name = str(dtype).removeprefix("torch.")
    llm = engine(tmp_path, dtype=name, indexer_cache_dtype="float32", max_model_len=count + 8)
    chosen = run(llm, prompt).selected[0][K:]
    q_LID, k_LD, exact_LI, rounded_LI = indexer_inputs(tmp_path, llm.model_config, prompt, dtype)
    products_LIM = torch.relu(torch.einsum("lid,md->lim", q_LID, k_LD))

    def best(w_LI: Tensor) -> list[frozenset[int]]:
        scores_LM = torch.einsum("lim,li->lm", products_LIM, w_LI)
        scores_LM.masked_fill_(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
        return [frozenset(row) for row in scores_LM.topk(K, -1).indices[K:].tolist()]

    want, coarse = best(exact_LI), best(rounded_LI)

    def overlap(rows: list[frozenset[int]]) -> float:
        return sum(len(a & b) for a, b in zip(rows, want, strict=True)) / (K * len(want))

    assert len(want) == len(chosen) == 1000
    assert overlap(chosen) >= 0.999
    assert overlap(coarse) < 0.9985, "the test could not see head weights in bf16"


@pytest.mark.parametrize("family", DSA_FAMILIES)
@pytest.mark.parametrize(("force_mqa", "path"), [(False, "paged"), (True, "paged"), (True, "workspace")])
def test_dsa_11_a_top_k_above_the_context_equals_dense_attention(
    tmp_path: Path, family: str, force_mqa: bool, path: str
) -> None:
    model = make_checkpoint(tmp_path, family)
    prompt = tokens(90)
    want = dense(model, prompt)
    assert (oracle(model, prompt).logits - want).abs().max() > 0.1, "top-16 must differ, or the test shows nothing"
    args: dict[str, Any] = {"sparse_mla_force_mqa": force_mqa, "attention_path": path, "max_model_len": 96}
    for topk, chunk in ((96, 4096), (4096, 7)):
        overrides = {"index_topk": topk}
        llm = engine(tmp_path, hf_overrides=overrides, max_num_batched_tokens=chunk, **args)
        assert_close(run(llm, prompt).logits, want)
    llm = engine(tmp_path, hf_overrides=overrides, **args)
    got, fed = run_growing(llm, prompt[:5], 60)
    assert_close(got.logits, dense(model, fed))
