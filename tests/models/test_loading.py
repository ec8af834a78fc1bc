"""Loading is strict: every parameter once, every tensor used, nothing guessed, nothing copied without need."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import FAMILIES, edit_config, edit_tensors, expand_scale, make_checkpoint, quantise
from torch import Tensor

from longfill.errors import ModelError
from longfill.kernels.interface import Linear, Mlp, StoredLinear
from longfill.kernels.reference.backend import ReferenceBackend, StoredHeads
from longfill.models.config import ModelConfig
from longfill.models.loading import load_model
from longfill.models.weights import AttentionWeights, ModelWeights, MoeWeights, MtpWeights

FP32 = torch.float32
T = TypeVar("T")


def load(folder: Path, dtype: torch.dtype = FP32, *, mtp: bool = False, **overrides: Any) -> ModelWeights:
    return load_model(folder, ModelConfig.from_folder(folder, overrides), dtype, ReferenceBackend(), mtp=mtp)


def load_mtp(folder: Path) -> MtpWeights:
    mtp = load(folder, mtp=True).mtp
    assert mtp is not None
    return mtp


def value(weight: Linear) -> Tensor:
    """A linear weight's values in float32."""
    assert isinstance(weight, StoredLinear)
    if weight.scale is None:
        return weight.weight.float()
    assert weight.block is not None
    return weight.weight.float() * expand_scale(weight.scale, weight.weight.shape, weight.block)


def up_projections(attention: AttentionWeights) -> Tensor:
    """kv_b's values, as transformers has them: each head's keys above its values."""
    assert isinstance(attention.up_key, StoredHeads)
    assert isinstance(attention.up_value, StoredHeads)
    halves = [attention.up_key.weight_HAB, attention.up_value.weight_HAB.transpose(1, 2)]
    return torch.cat(halves, 1).flatten(0, 1).float()


def stored(weight: Linear) -> StoredLinear:
    assert isinstance(weight, StoredLinear)
    return weight


def only(slices: tuple[T | None, ...]) -> T:
    """What one rank holds as one slice."""
    (whole,) = slices
    assert whole is not None
    return whole


