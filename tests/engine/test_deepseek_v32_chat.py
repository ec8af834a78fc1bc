"""API-17: DeepSeek-V3.2 ships no template; its conversations are rendered as its authors' own encoder renders them.

The format and the golden text are those of the folder `encoding` at huggingface.co/deepseek-ai/DeepSeek-V3.2
(encoding_dsv32.py, test_input.json, test_output.txt).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import save_folder

from longfill.engine.chat_template import BUILT_IN, ChatTemplates
from longfill.engine.deepseek_v32_chat import render
from longfill.engine.tokenizer import Tokenizer
from longfill.errors import ModelError, RequestError

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
GOLDEN_TOOLS_TEXT = "963a72ee9be43f07d21bec2348ed2d7e45185e4b502f2a4da35a540299dc2b03"
"""SHA-256 of what the golden text has from "## Tools" to the first schema."""


def call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def result(text: str, id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": id} if id else {})}


def block(*invokes: str) -> str:
    return "\n\n<｜DSML｜function_calls>\n" + "\n".join(invokes) + "\n</｜DSML｜function_calls>"


CITY = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">{days}</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
TWO_CALLS = calling(
    call("weather", '{"city": "Rome \\"R\\"", "days": 2}', "a"), call("weather", {"city": "5", "days": [1, None]}, "b")
)
TWO_INVOKES = block(CITY.format(city='Rome "R"', days="2"), CITY.format(city="5", days="[1, null]"))


def prompt(*messages: dict[str, Any], **variables: Any) -> str:
    return render(messages, add_generation_prompt=True, **variables)


class TestFormat:
    def test_a_question_without_and_with_thinking(self):
        messages = ({"role": "system", "content": "Be brief."}, user("Why?"))
        assert prompt(*messages) == f"{BOS}Be brief.{USER}Why?{ASSISTANT}</think>"
        for name in ("thinking", "enable_thinking"):
            assert prompt(*messages, **{name: True}) == f"{BOS}Be brief.{USER}Why?{ASSISTANT}<think>"
            assert prompt(*messages, **{name: False}) == prompt(*messages)

    def test_without_a_generation_prompt_the_assistants_part_is_missing(self):
        assert render([user("Why?")], add_generation_prompt=False) == f"{BOS}{USER}Why?"
        history = [user("q"), TWO_CALLS, result("x", "a"), result("y", "b")]
        assert prompt(*history) == render(history, add_generation_prompt=False) + "\n\n</think>"

    def test_the_tools_text_is_word_for_word_the_published_one(self):
        text = prompt({"role": "system", "content": "Hi."}, user("q"), tools=[WEATHER, CLOCK])
        before, schemas, after = text.partition(
            '{"name": "weather", "description": "é", "parameters": {"type": "object"}}'
        )
        assert hashlib.sha256(before.removeprefix(f"{BOS}Hi.\n\n").encode()).hexdigest() == GOLDEN_TOOLS_TEXT
        assert schemas
        assert after == f'\n{{"name": "clock"}}\n</functions>\n{USER}q{ASSISTANT}</think>'

    def test_tools_and_schema_stand_alone_without_a_system_message(self):
        text = prompt(user("q"), tools=[CLOCK], response_format={"type": "object"})
        assert text.startswith(f"{BOS}\n\n## Tools\n\n")
        wanted = (
            "\n</functions>\n\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        )
        assert text.endswith(wanted + f'{{"type": "object"}}{USER}q{ASSISTANT}</think>')

    def test_calls_and_results(self):
        text = prompt(user("q"), {**TWO_CALLS, "content": "Look."}, result("x", "a"), result("y", "b"))
        results = "\n\n<function_results>\n<result>x</result>\n<result>y</result>\n</function_results>"
        assert text == f"{BOS}{USER}q{ASSISTANT}</think>Look.{TWO_INVOKES}{EOS}{results}\n\n</think>"

    def test_results_stand_in_the_order_of_the_calls(self):
        turned = prompt(user("q"), TWO_CALLS, result("y", "b"), result("x", "a"))
        assert turned == prompt(user("q"), TWO_CALLS, result("x", "a"), result("y", "b"))
        assert turned == prompt(user("q"), TWO_CALLS, result("x"), result("y"))

    def test_a_call_without_arguments(self):
        for arguments in ("", "{}", {}, None):
            text = render([user("q"), calling(call("clock", arguments))], add_generation_prompt=False)
            assert text.endswith('<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>' + EOS)

    def test_reasoning_since_the_last_user_message_is_kept_and_earlier_is_dropped(self):
        history = [
            user("q1"),
            {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
            user("q2"),
            calling(call("clock", "{}", "a"), reasoning_content="r2"),
            result("x", "a"),
        ]
        clock = block('<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>')
        assert prompt(*history, thinking=True) == (
            f"{BOS}{USER}q1{ASSISTANT}</think>a1{EOS}{USER}q2{ASSISTANT}<think>r2</think>{clock}{EOS}"
            "\n\n<function_results>\n<result>x</result>\n</function_results>\n\n<think>"
        )

    def test_the_developer_asks_with_tools_of_its_own(self):
        developer = {"role": "developer", "content": "Find it.", "tools": [CLOCK]}
        text = prompt(developer, thinking=True)
        assert text.startswith(f"{BOS}{USER}\n\n## Tools\n\n")
        assert text.endswith(f"</functions>\n\n\n# The user's message is: Find it.{ASSISTANT}<think>")
        assert "Find it." not in prompt(developer, user("q"), thinking=True)
        assert "Find it." in prompt(developer, user("q"), thinking=True, drop_thinking=False)
        assert "Find it." in prompt(developer, user("q"))

    def test_content_in_parts(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert prompt({"role": "user", "content": parts}) == f"{BOS}{USER}a\nb{ASSISTANT}</think>"


class TestErrors:
    @pytest.mark.parametrize(
        ("messages", "variables", "error"),
        [
            ([], {}, "messages: there must be at least one"),
            ([user("q"), {"role": "wizard", "content": "x"}], {}, r"messages\[1\]: role 'wizard'"),
            ([{"role": "user", "content": None}], {}, r"messages\[0\]: content must be text"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"messages\[0\]: content must be text"),
            ([user("q"), result("x")], {}, r"messages\[1\]: the result of a tool, but no message"),
            ([user("q"), TWO_CALLS, result("x", "a")], {}, r"messages\[2\]: 1 results of tools follow 2 tool_calls"),
            ([user("q"), TWO_CALLS, result("x", "a"), result("y", "c")], {}, r"messages\[3\]: the tool_call_ids"),
            ([user("q"), TWO_CALLS, result("x", "a"), result("y", "a")], {}, r"messages\[3\]: the tool_call_ids"),
            ([user("q"), {"role": "assistant", "content": "x"}, result("y")], {}, r"messages\[2\]: 1 results"),
            ([user("q"), calling(call("f", "{a"))], {}, r"messages\[1\]: arguments of f are not JSON"),
            ([user("q"), calling(call("f", "[1]"))], {}, r"messages\[1\]: arguments of f must be an object"),
            ([user("q"), calling({"name": "f"})], {}, r"messages\[1\]: tool_calls must be objects with a function"),
            ([user("q"), {"role": "assistant", "tool_calls": 1}], {}, r"messages\[1\]: tool_calls must be a list"),
            ([user("q")], {"tools": [{"name": "f"}]}, r"messages\[0\]: tools must be objects with a function"),
            ([{"role": "developer", "content": ""}], {}, r"messages\[0\]: the developer's content is empty"),
            ([{"role": "system", "content": "x"}], {}, r"messages\[0\]: the last message must be"),
            ([user("q"), {"role": "assistant", "content": "x"}], {}, r"messages\[1\]: the last message must be"),
            (
                [user("q"), {"role": "assistant", "content": "x"}],
                {"thinking": True},
                r"messages\[1\]: .* reasoning_content",
            ),
            ([user("q")], {"thinking": {"type": "disabled"}}, "thinking: expected true or false"),
            (
                [user("q")],
                {"reasoning_effort": "high"},
                "reasoning_effort: the chat format of DeepSeek-V3.2 has no such",
            ),
        ],
    )
    def test_each_names_the_message_that_it_is_about(self, messages, variables, error):
        with pytest.raises(RequestError, match=error):
            prompt(*messages, **variables)

    def test_variables_that_are_none_are_as_if_not_given(self):
        assert prompt(user("q"), documents=None, tools=None) == prompt(user("q"))


TEXTS = st.text(max_size=5)
ROUNDS = st.lists(
    st.one_of(
        st.tuples(TEXTS, TEXTS).map(lambda t: [user(t[0]), {"role": "assistant", "content": t[1], "reasoning": "r"}]),
        st.tuples(TEXTS, TEXTS, TEXTS).map(
            lambda t: [
                user(t[0]),
                calling(call("f", json.dumps({"x": t[1]}), "a"), reasoning="r"),
                result(t[2], "a"),
                {"role": "assistant", "content": t[1], "reasoning": "s"},
            ]
        ),
    ),
    min_size=1,
    max_size=3,
)


class TestPrefixes:
    @given(ROUNDS, st.booleans())
    def test_pfx_09_a_history_begins_with_every_shorter_one_and_twice_is_the_same(self, rounds, thinking):
        """When thinking, within a turn: a new user message takes the earlier reasoning out."""
        history = [message for each in rounds for message in each]
        last_asked = max(at for at, message in enumerate(history) if message["role"] == "user")
        whole = render_folder(history, thinking=thinking)
        assert whole == render_folder(history, thinking=thinking)
        for end in range(last_asked + 1 if thinking else 1, len(history)):
            answering = history[end]["role"] == "assistant"
            assert whole.startswith(render_folder(history[:end], answering, thinking=thinking))


def render_folder(history: list[dict[str, Any]], add_generation_prompt: bool = False, **variables: Any) -> str:
    """As a request goes: reasoning under the name that the client chose."""
    templates = ChatTemplates({}, {}, "a folder", BUILT_IN["deepseek_v32"])
    return templates.render(history, add_generation_prompt=add_generation_prompt, **variables)


class TestChoice:
    def folder(self, tmp_path: Path, model_type: str, **files: Any) -> Tokenizer:
        folder = save_folder(tmp_path / "m", small_tokenizers.deepseek(), **files)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return Tokenizer.from_folder(folder)

    def test_api_17_a_folder_without_template_has_the_models_own_format(self, tmp_path):
        tokenizer = self.folder(tmp_path, "deepseek_v32")
        assert tokenizer.chat_templates
        assert tokenizer.apply_chat_template([user("q")], thinking=True) == f"{BOS}{USER}q{ASSISTANT}<think>"

    def test_its_variables_are_known_as_a_templates_are(self, tmp_path):
        templates = self.folder(tmp_path, "deepseek_v32").chat_templates
        assert all(templates.takes(name) for name in ("tools", "thinking", "enable_thinking"))
        assert not any(templates.takes(name) for name in ("reasoning_effort", "unknown", "messages"))

    def test_a_template_in_the_folder_goes_first(self, tmp_path):
        assert self.folder(tmp_path, "deepseek_v32", chat_template="own").apply_chat_template([user("q")]) == "own"

    def test_api_17_without_either_it_is_false_and_an_error_that_says_what_to_do(self, tmp_path):
        tokenizer = self.folder(tmp_path, "glm_moe_dsa")
        assert not tokenizer.chat_templates
        with pytest.raises(ModelError, match=r"no default chat template; put one into chat_template.jinja"):
            tokenizer.apply_chat_template([user("q")])
