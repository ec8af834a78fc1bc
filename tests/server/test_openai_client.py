"""The official client against a running server: each answer checked for its content."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from tests.server.running import Running

from longfill import LLM, SamplingParams
from longfill.engine.tokenizer import Tokenizer

TEXT = "The access code of amber Kestrel is 48213. It ends. Next line (here)."


@pytest.fixture(scope="module")
def offline(random_model: Path) -> LLM:
    """The same model without a server: what it should say."""
    return LLM(random_model, max_model_len=2048, num_gpu_blocks_override=400)


def test_a_completion_is_what_the_engine_says_offline(tiny_server: Running, offline: LLM) -> None:
    want = offline.generate(TEXT, SamplingParams(temperature=0, max_tokens=12))[0]
    got = tiny_server.client().completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=12)
    assert got.choices[0].text == want.outputs[0].text
    assert got.choices[0].finish_reason == want.outputs[0].finish_reason
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_prompts_come_as_text_texts_ids_and_lists_of_ids(tiny_server: Running, random_model: Path) -> None:
    client, tokenizer = tiny_server.client(), Tokenizer.from_folder(random_model)
    ids = tokenizer.encode(TEXT).tolist()
    alone = client.completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=5).choices[0].text
    for prompt in (ids, [ids], [TEXT], [TEXT, "other words"], [ids, ids[:3]]):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=5)
        assert answer.choices[0].text == alone
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(tiny_server: Running) -> None:
    answer = tiny_server.client().completions.create(
        model="tiny", prompt=["one", "two"], n=2, seed=3, echo=True, max_tokens=2
    )
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_stream_joined_is_the_whole_answer(tiny_server: Running) -> None:
    client = tiny_server.client()
    options = {"model": "tiny", "prompt": TEXT, "seed": 5, "n": 3, "max_tokens": 20, "logprobs": 2}
    whole = client.completions.create(**options)
    texts, tokens, reasons = ["", "", ""], [0, 0, 0], [None, None, None]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [len(choice.logprobs.tokens) for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_chat_is_the_templates_text_completed(tiny_server: Running, offline: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    assert offline.tokenizer is not None
    prompt = offline.tokenizer.encode(offline.tokenizer.apply_chat_template(messages), add_special_tokens=False)
    want = offline.generate(prompt, SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].text
    client = tiny_server.client()
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 9}
    options["extra_body"] = {"chat_template_kwargs": {}}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == want
    assert answer.choices[0].message.role == "assistant"
    streamed = list(client.chat.completions.create(**options, stream=True))
    assert streamed[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == want
    assert streamed[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_the_async_client_streams_many_at_once(tiny_server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model="tiny", prompt=TEXT, seed=seed, max_tokens=10, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def many() -> list[str]:
        async with tiny_server.async_client() as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(12)))

    texts = asyncio.run(many())
    client = tiny_server.client()
    for seed in (0, 7):
        alone = client.completions.create(model="tiny", prompt=TEXT, seed=seed, max_tokens=10)
        assert texts[seed] == alone.choices[0].text


def test_content_parts_are_joined_by_newlines(tiny_server: Running) -> None:
    client = tiny_server.client()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    counts = [
        client.post("/../tokenize", body={"messages": [{"role": "user", "content": content}]}, cast_to=object)
        for content in (parts, "one\ntwo")
    ]
    assert counts[0] == counts[1]


def test_continue_final_message_goes_on_with_the_assistants_words(tiny_server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The code is"}]
    answer = tiny_server.post("/tokenize", messages=messages, continue_final_message=True).json()
    text = tiny_server.post("/detokenize", tokens=answer["tokens"]).json()["prompt"]
    assert text == "<|user|>hi<|assistant|>The code is"


def test_stop_strings_end_the_text_and_are_named(tiny_server: Running) -> None:
    client = tiny_server.client()
    whole = client.completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=30).choices[0].text
    stop = whole[8:11]
    answer = client.completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=30, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


def test_json_schema_forms_the_answer(tiny_server: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = tiny_server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "someone"}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        seed=1,
        max_tokens=200,
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"regex": "[ab]{3}c"}, lambda text: len(text) == 4 and text[3] == "c" and set(text[:3]) <= {"a", "b"}),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "x" "y"+ "z"'}, lambda text: text[0] == "x" and text[-1] == "z"),
    ],
)
def test_structured_outputs_form_a_completion(tiny_server: Running, form: dict, fits: object) -> None:
    answer = tiny_server.client().completions.create(
        model="tiny", prompt=TEXT, seed=2, max_tokens=100, extra_body={"structured_outputs": form}
    )
    assert callable(fits)
    assert fits(answer.choices[0].text), answer.choices[0].text


def test_chat_logprobs_carry_the_bytes_of_the_text(tiny_server: Running) -> None:
    answer = tiny_server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": TEXT}],
        seed=4,
        max_tokens=40,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 40
    spelled = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    reasoning = getattr(choice.message, "reasoning_content", "") or ""
    assert spelled.decode("utf-8", "replace") == reasoning + (choice.message.content or "")
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= token.top_logprobs[0].logprob <= 0


def test_completion_logprobs_tell_where_each_token_begins(tiny_server: Running) -> None:
    answer = tiny_server.client().completions.create(
        model="tiny", prompt=TEXT, temperature=0, max_tokens=8, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(TEXT)
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token


def test_a_prompt_is_scored_without_a_completion(tiny_server: Running, offline: LLM) -> None:
    answer = tiny_server.client().completions.create(model="tiny", prompt=TEXT, max_tokens=0, logprobs=0, echo=True)
    want = offline.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert want is not None
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs is not None
    got = answer.choices[0].logprobs.token_logprobs
    assert got is not None
    assert got[1:] == [next(iter(entry.values())).logprob for entry in want[1:] if entry is not None]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_and_token_ids_come_on_request(tiny_server: Running) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
    choice = tiny_server.post("/v1/completions", **body).json()["choices"][0]
    assert len(choice["prompt_token_ids"]) == len(choice["prompt_logprobs"])
    assert len(choice["token_ids"]) == 3
    assert choice["prompt_logprobs"][0] is None
    for token, entry in list(zip(choice["prompt_token_ids"], choice["prompt_logprobs"], strict=True))[1:]:
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}


def test_cached_tokens_are_told_and_a_salt_keeps_prompts_apart(tiny_server: Running) -> None:
    prompt = list(range(10, 210))

    def cached(salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        details = tiny_server.post("/v1/completions", **body).json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b")] == [0, 192, 0]


def test_models_show_the_real_limit(tiny_server: Running) -> None:
    (model,) = tiny_server.client().models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 2048)
    assert tiny_server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        tiny_server.client().models.retrieve("gpt-4")


def test_tokenize_and_detokenize_are_inverse(tiny_server: Running, random_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(random_model)
    answer = tiny_server.post("/tokenize", prompt=TEXT, return_token_strs=True).json()
    assert answer["tokens"] == tokenizer.encode(TEXT).tolist()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
    assert "".join(answer["token_strs"]) == TEXT
    assert tiny_server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": TEXT}


def test_a_request_id_is_honoured(tiny_server: Running) -> None:
    answer = tiny_server.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine-1"}
    )
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    answer = tiny_server.post("/v1/completions", prompt="a", max_tokens=1, request_id="mine-2")
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-2", "cmpl-mine-2")


def test_kv_transfer_params_come_back(tiny_server: Running) -> None:
    params = {"do_remote_decode": False, "remote_block_ids": [1, 2]}
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": params}
    assert tiny_server.post("/v1/completions", **body).json()["kv_transfer_params"] == params
    last = tiny_server.events("/v1/completions", **body)[-1]
    assert last["kv_transfer_params"] == params
    assert "usage" not in last