def layer_values(weights: ModelWeights, index: int) -> dict[str, Tensor]:
    """A loaded layer under the names of transformers' modules."""
    layer = weights.layers[index]
    a = layer.attention
    found = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
        "self_attn.kv_a_proj_with_mqa.weight": value(a.kv_a),
        "self_attn.kv_a_layernorm.weight": a.kv_a_norm,
        "self_attn.kv_b_proj.weight": up_projections(a),
        "self_attn.o_proj.weight": value(only(a.o)),
    }
    if a.q_a is None:
        found["self_attn.q_proj.weight"] = value(a.q_b)
    else:
        assert a.q_a_norm is not None
        found |= {"self_attn.q_a_proj.weight": value(a.q_a), "self_attn.q_a_layernorm.weight": a.q_a_norm}
        found["self_attn.q_b_proj.weight"] = value(a.q_b)
    for name, linear in {"q_a_proj": a.q_a, "kv_a_proj_with_mqa": a.kv_a, "o_proj": only(a.o)}.items():
        if linear is not None and linear.bias is not None:
            found[f"self_attn.{name}.bias"] = linear.bias
    if a.indexer is not None:
        found |= {
            "self_attn.indexer.wq_b.weight": value(a.indexer.wq_b),
            "self_attn.indexer.wk.weight": value(a.indexer.wk),
            "self_attn.indexer.k_norm.weight": a.indexer.k_norm_weight,
            "self_attn.indexer.k_norm.bias": a.indexer.k_norm_bias,
            "self_attn.indexer.weights_proj.weight": value(a.indexer.weights_proj),
        }
    if not isinstance(layer.mlp, MoeWeights):
        return found | mlp_values("mlp.", only(layer.mlp))
    moe, held = layer.mlp, only(layer.mlp.slices)
    found["mlp.gate.weight"] = value(moe.router)
    if moe.bias is not None:
        found["mlp.gate.e_score_correction_bias"] = moe.bias
    if held.shared is not None:
        found |= mlp_values("mlp.shared_experts.", held.shared)
    gate_up = [torch.cat([value(e.gate), value(e.up)]) for e in held.experts]
    found["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    found["mlp.experts.down_proj"] = torch.stack([value(e.down) for e in held.experts])
    return found


def mlp_values(prefix: str, mlp: Mlp) -> dict[str, Tensor]:
    linears = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
    found = {f"{prefix}{name}.weight": value(linear) for name, linear in linears.items()}
    return found | {f"{prefix}{n}.bias": linear.bias for n, linear in linears.items() if linear.bias is not None}


def assert_same_weights(weights: ModelWeights, model: torch.nn.Module) -> None:
    expected = {name: tensor for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    found = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    found["lm_head.weight"] = value(weights.lm_head)
    for i in range(len(weights.layers)):
        found |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer_values(weights, i).items()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_01_every_parameter_of_every_family_is_filled(family: str, fp8: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, fp8=fp8)
    assert_same_weights(load(tmp_path), model)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no query latent": ("deepseek_v3", {"q_lora_rank": None}),
    "attention bias": ("glm_moe_dsa", {"attention_bias": True}),
    "mlp bias": ("deepseek_v2", {"mlp_bias": True}),
    "two groups": ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
    "two shared experts": ("glm4_moe_lite", {"n_shared_experts": 2}),
    "all dense": ("deepseek_v32", {"first_k_dense_replace": 4}),
    "shared indexers": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "full"]}),
    "group limited": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_01_every_variant_is_filled(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = make_checkpoint(tmp_path, family, **overrides)
    assert_same_weights(load(tmp_path), model)


@pytest.mark.parametrize("layout", [{"shards": 3}, {"shards": 3, "index": False}])
def test_shards_load_as_one_file_does(layout: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v32", **layout)
    assert_same_weights(load(tmp_path), model)


def _stack_experts(folder: Path) -> None:
    """Rewrite the checkpoint with transformers' stacked expert tensors."""
    tensors = load_file(folder / "model.safetensors")
    stacks: dict[str, Tensor] = {}
    for layer in (1, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors[f"{prefix}.{e}.{name}.weight"] for e in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        stacks[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        stacks[f"{prefix}.down_proj"] = parts["down_proj"]
    edit_tensors(folder, remove=[name for name in tensors if ".experts." in name], add=stacks)


def test_stacked_experts_load_as_views_of_the_stack(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "glm_moe_dsa")
    _stack_experts(tmp_path)
    weights = load(tmp_path)
    assert_same_weights(weights, model)
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoeWeights)
    storages = {e.gate.weight.untyped_storage().data_ptr() for e in only(moe.slices).experts}
    assert len(storages) == 1
    assert only(moe.slices).experts[0].up.weight.untyped_storage().data_ptr() in storages


def test_stacked_and_single_experts_together_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    single = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.experts.0.up_proj.weight"].clone()
    _stack_experts(tmp_path)
    edit_tensors(tmp_path, add={"model.layers.1.mlp.experts.0.up_proj.weight": single})
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj\.weight would be left unused"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.1.self_attn.q_a_layernorm.weight",
    ],
)
def test_load_01_a_missing_parameter_is_named(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    edit_tensors(tmp_path, remove=[name])
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load(tmp_path)


def test_load_01_a_tensor_nobody_uses_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    edit_tensors(tmp_path, add={"model.layers.1.self_attn.q_b_proj.bias": torch.ones(96)})
    with pytest.raises(ModelError, match=r"q_b_proj\.bias would be left unused"):
        load(tmp_path)


def test_load_01_rotary_buffers_are_skipped(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v3")
    edit_tensors(tmp_path, add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_same_weights(load(tmp_path), model)


def test_load_01_a_wrong_shape_names_tensor_file_and_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa")
    edit_tensors(tmp_path, add={"model.layers.0.mlp.up_proj.weight": torch.ones(127, 64)})
    message = r"model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight has shape \[127, 64\].*\[128, 64\]"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_load_01_tied_without_a_head_ties(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "glm4_moe_lite", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.lm_head.weight is weights.embed
    assert_same_weights(weights, model)


def test_load_01_tied_with_a_different_head_uses_it_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "glm4_moe_lite", tie_word_embeddings=True)
    head = torch.randn(512, 64)
    edit_tensors(tmp_path, add={"lm_head.weight": head})
    with caplog.at_level(logging.WARNING):
        weights = load(tmp_path)
    assert torch.equal(weights.lm_head.weight, head)
    assert "the stored head is used" in caplog.text


def test_load_01_tied_with_an_equal_head_is_held_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "glm4_moe_lite", tie_word_embeddings=True)
    tied = load(tmp_path)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(tmp_path, add={"lm_head.weight": embed})
    weights = load(tmp_path)
    assert weights.lm_head.weight is weights.embed
    assert weights.num_bytes == tied.num_bytes
    assert not caplog.text


def test_load_01_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm4_moe_lite")
    edit_tensors(tmp_path, remove=["lm_head.weight"])
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing and tie_word_embeddings is false"):
        load(tmp_path)


def test_dsa_02_shared_layers_have_no_indexer_and_full_ones_do(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"])
    weights = load(tmp_path)
    assert [layer.attention.indexer is not None for layer in weights.layers] == [True, False, False, True]


def test_dsa_02_without_types_every_layer_needs_an_indexer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"])
    edit_config(tmp_path, indexer_types=None)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.self_attn\.indexer\.\S+ is missing"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"])
def test_dsa_02_a_full_layer_without_a_weight_is_refused(part: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"])
    name = f"model.layers.3.self_attn.indexer.{part}"
    edit_tensors(tmp_path, remove=[name])
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load(tmp_path)


def test_dsa_02_spare_indexers_of_shared_layers_are_unused_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "deepseek_v32")
    with caplog.at_level(logging.WARNING):
        weights = load(tmp_path, index_topk_pattern="FSSF")
    assert [layer.attention.indexer is not None for layer in weights.layers] == [True, False, False, True]
    assert "10 indexer tensors" in caplog.text


def test_a_draft_layer_that_nobody_asked_for_is_no_spare_indexer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", mtp=1, indexer_types=["full", "full", "shared", "full"])
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).mtp is None
        assert caplog.text == ""
        assert load(tmp_path, index_topk_pattern=None, indexer_types=["full", "shared", "shared", "full"]).mtp is None
    assert "5 indexer tensors" in caplog.text


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_dsa_10_what_must_be_float32_is_float32(stored: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", dtype=stored)
    layer = load(tmp_path, stored).layers[1]
    indexer, moe = layer.attention.indexer, layer.mlp
    assert indexer is not None
    assert isinstance(moe, MoeWeights)
    assert moe.bias is not None
    kept = [indexer.k_norm_weight, indexer.k_norm_bias, indexer.weights_proj.weight, moe.router.weight, moe.bias]
    assert {tensor.dtype for tensor in kept} == {FP32}
    others = [indexer.wk.weight, layer.input_norm, only(layer.attention.o).weight]
    others.append(only(moe.slices).experts[0].down.weight)
    assert {tensor.dtype for tensor in others} == {stored}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, FP32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, FP32])
