"""ModelConfig: every published spelling is read, and what is not honoured is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.tiny import CLASSES, DSA_FAMILIES, FAMILIES, tiny_config

from longfill.errors import ModelError
from longfill.models.config import ModelConfig
from longfill.models.config_fields import HONOURED, INERT, ONLY

BASE: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 8,
}
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


def read(**fields: Any) -> ModelConfig:
    """BASE with `fields`; the value `...` removes one."""
    return ModelConfig.from_dict({k: v for k, v in (BASE | fields).items() if v is not ...})


def deepseek_v3(**fields: Any) -> ModelConfig:
    no_indexer = dict.fromkeys(("index_topk", "index_head_dim", "index_n_heads"), ...)
    return read(**({"model_type": "deepseek_v3"} | no_indexer | fields))


F, S = "full", "shared"


@pytest.mark.parametrize(
    ("spelling", "types"),
    [
        ({}, (F,) * 6),
        ({"indexer_types": [F, S, S, F, S, F]}, (F, S, S, F, S, F)),
        ({"index_topk_pattern": "FSSFSF"}, (F, S, S, F, S, F)),
        ({"index_topk_pattern": [F, S, S, F, S, F]}, (F, S, S, F, S, F)),
        ({"index_topk_pattern": ["F", "S"]}, (F, S, F, F, F, F)),
        ({"index_topk_freq": 1}, (F,) * 6),
        ({"index_topk_freq": 2}, (F, F, S, F, S, F)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (F, F, F, S, S, S)),
        (
            {"index_topk_freq": 2, "index_topk_pattern": "FFSFSF", "indexer_types": [F, F, S, F, S, F]},
            (F, F, S, F, S, F),
        ),
    ],
)
def test_every_spelling_of_shared_indexers_is_read(spelling: dict[str, Any], types: tuple[str, ...]) -> None:
    indexer = read(**spelling).indexer
    assert indexer is not None
    assert indexer.types == types


def test_glm_5_2_has_21_full_layers_of_78() -> None:
    config = read(num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    assert config.full_indexer_layers == (0, 1, *range(2, 78, 4))
    assert len(config.full_indexer_layers) == 21


@pytest.mark.parametrize("spelling", [{"indexer_types": [S] + [F] * 5}, {"index_topk_pattern": "SFFFFF"}])
def test_dsa_02_a_first_layer_marked_shared_is_refused(spelling: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="first layer shared"):
        read(**spelling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": [F] * 5}, "describes 5 layers, the model has 6"),
        ({"indexer_types": [F] * 7}, "describes 7 layers"),
        ({"index_topk_pattern": "FFFFFFF"}, "describes 7 layers"),
        ({"indexer_types": [F] * 5 + ["half"]}, "'half'"),
        ({"indexer_types": [F] * 6, "index_topk_freq": 2}, "describe different layers"),
        ({"indexer_types": [F] * 6, "index_topk_pattern": "FFFFFS"}, "describe different layers"),
        ({"index_topk": ...}, "index_topk is missing"),
        ({"index_head_dim": 4}, "less than qk_rope_head_dim"),
        ({"q_lora_rank": None}, "the indexer reads the query latent"),
    ],
)
def test_an_indexer_that_cannot_be_honoured_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("family", "stated", "interleaved"),
    [
        ("glm_moe_dsa", ..., True),
        ("glm_moe_dsa", False, False),
        ("deepseek_v32", ..., False),
        ("deepseek_v32", True, True),
    ],
)
def test_dsa_01_indexer_pairs_follow_the_key_and_else_the_family(family: str, stated: Any, interleaved: bool) -> None:
    config = read(model_type=family, indexer_rope_interleave=stated)
    assert config.indexer is not None
    assert config.indexer.rope_interleave is interleaved
    assert config.rope_interleave is True


def test_an_indexer_in_a_family_without_one_is_refused() -> None:
    with pytest.raises(ModelError, match=r"index_topk belongs to an indexer, and deepseek_v3 has none"):
        deepseek_v3(index_topk=16)


ROPE_SPELLINGS = [
    {"rope_theta": 8e6},
    {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
    {"rope_theta": 8e6, "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
    {"rope_theta": 8e6, "rope_scaling": None},
    {"rope_theta": 8e6, "rope_scaling": {"type": "default"}, "partial_rotary_factor": 1.0},
]
YARN_SPELLINGS = [
    {"rope_scaling": {"type": "yarn", **YARN}},
    {"rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
    {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
]


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_every_spelling_of_the_default_rope_is_read(spelling: dict[str, Any]) -> None:
    rope = read(**spelling).rope
    assert (rope.type, rope.theta, rope.dim) == ("default", 8e6, 8)


@pytest.mark.parametrize("spelling", YARN_SPELLINGS)
def test_every_spelling_of_yarn_is_read(spelling: dict[str, Any]) -> None:
    assert read(**spelling).rope == read(**YARN_SPELLINGS[0]).rope
    rope = read(**spelling).rope
    assert (rope.type, rope.factor, rope.mscale_all_dim, rope.beta_fast, rope.truncate) == ("yarn", 40, 1.0, 32, True)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    block = {"type": "yarn", "original_max_position_embeddings": 1024}
    assert read(rope_scaling=block).rope.factor == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", **YARN}}, "disagree"),
        ({"rope_scaling": {"type": "yarn", **YARN, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "factor is not a parameter"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_theta": "10000"}, "rope_theta must be a finite number"),
    ],
)
def test_a_rope_that_is_not_computed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("spelling", "moe_layers"),
    [
        ({"first_k_dense_replace": 0}, (True,) * 6),
        ({"first_k_dense_replace": 3}, (False,) * 3 + (True,) * 3),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (False, False, True, False, True, False)),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"]}, (False,) * 5 + (True,)),
        ({"mlp_layer_types": ["sparse"] * 6, "first_k_dense_replace": ...}, (True,) * 6),
        ({"n_routed_experts": None}, (False,) * 6),
    ],
)
def test_every_spelling_of_expert_layers_is_read(spelling: dict[str, Any], moe_layers: tuple[bool, ...]) -> None:
    assert read(**spelling).moe_layers == moe_layers


@pytest.mark.parametrize("name", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_every_spelling_of_the_expert_count_is_read(name: str) -> None:
    moe = read(**({"n_routed_experts": ...} | {name: 8})).moe
    assert moe is not None
    assert moe.num_experts == 8


def test_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ModelError, match="n_routed_experts and num_experts"):
        read(num_experts=4)
    with pytest.raises(ModelError, match="dtype and torch_dtype"):
        read(torch_dtype="float16")


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_every_spelling_of_draft_layers_is_read(name: str) -> None:
    assert read(**{name: 1}).num_mtp_layers == 1
    assert read().num_mtp_layers == 0


@pytest.mark.parametrize("spelling", [{"torch_dtype": "bfloat16", "dtype": ...}, {"dtype": "torch.bfloat16"}, {}])
def test_every_spelling_of_the_dtype_is_read(spelling: dict[str, Any]) -> None:
    assert read(**spelling).dtype == "bfloat16"


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (1, (1,)), ([1, 7], (1, 7))])
def test_every_spelling_of_stop_tokens_is_read(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == ids


def test_v2_chooses_experts_by_softmax_and_the_others_by_biased_sigmoid() -> None:
    v2 = deepseek_v3(model_type="deepseek_v2", norm_topk_prob=False, topk_method="group_limited_greedy").moe
    v3 = deepseek_v3().moe
    assert v2 is not None
    assert v3 is not None
    assert (v2.scoring, v2.topk_method, v2.has_correction_bias) == ("softmax", "group_limited_greedy", False)
    assert (v3.scoring, v3.topk_method, v3.has_correction_bias) == ("sigmoid", "noaux_tc", True)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_fp8_block_scales_are_read() -> None:
    quant = read(quantization_config=FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}).quant
    assert quant is not None
    assert quant.block == (128, 128)
    assert quant.modules_to_not_convert == ("lm_head",)
    assert read(quantization_config=None).quant is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"weight_block_size": None}, "weight_block_size must be two positive integers"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({"rotation": "hadamard"}, "rotation is not known"),
    ],
)
def test_other_quantisation_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(quantization_config=FP8 | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"index_kpool": 4}, "'index_kpool'"),
        ({"mhc": True}, "'mhc'"),
        ({"logit_scale": 0.5}, "'logit_scale'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"qk_head_dim": 192}, "qk_head_dim is 192"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"num_experts_per_tok": 9}, "9 experts cannot be chosen"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "3 experts cannot be chosen from 1 of 4"),
        ({"n_group": 3}, "3 groups of 8 experts"),
        ({"n_group": 8, "topk_group": 2}, "n_group is 8, one expert a group"),
        ({"routed_scaling_factor": ...}, "routed_scaling_factor is missing"),
        ({"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"dtype": ...}, "dtype is missing"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"q_lora_rank": ...}, "q_lora_rank is missing"),
        ({"mlp_layer_types": ["sparse"] * 5}, "mlp_layer_types"),
        ({"qk_rope_head_dim": 7}, "must be even"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**fields)


def test_an_unknown_field_can_be_waved_through_with_null() -> None:
    assert read(logit_scale=None, _name_or_path="x") == read()


def test_each_field_stands_in_one_table_and_inert_ones_have_a_reason() -> None:
    assert not set(INERT) & HONOURED
    assert not set(ONLY) & (HONOURED | set(INERT))
    assert all(INERT.values())


@pytest.mark.parametrize("name", sorted(INERT))
def test_inert_fields_change_nothing(name: str) -> None:
    assert read(**{name: 0.25}) == read()


def test_load_08_norm_epsilon_is_the_files_not_a_default() -> None:
    assert read(rms_norm_eps=1e-5).rms_norm_eps == 1e-5
    assert read(rms_norm_eps=0.5).rms_norm_eps == 0.5
    with pytest.raises(ModelError, match="rms_norm_eps is missing"):
        read(rms_norm_eps=...)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "kimi_k2"])
def test_what_transformers_writes_is_read_back(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, CLASSES[family] + "Config")(**tiny_config(family), dtype="bfloat16")
    config.save_pretrained(tmp_path)
    read_back = ModelConfig.from_folder(tmp_path)
    assert read_back.model_type == family
    assert (read_back.indexer is not None) == (family in DSA_FAMILIES)
    assert read_back.moe_layers == (False, True, True, True)
    assert read_back.rms_norm_eps == config.rms_norm_eps


PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {
        "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v32", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.44.2",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "GLM-5.2": {
        "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "head_dim": 192, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
        "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk": 2048,
        "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
        "indexer_types": [F, F] + [F if layer % 4 == 2 else S for layer in range(2, 78)],
        "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
        "max_position_embeddings": 1048576, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
        "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "transformers_version": "5.0.2", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
    },
}  # fmt: skip


def test_files_spelled_as_the_published_ones_are_read() -> None:
    v32, lite, glm = (ModelConfig.from_dict(raw) for raw in PUBLISHED.values())
    assert (v32.rope.type, v32.rope.factor, v32.num_mtp_layers, sum(v32.moe_layers)) == ("yarn", 40.0, 1, 58)
    assert v32.quant is not None
    assert (lite.q_lora_rank, lite.indexer, sum(lite.moe_layers)) == (None, None, 26)
    assert (glm.rope.theta, len(glm.full_indexer_layers), glm.eos_token_ids) == (8e6, 21, (154820, 154827, 154829))


def test_overrides_replace_fields_and_null_removes_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"logit_scale": 2.0}))
    config = ModelConfig.from_folder(tmp_path, {"logit_scale": None, "index_topk": 32})
    assert config.indexer is not None
    assert config.indexer.topk == 32


def test_stop_tokens_of_the_generation_config_are_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "temperature": 0.6}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 9)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_broken_config_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "elsewhere")
