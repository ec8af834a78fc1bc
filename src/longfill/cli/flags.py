"""Engine flags, made from the fields of `EngineArgs`, so that a knob exists once.

Imports config and errors of the house, and typer. Invariant: every field of `EngineArgs` is a flag of every command
that runs a model, and a command gets one validated `EngineArgs`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from longfill.config import EngineArgs, choices_of, flag_name
from longfill.errors import ConfigError

PANEL = "Engine"
_JSON = {
    "hf_overrides": '{"index_topk": 64}',
    "speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}',
}
"""Knobs that are JSON on the command line, each with an example."""
SHORT = {
    "tensor_parallel_size": "-tp",
    "prefill_context_parallel_size": "-pcp",
    "decode_context_parallel_size": "-dcp",
}
"""Flags with a second, short spelling; vLLM's."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, everything else on stderr")]
_MODEL = inspect.Parameter(
    "positional_model",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Argument(metavar="MODEL", help="Same as --model", show_default=False)],
)


KNOBS = tuple(f.name for f in dataclasses.fields(EngineArgs))


def engine_flags(
    *, positional_model: bool = True, only: Collection[str] = KNOBS, **helps: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: adds one flag per engine knob to a command and hands it the validated object as `engine`.

    With `positional_model` the model may also be given as `COMMAND MODEL`; both spellings at once must agree. A command
    that runs no model names the knobs that mean something to it with `only`. `helps` replaces the help text of the
    knobs named, where a command gives a knob a wider meaning.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        parameters = [
            *([_MODEL] if positional_model else []),
            *_own_parameters(command),
            *_knob_parameters(only, helps),
        ]

        def wrapper(**values: Any) -> int:
            knobs = {name: values.pop(name) for name in only}
            if positional_model:
                knobs["model"] = _merge_models(values.pop(_MODEL.name), knobs["model"])
            for knob, example in _JSON.items():
                if knob in knobs:
                    knobs[knob] = _json_object(knob, knobs[knob], example)
            return command(engine=EngineArgs(**knobs), **values)

        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _own_parameters(command: Callable[..., int]) -> list[inspect.Parameter]:
    """The command's parameters but `engine`, keyword only, with their annotations resolved."""
    hints = get_type_hints(command, include_extras=True)
    return [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, p in inspect.signature(command).parameters.items()
        if name != "engine"
    ]


def knob_value(knob: str, text: str) -> Any:
    """What a knob's flag would make of `text`; raises ConfigError. On and off are words here."""
    kind = _flag_type(get_type_hints(EngineArgs)[knob])
    try:
        return {"on": True, "off": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = {bool: "on or off", int: "an integer", float: "a number"}[kind]
        raise ConfigError(f"{flag_name(knob)}: expected {expected}, got {text!r}") from None


def _knob_parameters(only: Collection[str], helps: Mapping[str, str]) -> list[inspect.Parameter]:
    hints = get_type_hints(EngineArgs)
    parameters = []
    for knob in (f for f in dataclasses.fields(EngineArgs) if f.name in only):
        kind = _flag_type(hints[knob.name])
        flag = flag_name(knob.name)
        spellings = [SHORT[knob.name]] if knob.name in SHORT else []
        option = typer.Option(
            f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag,
            *spellings,
            help=helps.get(knob.name) or _help_text(knob),
            metavar=_metavar(knob.name, kind),
            rich_help_panel=PANEL,
            show_default=knob.default is not None,
        )
        parameters.append(
            inspect.Parameter(
                knob.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=knob.default,
                annotation=Annotated[kind if kind is bool else kind | None, option],
            )
        )
    return parameters


def _flag_type(hint: Any) -> type:
    """bool and numbers stay; names, choices and JSON are text on the command line (`EngineArgs` checks the values)."""
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if get_origin(hint) is not Literal and kinds[0] in (bool, int, float):
        return {bool: bool, int: int, float: float}[kinds[0]]
    return str


def _metavar(knob: str, kind: type) -> str | None:
    if kind is bool:
        return None
    if choices_of(knob):
        return "[" + "|".join(choices_of(knob)) + "]"
    if knob in _JSON:
        return "JSON"
    return "SIZE" if knob == "memory_budget" else {int: "N", float: "X"}.get(kind, "TEXT")


def _help_text(knob: dataclasses.Field[Any]) -> str:
    help_text: str = knob.metadata["help"]
    unit, low, high = knob.metadata["unit"], knob.metadata["low"], knob.metadata["high"]
    limits = [f"at least {low:,}" if low is not None else "", f"at most {high:,}" if high is not None else ""]
    notes = [unit, *limits] if _worth_saying(low, high) else [unit]
    suffix = ", ".join(note for note in notes if note)
    return f"{help_text} ({suffix})" if suffix else help_text


def _worth_saying(low: float | None, high: float | None) -> bool:
    """Whether a range is worth a word: 'at least 1' alone goes without saying."""
    return high is not None or (low is not None and low > 1)


def _merge_models(positional: str | None, flag: str | None) -> str:
    default = next(f.default for f in dataclasses.fields(EngineArgs) if f.name == "model")
    if positional is None:
        return flag if flag is not None else str(default)
    if flag not in (None, default, positional):
        raise ConfigError(f"the model is given twice: {positional!r} and --model {flag!r}; give one")
    return positional


def _json_object(knob: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag_name(knob)}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag_name(knob)}: expected a JSON object such as {example}, got {text!r}")
    return value
