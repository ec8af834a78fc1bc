"""`longfill run`: one prompt, from a flag, a file or standard input, to its completion, or several.

Imports the session. Invariant: a prompt comes from exactly one place, and is read before the model is loaded.
"""

from __future__ import annotations

import json
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
from longfill.request import FinishReason, SamplingParams

PANEL = "Sampling"


@engine_flags(seed="Seed of sampling")
def run(
    engine: EngineArgs,
    prompt: Annotated[str | None, typer.Option(help="The prompt (else --prompt-file, else standard input)")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 text file with the prompt; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template")] = False,
    n: Annotated[
        int, typer.Option("--n", help="Completions, which differ above temperature 0", rich_help_panel=PANEL)
    ] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate", rich_help_panel=PANEL)] = 128,
    min_tokens: Annotated[int, typer.Option(help="Tokens before anything ends it", rich_help_panel=PANEL)] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy", rich_help_panel=PANEL)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much probability", rich_help_panel=PANEL)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens (0: all)", rich_help_panel=PANEL)] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, relative to the best", rich_help_panel=PANEL)] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logits of tokens in the output (-2 to 2)", rich_help_panel=PANEL)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time that they occur (-2 to 2)", rich_help_panel=PANEL)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: avoid tokens of prompt and output", rich_help_panel=PANEL)
    ] = 1.0,
    logit_bias: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Added to logits by token id: {"50": -100}', rich_help_panel=PANEL),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable", rich_help_panel=PANEL)] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the text", rich_help_panel=PANEL)
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of this many tokens (with --json)", rich_help_panel=PANEL)
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for every token of the prompt (with --json)", rich_help_panel=PANEL)
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Run one prompt and print its completions."""
    params = SamplingParams(
        n=n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(logit_bias),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop or None,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
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
        _show_texts(values["outputs"])
        _show_figures(values, stderr())
    failed = [each for each in values["outputs"] if each["finish_reason"] == FinishReason.ERROR]
    for each in failed:
        stderr().print(f"longfill: completion {each['index']} failed: {each['stop_reason']}", soft_wrap=True)
    return 2 if failed else 0


def _logit_bias(text: str | None) -> dict[int, float] | None:
    """The flag's JSON, whose keys are token ids as text."""
    try:
        value = json.loads(text or "{}")
        return {int(token): bias for token, bias in value.items()} or None
    except (ValueError, AttributeError):
        raise RequestError(f'--logit-bias: expected a JSON object such as {{"50": -100}}, got {text!r}') from None


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


def _show_texts(completions: list[dict[str, Any]]) -> None:
    """One text as it is; several under a line each."""
    for each in completions:
        if len(completions) > 1:
            print(f"--- {each['index']} ({each['finish_reason']}) ---")
        print(each["text"])


def _show_figures(values: dict[str, Any], console: Console) -> None:
    speed, first, outputs = values["prefill_tokens_per_s"], values["ttft_s"], values["outputs"]
    reasons = dict.fromkeys(each["finish_reason"] for each in outputs)
    parts = [
        f"{values['prompt_tokens']:,} prompt tokens ({values['cached_tokens']:,} cached)",
        f"{sum(len(each['token_ids']) for each in outputs):,} generated ({', '.join(reasons)})",
        f"first token after {duration(first)}" if first is not None else "",
        f"{speed:,.0f} prompt tokens/s" if speed is not None else "",
        f"{values['steps']:,} steps",
        _drafts(values["stats"]["spec"]),
        f"peak memory {size(values['peak_rss_bytes'])}",
        f"digest {values['digest']}" if values["digest"] else "",
    ]
    console.print("longfill: " + ", ".join(part for part in parts if part), soft_wrap=True)


def _drafts(spec: dict[str, Any] | None) -> str:
    """How often drafts were right; nothing where there were none."""
    if spec is None:
        return ""
    shares = " ".join(f"{share:.2f}" for share in spec["acceptance_per_position"])
    return f"{spec['mean_acceptance_length']:.2f} tokens a step with drafts (accepted by position {shares})"
