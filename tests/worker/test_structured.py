"""Structured outputs hold an output to its form, whatever is drawn, taken back and drawn again."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.small_tokenizers import gpt2

from longfill.engine.token_bytes import structured_outputs, token_bytes
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import RequestError
from longfill.models.hub import resolve_model
from longfill.request import StructuredOutputsParams
from longfill.worker.structured import StructuredOutputs

EOS = 1
TOKENIZER = Tokenizer(gpt2())
VOCAB = TOKENIZER.vocab_size + 40
FORMS = structured_outputs(TOKENIZER, [EOS, VOCAB + 5], VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def is_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "ages"} and len(value["name"]) <= 6 and all(type(n) is int for n in value["ages"])


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"regex": r"[0-9]{5}( and [a-z]{1,3})?"}, lambda text: re.fullmatch(r"[0-9]{5}( and [a-z]{1,3})?", text)),
    ({"choice": ("yes", 'no "or"\nso', "naïve")}, lambda text: text in ("yes", 'no "or"\nso', "naïve")),
    ({"json": json.dumps(SCHEMA)}, is_schema),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"grammar": 'start: "a" inner* "z"\ninner: "b" | "c"'}, lambda text: re.fullmatch("a[bc]*z", text)),
]


def draw(params: StructuredOutputsParams, rng: np.random.Generator, most: int = 400) -> tuple[list[int], str]:
    """An output of random allowed tokens (short ones preferred to an endless one); its ids and its text."""
    form, ids = FORMS.begin(params), []
    while len(ids) < most:
        allowed = form.allowed()
        assert not isinstance(allowed, str), allowed
        choices = np.flatnonzero(allowed)
        assert choices.size
        ids.append(EOS if allowed[EOS] else int(rng.choice(choices)))
        form.append(ids[-1])
        if ids[-1] == EOS:
            break
    return ids, TOKENIZER.decode(ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize(("fields", "holds"), CASES)
def test_any_allowed_output_that_ends_has_its_form(fields: dict[str, Any], holds: Any) -> None:
    ended = 0
    for seed in range(20):
        ids, text = draw(StructuredOutputsParams(**fields), np.random.default_rng(seed))
        if ids[-1] == EOS:
            ended += 1
            assert holds(text), text
    assert ended >= 5


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 60), max_size=6), case=st.sampled_from(CASES))
def test_what_is_allowed_depends_on_the_outputs_alone(seed: int, cuts: list[int], case: Any) -> None:
    """Taken back and drawn again, drawn beyond the end, or begun with outputs: the same."""
    params = StructuredOutputsParams(**case[0])
    ids, _ = draw(params, np.random.default_rng(seed), most=60)
    form = FORMS.begin(params)
    for token in ids:
        form.append(token)
    if ids[-1] == EOS:
        form.append(7)
    for cut in [min(cut, len(ids)) for cut in cuts]:
        form.truncate(cut)
        begun = FORMS.begin(params, ids[:cut])
        np.testing.assert_array_equal(form.allowed(), begun.allowed())
        for token in ids[cut:]:
            form.append(token)


def test_behind_the_end_of_a_form_only_eos_is_allowed() -> None:
    form = FORMS.begin(StructuredOutputsParams(choice=("yes",)))
    for token in TOKENIZER.encode("yes", add_special_tokens=False).tolist():
        form.append(token)
    allowed = form.allowed()
    assert not isinstance(allowed, str)
    assert np.flatnonzero(allowed).tolist() == [EOS]
    form.append(EOS)
    again = form.allowed()
    assert not isinstance(again, str)
    assert np.flatnonzero(again).tolist() == [EOS]
    with pytest.raises(ValueError, match="sees 99 outputs"):
        form.truncate(99)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "json"),
        ({"json": '{"type": "no such type"}'}, "type"),
        ({"json": '{"type": "string", "format": "nonsense"}'}, "nonsense"),
        ({"regex": "("}, "structured_outputs"),
        ({"grammar": "start: missing"}, "missing"),
        ({"regex": "a" * 140_000}, "characters"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"json": '{"$ref": "#"}'}, "structured_outputs"),
        ({"choice": tuple(f"c{i}" for i in range(2001))}, "at most 2,000"),
        ({"json": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(4500)}})}, "too big"),
    ],
)
def test_a_form_that_cannot_be_honoured_is_refused_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        FORMS.validate(StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    "fields", [{}, {"json": "{}", "regex": "a"}, {"choice": ()}, {"choice": ("a", "")}, {"json": 5}, {"choice": "ab"}]
)
def test_exactly_one_form_is_asked_for(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**fields)


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_or_a_model_without_eos_is_refused() -> None:
    for forms in (
        StructuredOutputs(lambda: None, encode=list, special_token_ids=(), eos_token_ids=(1,), vocab_size=9),
        StructuredOutputs(lambda: [b"a"] * 9, encode=list, special_token_ids=(), eos_token_ids=(9,), vocab_size=9),
    ):
        with pytest.raises(RequestError, match="structured_outputs"):
            forms.validate(StructuredOutputsParams(regex="a"))


def test_bytes_of_tokens_joined_are_the_decode() -> None:
    spelled = token_bytes(TOKENIZER)
    assert spelled is not None
    ids = TOKENIZER.encode("naïve café 価格は三千円です。🙂\r\n  <tool> x").tolist()
    joined = b"".join(spelled[token] for token in ids)
    assert joined.decode("utf-8", "replace") == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert "価格は三千円です。🙂" in joined.decode("utf-8", "replace")


def test_bytes_of_the_bundled_models_tokens_joined_are_the_decode() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("needle", None))
    spelled = token_bytes(tokenizer)
    assert spelled is not None
    ids = tokenizer.encode("The access code of amber is 48213. naïve 🙂").tolist()
    assert b"".join(spelled[token] for token in ids).decode() == tokenizer.decode(ids, skip_special_tokens=False)


def test_what_a_form_demands_is_spelled_in_its_own_bytes() -> None:
    """The bundled tokenizer puts a space behind each word; "code" then has to come letter by letter."""
    tokenizer = Tokenizer.from_folder(resolve_model("needle", None))
    spelled = token_bytes(tokenizer)
    assert spelled is not None
    eos = tokenizer.eos_token_ids
    schema = '{"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}'
    form = structured_outputs(tokenizer, eos, 640).begin(StructuredOutputsParams(json=schema))
    text = b""
    while text.count(b'"') < 2:
        allowed = form.allowed()
        assert not isinstance(allowed, str)
        token = next(index for index in np.flatnonzero(allowed) if spelled[index] and not spelled[index].isspace())
        form.append(int(token))
        text += spelled[token]
        assert len(text) < 20, text
    assert text == b'{"code"'
