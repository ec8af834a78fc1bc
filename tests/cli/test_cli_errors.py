"""A mistake is one line on stderr, nothing on stdout, exit code 2, and no model is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from longfill.errors import CapacityError, ConfigError, LongfillError, ModelError, RequestError

MISTAKES = [
    (["run", "--no-such-flag"], "--no-such-flag"),
    (["frobnicate"], "frobnicate"),
    (["eval"], "Missing command"),
    (["eval", "haystack"], "haystack"),
    (["run", "--prompt"], "--prompt"),
    (["run", "--prompt", "x", "--max-model-len", "many"], "--max-model-len"),
    (["run", "--prompt", "x", "--max-model-len", "0"], "--max-model-len"),
    (["run", "--prompt", "x", "--block-size", "4097"], "--block-size"),
    (["run", "--prompt", "x", "--dtype", "int4"], "--dtype"),
    (["run", "--prompt", "x", "--memory-budget", "2 parsecs"], "--memory-budget"),
    (["run", "--prompt", "x", "--hf-overrides", "{oops"], "--hf-overrides"),
    (["run", "--prompt", "x", "--hf-overrides", "[1]"], "--hf-overrides"),
    (["run", "--prompt", "x", "--temperature", "-1"], "temperature"),
    (["run", "--prompt", "x", "--temperature", "nan"], "temperature"),
    (["run", "--prompt", "x", "--top-p", "0"], "top_p"),
    (["run", "--prompt", "x", "--max-tokens", "0"], "max_tokens"),
    (["run", "--prompt", "x", "--stop", ""], "stop"),
    (["run", "--prompt", ""], "empty"),
    (["run", "--prompt", "x", "--prompt-file", "y"], "give one"),
    (["run", "--prompt-file", "no/such/file"], "no/such/file"),
    (["run", "--prompt-file", "."], "."),
    (["run", "a-model", "--model", "b-model", "--prompt", "x"], "twice"),
    (["run", "a-model", "b-model", "--prompt", "x"], "b-model"),
    (["demo", "--context", "0"], "--context"),
    (["demo", "--depth", "1.01"], "--depth"),
    (["demo", "--depth", "-0.01"], "--depth"),
    (["demo", "a-model"], "a-model"),
    (["eval", "needle", "--contexts", "4k"], "--contexts"),
    (["eval", "needle", "--contexts", ""], "--contexts"),
    (["eval", "needle", "--contexts", "64,0"], "--contexts"),
    (["eval", "needle", "--trials", "0"], "--trials"),
    (["check", "--seed", "-1"], "--seed"),
    (["check", "--json", "--dtype", "int4"], "--dtype"),
    (["demo", "--json", "--nope"], "--nope"),
]


@pytest.mark.parametrize(
    ("args", "named"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_code_2(longfill, engines, args, named):
    ran = longfill(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("longfill: error: ")
    assert named in ran.err
    assert engines.made == []


@pytest.mark.parametrize("kind", [ConfigError, ModelError, CapacityError, RequestError])
def test_what_the_engine_refuses_is_one_line_and_exit_code_2(longfill, engines, kind):
    def refuse(_prompt: object) -> str:
        raise kind("it does not fit;\n  the largest that fits is 12")

    engines.answer = refuse
    ran = longfill("run", "--prompt", "x", "--json")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.splitlines()[-1] == "longfill: error: it does not fit; the largest that fits is 12"
    assert issubclass(kind, LongfillError)


@pytest.mark.parametrize("command", [["run", "--prompt", "x"], ["demo", "--context", "1500"]], ids=" ".join)
def test_a_request_that_failed_in_the_engine_is_told_not_printed_as_an_answer(longfill, engines, command):
    engines.finish = "error"
    ran = longfill(*command, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "logits are not numbers" in ran.err.splitlines()[-1]


def test_a_fault_of_longfill_itself_keeps_its_traceback(longfill, engines):
    def fail(_prompt: object) -> str:
        raise RuntimeError("a bug")

    engines.answer = fail
    with pytest.raises(RuntimeError, match="a bug"):
        longfill("run", "--prompt", "x")


def test_interrupt_is_130_and_one_line(longfill, engines):
    def interrupt(_prompt: object) -> str:
        raise KeyboardInterrupt

    engines.answer = interrupt
    ran = longfill("run", "--prompt", "x", "--json")
    assert ran.code == 130
    assert ran.out == ""
    assert ran.err.splitlines()[-1] == "longfill: interrupted"
    assert "Traceback" not in ran.err


def test_ctrl_c_ends_the_process_cleanly():
    program = textwrap.dedent("""
        import time
        from longfill.cli import run, main
        def load(args):
            print("loading", flush=True)
            time.sleep(60)
        run.open_engine = load
        main.main(["run", "--prompt", "x"])
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "longfill: interrupted\n"


def test_a_reader_that_goes_away_leaves_no_traceback():
    program = "from longfill.cli.main import main; main(['version'])"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


def test_help_and_mistakes_do_not_import_torch():
    program = (
        "import sys; from longfill.cli.main import exit_code; "
        "exit_code(['run', '--help']); exit_code(['run', '--nope']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