def test_weights_come_in_the_wanted_dtype(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", dtype=stored)
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = only(load(tmp_path, wanted).layers[0].attention.o).weight
    assert weight.dtype == wanted
    assert torch.equal(weight, load_file(tmp_path / "model.safetensors")[name].to(wanted))


def _private_bytes(path: Path) -> int:
    """Bytes of this process's mappings of `path` that are not the file's own pages."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = str(path) in line
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("fp8", [False, True])
def test_weights_in_the_stored_dtype_are_the_mapped_file(fp8: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", fp8=fp8)
    weights = load(tmp_path)
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(tmp_path) in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            spans.append((low, high))
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoeWeights)
    o, expert = only(weights.layers[0].attention.o), only(moe.slices).experts[3]
    for tensor in (weights.embed, o.weight, expert.up.weight):
        assert any(low <= tensor.data_ptr() < high for low, high in spans)
    assert _private_bytes(tmp_path) == 0


def test_num_bytes_counts_every_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", fp8=True, mtp=1)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if ".kv_b_proj." not in name)
    # The up-projections are kept dequantised, in float32 here.
    stored += sum(4 * tensor.numel() for name, tensor in tensors.items() if name.endswith(".kv_b_proj.weight"))
    assert load(tmp_path, mtp=True).num_bytes == stored


def _gate(weights: ModelWeights) -> StoredLinear:
    mlp = weights.layers[0].mlp
    assert not isinstance(mlp, MoeWeights)
    return stored(only(mlp).gate)


WIDE = {"hidden_size": 300, "intermediate_size": 1000, "num_hidden_layers": 1}


def test_load_02_the_block_comes_from_the_config(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "deepseek_v3", fp8=True, block=(128, 128), **WIDE)
    gate = _gate(load(tmp_path))
    assert (tuple(gate.weight.shape), gate.block) == ((1000, 300), (128, 128))
    assert gate.scale is not None
    assert tuple(gate.scale.shape) == (8, 3)
    assert torch.equal(value(gate), model.state_dict()["model.layers.0.mlp.gate_proj.weight"])
    rows = gate.weight[:128].float()
    assert torch.equal(value(gate)[:128, :128], rows[:, :128] * gate.scale[0, 0])
    assert torch.equal(value(gate)[128:129, 256:], gate.weight[128:129, 256:].float() * gate.scale[1, 2])


def test_load_02_the_block_is_not_guessed_from_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", fp8=True, block=(128, 128), **WIDE)
    same_shapes = {"quant_method": "fp8", "weight_block_size": [130, 130]}
    gate = _gate(load(tmp_path, quantization_config=same_shapes))
    assert gate.block == (130, 130)
    assert gate.scale is not None
    assert tuple(gate.scale.shape) == (8, 3)
    assert torch.equal(value(gate)[129, :130], gate.weight[129, :130].float() * gate.scale[0, 0])


@pytest.mark.parametrize("block", [(64, 128), (128, 64), (256, 128)])
def test_load_02_a_scale_of_another_shape_is_refused(block: tuple[int, int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", fp8=True, block=(128, 128), **WIDE)
    quant = {"quant_method": "fp8", "weight_block_size": list(block)}
    with pytest.raises(ModelError, match=r"weight_scale_inv has shape .* asks for"):
        load(tmp_path, quantization_config=quant)


@pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_load_02_a_scale_off_by_one_is_refused(change: tuple[int, int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", fp8=True)
    name = "model.layers.0.mlp.gate_proj.weight_scale_inv"
    edit_tensors(tmp_path, add={name: torch.ones(8 + change[0], 4 + change[1])})
    with pytest.raises(ModelError, match=rf"tensor {name} has shape"):
        load(tmp_path)


def test_load_01_an_fp8_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    edit_tensors(tmp_path, remove=[f"{name}_scale_inv"])
    with pytest.raises(ModelError, match=rf"fp8 tensor {name} has no scale; tensor {name}_scale_inv is missing"):
        load(tmp_path)


def test_load_01_a_scale_without_an_fp8_weight_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    edit_tensors(tmp_path, add={name: torch.ones(32, 64)})
    with pytest.raises(ModelError, match=rf"{name}_scale_inv would be left unused"):
        load(tmp_path)


def test_load_01_fp8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    with pytest.raises(ModelError, match=r"stored as F8_E4M3: config\.json has no quantization_config"):
        load(tmp_path, quantization_config=None)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj", "model.layers.0.self_attn", "o_proj", "self_attn"])
def test_modules_to_not_convert_must_not_be_fp8(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    quant = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": [name]}
    with pytest.raises(ModelError, match="modules_to_not_convert says that it is not quantised"):
        load(tmp_path, quantization_config=quant)


def test_modules_to_not_convert_are_read_as_they_are(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    name = "model.layers.0.self_attn.o_proj"
    plain = torch.randn(64, 64)
    edit_tensors(tmp_path, remove=[f"{name}.weight_scale_inv"], add={f"{name}.weight": plain})
    quant = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": [name, "lm_head"]}
    o = stored(only(load(tmp_path, quantization_config=quant).layers[0].attention.o))
    assert o.scale is None
    assert torch.equal(o.weight, plain)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.indexer.weights_proj.weight"]
)
def test_what_must_be_float32_cannot_be_stored_as_fp8(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    values, scale = quantise(load_file(tmp_path / "model.safetensors")[name])
    edit_tensors(tmp_path, add={name: values, f"{name}_scale_inv": scale})
    with pytest.raises(ModelError, match=f"tensor {name} is stored as F8_E4M3"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_become_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", fp8=True)
    name = "model.layers.0.mlp.gate_proj.weight_scale_inv"
    scale = torch.full((8, 4), 2.0**-9)
    edit_tensors(tmp_path, add={name: scale.to(dtype)})
    loaded = _gate(load(tmp_path)).scale
    assert loaded is not None
    assert loaded.dtype == FP32
    assert torch.equal(loaded, scale)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3"])
def test_a_draft_layer_is_loaded_where_it_is_wanted(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, mtp=1)
    weights = load(tmp_path, mtp=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert_same_weights(weights, model)
    mtp, prefix = load_mtp(tmp_path), "model.layers.4"
    assert torch.equal(value(mtp.eh_proj), stored[f"{prefix}.eh_proj.weight"])
    assert torch.equal(mtp.enorm, stored[f"{prefix}.enorm.weight"])
    assert torch.equal(mtp.hnorm, stored[f"{prefix}.hnorm.weight"])
    assert torch.equal(mtp.head_norm, stored[f"{prefix}.shared_head.norm.weight"])
    assert torch.equal(value(mtp.head), stored[f"{prefix}.shared_head.head.weight"])
    assert torch.equal(mtp.embed, stored[f"{prefix}.embed_tokens.weight"])
    assert torch.equal(mtp.layer.input_norm, stored[f"{prefix}.input_layernorm.weight"])
    assert (mtp.layer.attention.indexer is not None) == (family == "glm_moe_dsa")


@pytest.mark.parametrize("count", [1, 2])
def test_draft_layers_that_nobody_wants_are_left_where_they_are(count: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "glm_moe_dsa", mtp=count)
    weights = load(tmp_path)
    assert weights.mtp is None
    assert_same_weights(weights, model)


def test_a_draft_layer_of_an_index_sharing_model_has_its_own_indexer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", mtp=1, indexer_types=["full", "shared", "shared", "shared"])
    assert load_mtp(tmp_path).layer.attention.indexer is not None


def test_a_draft_layer_without_embedding_and_head_uses_the_models(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", mtp=1)
    edit_tensors(tmp_path, remove=["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"])
    weights = load(tmp_path, mtp=True)
    assert weights.mtp is not None
    assert weights.mtp.embed is weights.embed
    assert weights.mtp.head is weights.lm_head


def test_a_checkpoint_published_without_its_draft_layer_loads_unless_drafts_are_wanted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    assert load(tmp_path, num_nextn_predict_layers=1).mtp is None
    message = (
        r"announces a draft layer, but none is stored \(model\.layers\.4\.eh_proj\.weight is missing\); drop --spec"
    )
    with pytest.raises(ModelError, match=message):
        load(tmp_path, mtp=True, num_nextn_predict_layers=1)


def test_half_a_draft_layer_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", mtp=1)
    edit_tensors(tmp_path, remove=["model.layers.4.hnorm.weight"])
    with pytest.raises(ModelError, match=r"tensor model\.layers\.4\.hnorm\.weight is missing"):
        load(tmp_path, mtp=True)


def test_draft_layers_that_the_config_does_not_announce_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", mtp=1)
    with pytest.raises(ModelError, match=r"model\.layers\.4\..* would be left unused"):
        load(tmp_path, num_nextn_predict_layers=0)
