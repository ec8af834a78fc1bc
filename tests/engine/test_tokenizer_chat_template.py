"""Conversations as text: what transformers renders, in a sandbox, with errors that say whose fault it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_tokenizers
from small_tokenizers import save_folder

from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ModelError, RequestError

TEMPLATE = """
{{- bos_token }}
{%- if tools is not none %}[TOOLS]{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{ message.content | trim }}{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
        {% endgeneration %}
    {%- else %}<{{ message.role }}>{{ message['content'] }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% if not enable_thinking is defined %} {{ eos_token }}{% endif %}{% endif %}
"""
MESSAGES = (
    {"role": "system", "content": "naïve <b> & 'c'\n"},
    {"role": "assistant", "content": " ok ", "reasoning": "why"},
    {"role": "user", "content": "価格?"},
    {"role": "stop", "content": ""},
    {"role": "user", "content": "unseen"},
)


class TestAgainstTransformers:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": True, "enable_thinking": False},
            {"add_generation_prompt": True, "tools": [{"name": "f", "description": "é <x>"}]},
        ],
    )
    def test_same_rendered_conversation(self, tmp_path, kwargs):
        transformers = pytest.importorskip("transformers")
        special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        config = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "overridden"}
        folder = save_folder(tmp_path / "m", small_tokenizers.glm(), tokenizer_config=config, chat_template=TEMPLATE)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        want = theirs.apply_chat_template(list(MESSAGES), tokenize=False, **kwargs)
        ours = Tokenizer.from_folder(folder)
        assert ours.apply_chat_template(MESSAGES, **kwargs) == want
        assert "<assistant>" in want or not kwargs["add_generation_prompt"]


class TestChatTemplates:
    def folder(self, tmp_path: Path, **files) -> Tokenizer:
        return Tokenizer.from_folder(save_folder(tmp_path / "m", small_tokenizers.glm(), **files))

    def test_pfx_09_rendering_the_same_history_twice_is_byte_equal(self, tmp_path):
        tokenizer = self.folder(tmp_path, chat_template=TEMPLATE)
        once, twice = (tokenizer.apply_chat_template(MESSAGES) for _ in range(2))
        assert once == twice

    def test_none_is_an_error_when_asked_for_and_not_before(self, tmp_path):
        tokenizer = self.folder(tmp_path)
        assert not tokenizer.chat_templates
        assert tokenizer.encode("a").size
        with pytest.raises(ModelError, match=r"no default chat template; put one into chat_template.jinja"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize(
        ("template", "rendered"),
        [
            (
                "{% for k, v in call.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}{% endfor %}",
                "<x>1<y>é",
            ),
            ("{{ '[' + call.arguments + ']' }}", '[{"x": 1,"y":"é"}]'),
            ("{{ call.arguments }}", '{"x": 1,"y":"é"}'),
            ("{{ call.arguments if call.arguments is string else call.arguments | tojson }}", '{"x": 1, "y": "é"}'),
        ],
    )
    def test_arguments_of_calls_are_an_object_or_text_as_the_template_wants(self, tmp_path, template, rendered):
        """Clients send JSON text, as the API has it; GLM's templates want an object, DeepSeek's append text."""
        tokenizer = self.folder(
            tmp_path, chat_template="{% set call = messages[0].tool_calls[0].function %}" + template
        )
        calls = [{"function": {"name": "f", "arguments": '{"x": 1,"y":"é"}'}}]
        assert tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": calls}]) == rendered

    @pytest.mark.parametrize("arguments", [{"x": [1]}, '{"x": [1]}'])
    def test_arguments_may_come_as_an_object_too(self, tmp_path, arguments):
        template = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a.x[0] }}{{ '' + a }}"
        tokenizer = self.folder(tmp_path, chat_template=template)
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        assert tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": calls}]) == '1{"x": [1]}'

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [([], "must be an object"), ([1], "must be an object"), ("{x", "are not JSON"), ("[1]", "must be an object")],
    )
    def test_arguments_that_are_none_are_the_requests_error(self, tmp_path, arguments, error):
        tokenizer = self.folder(tmp_path, chat_template="x")
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        with pytest.raises(RequestError, match=rf"messages\[1\]: the arguments of a tool call {error}"):
            tokenizer.apply_chat_template([{"role": "user"}, {"role": "assistant", "tool_calls": calls}])

    def test_named_templates_and_the_one_for_tools(self, tmp_path):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        tokenizer = self.folder(tmp_path, tokenizer_config={"chat_template": named})
        assert tokenizer.apply_chat_template([]) == "plain"
        assert tokenizer.apply_chat_template([], tools=[]) == "plain"
        assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "tools"

    def test_a_template_that_refuses_says_why(self, tmp_path):
        tokenizer = self.folder(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
            tokenizer.apply_chat_template([])

    def test_messages_that_do_not_fit_are_the_request_s_fault(self, tmp_path):
        tokenizer = self.folder(tmp_path, chat_template="{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")
        with pytest.raises(RequestError, match="refuses these messages"):
            tokenizer.apply_chat_template([{"role": "user", "content": None}])
        with pytest.raises(RequestError, match="must be an object"):
            tokenizer.apply_chat_template(["hello"])

    def test_a_broken_template_names_its_line(self, tmp_path):
        tokenizer = self.folder(tmp_path, chat_template="a\n{% if %}")
        with pytest.raises(ModelError, match="'default', line 2"):
            tokenizer.apply_chat_template([])

    @pytest.mark.parametrize(
        "attack",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__['x'] }}",
            "{{ messages.append(1) }}",
            "{% set _ = messages[0].update(role='x') %}",
        ],
    )
    def test_a_template_cannot_leave_its_sandbox(self, tmp_path, attack):
        tokenizer = self.folder(tmp_path, chat_template=attack)
        messages = [{"role": "user", "content": "x"}]
        with pytest.raises(RequestError, match=r"unsafe|not safely callable|undefined"):
            tokenizer.apply_chat_template(messages)
        assert messages == [{"role": "user", "content": "x"}]
