"""docs/serving.md and docs/cli.md name what the server has: every flag, field, metric and error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import ROOT, Running

from longfill.cli.serve import serve
from longfill.config import flag_name
from longfill.server.args import ServerArgs
from longfill.server.cache_report import PrefixCacheReport
from longfill.server.parsers import REASONING_FORMATS, TOOL_FORMATS
from longfill.server.parsers.output import formats_for
from longfill.server.protocol import StreamOptions, StructuredOutputsBody
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_completion import CompletionRequest
from longfill.server.state import AppState

SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("## serve\n")[1].split("\n## ")[0]
SOURCES = Path(inspect.getfile(AppState)).parent


def row(name: str) -> str:
    """The flag's row in docs/cli.md."""
    annotation = inspect.get_annotations(serve, eval_str=True)[name]
    default = getattr(ServerArgs(), name)
    value = "" if default in (None, (), "") else f"`{default}`"
    return f"| `{flag_name(name)}` | {value} | {annotation.__metadata__[0].help} |"


FLAGS = [name for name in ServerArgs.__dataclass_fields__ if name != "max_body_bytes"]


@pytest.mark.parametrize("name", FLAGS)
def test_docs_have_the_row_of_every_server_flag(name: str) -> None:
    assert row(name) in CLI.splitlines()


def test_docs_have_no_row_of_a_server_flag_that_is_gone() -> None:
    assert len(re.findall(r"^\| `--", CLI, re.M)) == len(FLAGS)


def fields(*models: Any) -> set[str]:
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def test_every_field_of_a_body_is_in_the_docs() -> None:
    named = set(re.findall(r"`(\w+)(?:: true)?`", SERVING))
    assert fields(ChatCompletionRequest, CompletionRequest, StreamOptions, StructuredOutputsBody) <= named


def test_the_docs_metrics_are_those_of_the_server(needle_server: Running) -> None:
    section = SERVING.split("## Metrics")[1].split("\n## ")[0]
    _, vllm, ours = re.split(r"\| `(?:vllm|longfill):` \|.*\n", section)
    written = {f"vllm:{name}" for name in re.findall(r"`(\w+)`", first_column(vllm))}
    written |= {f"longfill:{name}" for name in re.findall(r"`(\w+)`", first_column(ours))}
    served = re.findall(r"^# TYPE (\S+) ", needle_server.http.get("/metrics").text, re.M)
    # `iteration_tokens_total` is a histogram under vLLM's own name.
    assert written == {re.sub("(?<!iteration_tokens)_total$", "", name) for name in served}


def first_column(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))


def test_every_code_of_an_error_is_in_the_docs() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES.glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', text)) - {"client_closed_request"}  # which nobody is there to read
    assert codes <= set(re.findall(r"`(\w+)`", SERVING))


def test_every_reason_of_a_cache_miss_is_in_the_docs() -> None:
    text = inspect.getsource(inspect.getmodule(PrefixCacheReport))  # type: ignore[arg-type]
    reasons = set(re.findall(r'return "(\w+)", ', text))
    assert len(reasons) == 7
    assert reasons <= set(re.findall(r"`(\w+)`", SERVING.split("## Why did my cache miss")[1].split("\n## ")[0]))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "glm4_moe_lite", "deepseek_v32", "deepseek_v3", "deepseek_v2"])
def test_the_docs_name_the_formats_of_each_architecture(kind: str) -> None:
    table = SERVING.split("## Tools and reasoning")[1].split("\n## ")[0]
    (line,) = [line for line in table.splitlines() if line.startswith("| `") and f"`{kind}`" in line.split("|")[1]]
    for known, name in zip((TOOL_FORMATS, REASONING_FORMATS), formats_for(kind), strict=True):
        assert name is None or (name in known and f"`{name}`" in line)
    assert ("none" in line) == (formats_for(kind) == (None, None))
