"""docs/cli.md lists every engine flag with its default, its choices and its help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from longfill.config import EngineArgs, choices_of, flag_name

DOCS = Path(__file__).parents[2] / "docs"


def row(knob: dataclasses.Field[Any]) -> str:
    flag, default = flag_name(knob.name), knob.default
    if isinstance(default, bool):
        names, value = f"`{flag}` / `--no-{flag[2:]}`", "on" if default else "off"
    else:
        names, value = f"`{flag}`", "" if default is None else f"`{default}`"
    others = [f"`{choice}`" for choice in choices_of(knob.name) if choice != default]
    if others:
        value += "; or " + ", ".join(others)
    return f"| {names} | {value} | {knob.metadata['help']} |"


@pytest.mark.parametrize("knob", dataclasses.fields(EngineArgs), ids=lambda knob: knob.name)
def test_docs_have_the_row_of_every_engine_flag(knob):
    assert row(knob) in (DOCS / "cli.md").read_text(encoding="utf-8").splitlines()


def test_docs_have_no_row_of_a_flag_that_is_gone():
    table = (DOCS / "cli.md").read_text(encoding="utf-8").split("## Engine flags")[1]
    assert sum(line.startswith("| `--") for line in table.splitlines()) == len(dataclasses.fields(EngineArgs))


def test_every_page_is_in_the_index_and_every_link_leads_somewhere():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        text = page.read_text(encoding="utf-8")
        for target in [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]:
            assert not target or target.startswith("https://") or (page.parent / target).exists(), (page, target)
