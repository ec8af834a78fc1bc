"""The fields that a config.json may hold: honoured, inert (with the reason), or allowed one value only.

Imports errors only. Invariant: a field is never ignored by accident; one that no table names is refused, because it may
change results, unless its value is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longfill.errors import ModelError

Raw = Mapping[str, Any]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HONOURED = frozenset(
    _names("""
    model_type architectures vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rms_norm_eps attention_bias mlp_bias
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling rope_parameters rope_interleave
    tie_word_embeddings dtype torch_dtype bos_token_id eos_token_id pad_token_id quantization_config
    n_routed_experts num_experts num_local_experts num_experts_per_tok moe_intermediate_size n_shared_experts
    n_group topk_group scoring_func topk_method norm_topk_prob routed_scaling_factor
    first_k_dense_replace moe_layer_freq mlp_layer_types
    index_topk index_head_dim index_n_heads indexer_rope_interleave index_topk_freq index_skip_topk_offset
    index_topk_pattern indexer_types num_nextn_predict_layers num_mtp_layers
    """)
)
"""Fields that `ModelConfig.from_dict` reads."""

_INERT_GROUPS = {
    "training only": """
        initializer_range attention_dropout hidden_dropout embedding_dropout resid_pdrop dropout aux_loss_alpha seq_aux
        router_aux_loss_coef output_router_logits router_jitter_noise use_bfloat16 gradient_checkpointing
        problem_type task_specific_params finetuning_task freeze_router""",
    "how a run is spread over devices, not what it computes": "ep_size pretraining_tp tp_size tp_plan device_map",
    "bookkeeping of the library that wrote the file": """
        transformers_version name_or_path auto_map tokenizer_class prefix torchscript return_dict
        output_hidden_states output_attentions id2label label2id unsloth_fixed unsloth_version tf_legacy_loss
        attn_implementation experts_implementation chunk_size_feed_forward is_decoder""",
    "the engine always caches": "use_cache",
    "sampling defaults belong to the request": """
        temperature top_k top_p typical_p do_sample num_beams num_beam_groups num_return_sequences max_length min_length
        early_stopping repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_bos_token_id
        forced_eos_token_id sep_token_id decoder_start_token_id""",
    "MLA's heads are described by qk_nope_head_dim, qk_rope_head_dim and v_head_dim": "head_dim",
    "only drafts would change, and a draft never changes the verified output": "index_share_for_mtp_iteration",
    "stored dtypes are read from the checkpoint itself": "expert_dtype",
}

INERT: dict[str, str] = {name: reason for reason, names in _INERT_GROUPS.items() for name in _names(names)}
"""Field -> why it cannot change what the engine computes."""

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "only the silu activation is implemented"),
    "sliding_window": ((None,), "sliding-window attention is not implemented"),
    "use_sliding_window": ((False, None), "sliding-window attention is not implemented"),
    "attention_chunk_size": ((None,), "chunked attention is not implemented"),
    "attention_sink": ((False, None), "attention sinks are not implemented"),
    "use_qk_norm": ((False, None), "query and key norms are not part of these families"),
    "partial_rotary_factor": ((1, 1.0, None), "rotary embeddings cover all of qk_rope_head_dim"),
    "moe_router_dtype": (("float32", "fp32", None), "the router is computed in float32"),
    "router_dtype": (("float32", "fp32", None), "the router is computed in float32"),
    "pruned_heads": (({}, None), "pruned heads are not supported"),
    "is_encoder_decoder": ((False, None), "these families are decoders"),
    "add_cross_attention": ((False, None), "cross attention is not implemented"),
    "tie_encoder_decoder": ((False, None), "these families are decoders"),
    "cross_attention_hidden_size": ((None,), "cross attention is not implemented"),
    "compression_config": ((None,), "only fp8 block-scaled quantisation (quantization_config) is implemented"),
}
"""Field -> (the values that are honoured, what to tell the user about any other)."""

_DERIVED = frozenset({"num_key_value_heads", "qk_head_dim", "layer_types"})
"""Fields that repeat others; `from_dict` checks that they agree."""


def check_fields(raw: Raw, source: str) -> None:
    """Raise `ModelError` for a field that is not known, or known with a value that is not honoured.

    A name that starts with an underscore is private bookkeeping of the library that wrote the file.
    """
    for name, value in raw.items():
        if name in HONOURED or name in INERT or name in _DERIVED or name.startswith("_"):
            continue
        if name in ONLY:
            allowed, why = ONLY[name]
            if value not in allowed:
                raise ModelError(f"{source}: {name} is {value!r}: {why}")
        elif value is not None:
            raise ModelError(
                f"{source}: field {name!r} (value {_short(value)}) is not known to longfill and may change results. "
                f'If it does not, set it to null with hf_overrides {{"{name}": null}}'
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Reader:
    """Typed access to a config's fields; an error names the file, the field and what it should be.

    A null counts as absent. With several names the fields are spellings of one thing and must agree.
    """

    def __init__(self, raw: Raw, source: str) -> None:
        self.raw = raw
        self.source = source

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.source}: {name} {problem}")

    def get(self, *names: str) -> Any:
        """The value under any of `names`, or None."""
        found = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise self.error(" and ".join(found), f"are spellings of one field and disagree: {found}")
        return values[0] if values else None

    def integer(self, *names: str, low: int = 1, default: int | None = None) -> int:
        """An integer >= `low`; required unless there is a default."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise self.error(names[0], "is missing")
            return default
        if type(value) is not int or value < low:
            raise self.error(names[0], f"must be an integer >= {low}, got {value!r}")
        return value

    def optional_integer(self, *names: str, low: int = 0) -> int | None:
        return None if self.get(*names) is None else self.integer(*names, low=low)

    def number(self, *names: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number > `above`; required unless there is a default."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise self.error(names[0], "is missing")
            return default
        if type(value) not in (int, float) or not above < value < float("inf"):
            raise self.error(names[0], f"must be a finite number > {above:g}, got {value!r}")
        return float(value)

    def optional_number(self, *names: str, above: float = 0.0) -> float | None:
        return None if self.get(*names) is None else self.number(*names, above=above)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(names[0], "is missing" if value is None else f"must be true or false, got {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of strings, got {_short(value)}")
        return tuple(value)
