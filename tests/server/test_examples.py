"""The scripts in examples/ that talk to a server, run as they stand against a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.running import ROOT, Running, running


def run(script: str, *arguments: str, timeout: float = 60) -> str:
    """Run an example to its end; returns what it printed."""
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_long_prompt_is_answered_and_its_progress_shown(needle_server: Running) -> None:
    lines = run("chat_long_prompt.py", needle_server.url, "12288").splitlines()
    assert lines[0].startswith("headers after ")
    assert lines[1].endswith("of 12,288 tokens") or " of 12,288 tokens, " in lines[1]
    assert lines[-3].startswith("12,288 of 12,288 tokens")
    assert lines[-2].startswith("12,288 prompt tokens, 0 of them cached")


def test_the_tool_is_called_and_its_result_read(needle_server: Running) -> None:
    call, result, answer = run("tools.py", needle_server.url).splitlines()
    assert call.startswith("call:   read_card({'card': ")
    assert answer.removeprefix("answer: ") in result


def test_the_answers_have_their_forms(needle_server: Running) -> None:
    choice, regex, schema = (
        line.partition(":")[2].strip() for line in run("structured_output.py", needle_server.url).splitlines()
    )
    assert (choice, regex) == ("48213", "48213")
    assert schema.startswith("{'code': '")


@pytest.mark.slow
def test_131072_tokens_are_answered_through_the_official_client(tmp_path: Path) -> None:
    with running("needle", "--max-model-len", "132000", log=tmp_path / "log") as server:
        output = run("chat_long_prompt.py", server.url, timeout=600)
    assert "131,072 prompt tokens, 0 of them cached" in output
