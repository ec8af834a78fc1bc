"""`longfill run`: one prompt, from a flag, a file or standard input, to one completion.

Imports the session. Invariant: a prompt comes from exactly one place, and is read before the model is loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from longfill.cli.console import duration, print_json, size, stderr
from longfill.cli.flags import JsonFlag, engine_flags
from longfill.cli.session import Prompts, generate, open_engine, report, tokenizer_of
from longfill.config import EngineArgs
from longfill.errors import RequestError
from longfill.request import SamplingParams

PANEL = "Sampling"


@engine_flags(seed="Seed of sampling")
def run(
    engine: EngineArgs,
    prompt: Annotated[str | None, typer.Option(help="The prompt (else --prompt-file, else standard input)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 text file with the prompt; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate", rich_help_panel=PANEL)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy", rich_help_panel=PANEL)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much probability", rich_help_panel=PANEL)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens (0: all)", rich_help_panel=PANEL)] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, relative to the best", rich_help_panel=PANEL)] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable", rich_help_panel=PANEL)] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the text", rich_help_panel=PANEL)
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of this many tokens (with --json)", rich_help_panel=PANEL)
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Run one prompt and print the completion."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop or None,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    text = read_prompt(prompt, prompt_file)
    llm = open_engine(engine)
    tokenizer = tokenizer_of(llm)
    prompts: Prompts = [text]
    if chat:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        # The template writes its special tokens itself.
        prompts = [tokenizer.encode(rendered, add_special_tokens=False)]
    [output] = generate(llm, prompts, params)
    values = report(llm, output)
    if as_json:
        print_json(values)
    else:
        print(values["text"])
        _show_figures(values, stderr())
    return 0


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the one place that gives it; raises RequestError when there is none, two, or it is empty."""
    if prompt is not None and prompt_file is not None:
        raise RequestError("--prompt and --prompt-file are both given; give one")
    if prompt is not None:
        source, text = "--prompt", prompt
    elif prompt_file is not None and str(prompt_file) != "-":
        source, text = f"--prompt-file {prompt_file}", _read_file(prompt_file)
    elif sys.stdin is None or sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt, --prompt-file, or text on standard input")
    else:
        source, text = "standard input", _decode(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise RequestError(f"{source}: the prompt is empty")
    return text


def _read_file(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"--prompt-file: cannot read {path}: {error.strerror}") from None
    return _decode(data, f"--prompt-file {path}")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 text (byte {error.start:,} is {data[error.start]:#04x})") from None


def _show_figures(values: dict[str, Any], console: Console) -> None:
    speed, first = values["prefill_tokens_per_s"], values["ttft_s"]
    parts = [
        f"{values['prompt_tokens']:,} prompt tokens ({values['cached_tokens']:,} cached)",
        f"{len(values['token_ids']):,} generated ({values['finish_reason']})",
        f"first token after {duration(first)}" if first is not None else "",
        f"{speed:,.0f} prompt tokens/s" if speed is not None else "",
        f"{values['steps']:,} steps",
        f"peak memory {size(values['peak_rss_bytes'])}",
        f"digest {values['digest']}" if values["digest"] else "",
    ]
    console.print("longfill: " + ", ".join(part for part in parts if part), soft_wrap=True)
