"""The entry point: the typer application, and what each kind of failure shows and returns.

Imports the commands. Invariant: a mistake of the user is one line on stderr and exit code 2, Ctrl-C is 130, and only a
fault of longfill itself shows a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from longfill.cli import (
    bench,
    bench_decode,
    bench_parallel,
    bench_serve,
    check,
    demo,
    needle_eval,
    run,
    serve,
    simulate,
    version,
)
from longfill.errors import LongfillError

USAGE_ERROR = 2
INTERRUPTED = 130

# typer carries click's exceptions inside itself in newer releases and takes click's own in older ones.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="longfill",
    help="Sparse-attention language models on prompts of up to a million tokens, inside a memory budget.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: long flag names stay whole in a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
evaluations = typer.Typer(help="Measure how often a model answers exactly.", rich_markup_mode=None)
app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.add_typer(evaluations, name="eval")
evaluations.command("needle")(needle_eval.needle)
app.command("check")(check.check)
app.add_typer(bench.app, name="bench")
bench.app.command("decode")(bench_decode.decode)
bench.app.command("serve")(bench_serve.serve)
bench.app.add_typer(bench_parallel.app, name="parallel")
app.command("simulate")(simulate.simulate)
app.command("version")(version.version)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and ends the process with its exit code."""
    sys.exit(exit_code(args))


def exit_code(args: Sequence[str] | None = None) -> int:
    """Runs the command line in this process; returns the exit code."""
    given = sys.argv[1:] if args is None else list(args)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=given or ["--help"], prog_name="longfill", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except LongfillError as error:
        return _complain(str(error))
    except _ClickException as error:
        return _complain(_usage_message(error))
    except BrokenPipeError:
        # The reader went away (`longfill run ... | head`): nothing to say, and nobody to say it to.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"cannot write the output: {error}")
    if code == INTERRUPTED:
        print("longfill: interrupted", file=sys.stderr)
    return int(code or 0)


def _open_closed_streams() -> None:
    """Python has None for a stream that was closed before its start; what is written to these goes nowhere.

    Child processes inherit them, so that no socket of theirs gets the number of one.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w"))


def _complain(message: str) -> int:
    print("longfill: error: " + " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR


def _usage_message(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "longfill"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{message.rstrip('.')}; see `{command} --help`"
