"""Every engine knob is a flag of every command, and reaches the engine as given."""

from __future__ import annotations

import dataclasses
import json

import pytest

from longfill.config import EngineArgs, choices_of, flag_name

COMMANDS = (["demo"], ["run"], ["eval", "needle"], ["check"], ["bench", "prefill"])
NAMES = [" ".join(command) for command in COMMANDS]
MTP = {"method": "mtp", "num_speculative_tokens": 3}
NEEDED: dict[str, dict[str, object]] = {
    "all2all_backend": {"enable_expert_parallel": True},
    "pcp_split": {"prefill_context_parallel_size": 2},
    "decode_context_parallel_size": {"tensor_parallel_size": 17},
    "dcp_comm_backend": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "cp_kv_cache_interleave_size": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
"""Other knobs without which a knob means nothing."""
KNOBS = [knob.name for knob in dataclasses.fields(EngineArgs)]


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_every_knob_is_a_flag_with_its_help(longfill, command):
    ran = longfill(*command, "--help")
    assert ran.code == 0
    words = " ".join(ran.out.split())
    for knob in dataclasses.fields(EngineArgs):
        assert f" {flag_name(knob.name)} " in words
        if knob.name != "seed":  # each command says what its seed is for
            assert " ".join(knob.metadata["help"].split()) in words
        for choice in choices_of(knob.name):
            assert choice in words
        if isinstance(knob.default, bool):
            assert f" --no-{flag_name(knob.name)[2:]} " in words


def other_value(knob: str) -> tuple[list[str], object]:
    """A command line that sets the knob to something else than its default, and that value."""
    default = next(f.default for f in dataclasses.fields(EngineArgs) if f.name == knob)
    flag = flag_name(knob)
    if isinstance(default, bool):
        return [f"--no-{flag[2:]}" if default else flag], not default
    if choices_of(knob):
        other = next(choice for choice in reversed(choices_of(knob)) if choice != default)
        return [flag, other], other
    special = {
        "hf_overrides": ('{"index_topk": 8}', {"index_topk": 8}),
        "memory_budget": ("3GiB", "3GiB"),
        "speculative_config": (json.dumps(MTP), MTP),
        "watermark": ("0.25", 0.25),
        "decode_share": ("0.25", 0.25),
        "max_concurrent_batches": ("3", 3),
        "cp_kv_cache_interleave_size": ("16", 16),
    }
    if knob in special:
        text, value = special[knob]
        return [flag, text], value
    if knob in ("model", "tokenizer", "revision"):
        return [flag, "some/name"], "some/name"
    return [flag, "17"], 17


@pytest.mark.parametrize("knob", KNOBS)
def test_a_flag_reaches_the_engine(longfill, engines, knob):
    args, value = other_value(knob)
    needed = NEEDED.get(knob, {})
    for other, setting in needed.items():
        args += [flag_name(other)] if setting is True else [flag_name(other), str(setting)]
    longfill("run", "--prompt", "x", *args)
    # Without a tokenizer the command refuses text, but only after the engine was made as told.
    assert getattr(engines.last.args, knob) == value
    assert engines.last.args == EngineArgs(**needed, **{knob: value})


def test_no_flags_give_the_defaults(longfill, engines):
    assert longfill("run", "--prompt", "x").code == 0
    assert engines.last.args == EngineArgs()


@pytest.mark.parametrize("args", [["m"], ["--model", "m"], ["m", "--model", "m"]], ids=" ".join)
def test_the_model_may_stand_alone_or_behind_its_flag(longfill, engines, args):
    assert longfill("run", *args, "--prompt", "x").code == 0
    assert engines.last.args.model == "m"


def test_without_arguments_help_is_shown(longfill):
    ran = longfill()
    assert ran.code == 0
    for command in ("demo", "run", "eval", "check", "version"):
        assert command in ran.out


def test_version_names_what_computes(longfill):
    ran = longfill("version", "--json")
    assert ran.code == 0
    assert {"longfill", "torch", "python"} <= json.loads(ran.out).keys()
    assert "torch" in longfill("version").out
