"""A body's sampling fields: what the client gave reaches the engine unchanged, and defaults are the model's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longfill.errors import ModelError
from longfill.request import RequestOutputKind, SamplingParams
from longfill.server.errors import ApiError
from longfill.server.protocol import validate
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_completion import CompletionRequest
from longfill.server.sampling import SamplingLimits, generation_defaults, sampling_params, with_room

LIMITS = SamplingLimits(vocab_size=1000, max_logprobs=20, has_priorities=False)
GIVEN = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.2,
    "seed": 3,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
    "skip_special_tokens": False,
    "prompt_logprobs": 3,
}


def _params(defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    body = validate(CompletionRequest, {"prompt": ["a"], **fields})
    return sampling_params(body, defaults or {}, LIMITS)


def _chat_params(**fields: Any) -> SamplingParams:
    body = validate(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], **fields})
    return sampling_params(body, {}, LIMITS)


def test_every_field_reaches_the_engine() -> None:
    params = _params(**GIVEN, logprobs=5, logit_bias={"12": -3})
    assert {name: getattr(params, name) for name in GIVEN} == GIVEN
    assert (params.logprobs, params.logit_bias) == (5, {12: -3})
    assert params.output_kind is RequestOutputKind.DELTA


def test_lengths_default_as_openais_endpoints_do() -> None:
    assert _params().max_tokens == 16
    assert _params(min_tokens=30).max_tokens == 30
    assert _chat_params().max_tokens is None
    assert _chat_params(max_completion_tokens=4).max_tokens == _params(max_completion_tokens=4).max_tokens == 4


def test_chat_logprobs_are_none_of_the_others_unless_asked_for() -> None:
    assert _chat_params().logprobs is None
    assert _chat_params(logprobs=True).logprobs == 0
    assert _chat_params(logprobs=True, top_logprobs=4).logprobs == 4


def test_an_echo_with_logprobs_scores_the_prompt_too() -> None:
    assert _params(echo=True, logprobs=2).prompt_logprobs == 2
    assert _params(echo=True, logprobs=2, prompt_logprobs=4).prompt_logprobs == 4
    assert _params(echo=True).prompt_logprobs is None
    assert _params(echo=True, max_tokens=0).max_tokens == 1


def test_defaults_come_from_the_models_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 5}))
    defaults = generation_defaults(tmp_path)
    params = _params(defaults, top_k=9)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 9)
    assert generation_defaults(tmp_path / "none") == {}


@pytest.mark.parametrize("text", ['{"temperature": -1}', '{"top_p": "a"}', "[", "[]"])
def test_a_wrong_generation_config_is_an_error_at_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60), st.booleans())
def test_a_length_fits_behind_the_prompt_or_is_refused(prompt: int, wanted: int, least: int, by_client: bool) -> None:
    limit = 40
    room, wanted = limit - prompt, max(wanted, least)
    params = SamplingParams(max_tokens=wanted, min_tokens=least)
    if room >= 1 and least <= room and (wanted <= room or not by_client):
        assert with_room(params, prompt, limit, given=by_client, param="prompt").max_tokens == min(wanted, room)
        return
    with pytest.raises(ApiError, match=rf"{limit}|{prompt}") as refused:
        with_room(params, prompt, limit, given=by_client, param="prompt")
    assert refused.value.code == "context_length_exceeded"
    assert {str(limit), str(prompt)} <= set(re.findall(r"\d+", refused.value.message))


def test_priority_without_a_priority_scheduler_is_refused() -> None:
    with pytest.raises(ApiError, match="--scheduling-policy priority"):
        _params(priority=1)
    _params(priority=0)
