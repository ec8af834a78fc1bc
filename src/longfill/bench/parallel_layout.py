"""How `bench parallel` names layouts of ranks: `1`, `tp2`, `pcp2-interleave`, `tp2dcp2-det`, `pcp2ep`...

May import config and errors. Invariant: a name says all that tells its engine from that of one rank, and a name that
would say something without effect is refused.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from longfill.config import EngineArgs, choices_of
from longfill.errors import ConfigError

KNOBS = (
    "tensor_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
    "all2all_backend", "pcp_split", "cp_kv_cache_interleave_size", "dcp_comm_backend", "deterministic",
    "distributed_executor_backend",
)  # fmt: skip
"""Engine arguments that layouts decide, or the benchmark itself."""

_MESH = re.compile(r"1|(?:tp([2-9]|[1-9]\d+))?(?:pcp([2-9]|[1-9]\d+))?(?:dcp([2-9]|[1-9]\d+))?(ep)?")
_AXES = {
    "pcp_split": ("pcp", "prefill_context_parallel_size"),
    "dcp_comm_backend": ("dcp", "decode_context_parallel_size"),
    "all2all_backend": ("ep", "enable_expert_parallel"),
}
"""Knobs whose values stand behind a hyphen, and the axis without which they mean nothing."""
_OPTIONS = {word: knob for knob in _AXES for word in choices_of(knob) if word != "auto"}


@dataclass(frozen=True)
class Layout:
    """Some ranks and how they share the work."""

    name: str
    knobs: dict[str, Any] = field(default_factory=dict, hash=False)
    """Engine arguments, as far as they are not those of one rank."""

    @property
    def ranks(self) -> int:
        """Processes that compute."""
        tp: int = self.knobs.get("tensor_parallel_size", 1)
        return tp * int(self.knobs.get("prefill_context_parallel_size", 1))

    @property
    def page_factor(self) -> int:
        """Ranks that share a page of the cache."""
        return int(self.knobs.get("decode_context_parallel_size", 1))

    @property
    def deterministic(self) -> bool:
        return bool(self.knobs.get("deterministic", False))

    @property
    def plain_knobs(self) -> dict[str, Any]:
        """Those of the same ranks without `-det`, nor an interleave that is for its slices alone."""
        slicing = () if self.page_factor > 1 else ("cp_kv_cache_interleave_size",)
        return {knob: value for knob, value in self.knobs.items() if knob not in ("deterministic", *slicing)}

    @property
    def one_rank_knobs(self) -> dict[str, Any]:
        """Those of one rank that adds up as these do: alike in what tells one deterministic sum from another."""
        summing = ("deterministic", "cp_kv_cache_interleave_size") if self.deterministic else ()
        return {knob: value for knob, value in self.knobs.items() if knob in summing}

    def engine(self, args: EngineArgs) -> EngineArgs:
        """`args` for these ranks. Raises ConfigError, naming the layout, for ones that cannot be."""
        try:
            return dataclasses.replace(args, **self.knobs)
        except ConfigError as error:
            raise ConfigError(f"--layouts: {self.name}: {error}") from None


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """The layouts that are separated by commas, each once; raises ConfigError for what is none."""
    names = dict.fromkeys(part.strip() for part in text.split(","))
    return tuple(parse_layout(name) for name in names)


def parse_layout(name: str) -> Layout:
    """`tp2dcp2-det` -> its ranks and options; raises ConfigError that says what a layout looks like."""
    head, *options = name.split("-")
    mesh = _MESH.fullmatch(head)
    if mesh is None or not head:
        raise ConfigError(
            f"--layouts: {name!r} is no layout; write 1, or tpN, pcpN and dcpN in this order with N from 2 on, ep "
            "behind them to spread experts over their ranks (tp2ep), then options: -det, "
            f"-{', -'.join(_OPTIONS)}, -iN (interleave)"
        )
    tp, pcp, dcp, ep = mesh.groups()
    if ep and not (tp or pcp):
        raise ConfigError(f"--layouts: {name}: ep spreads experts over the ranks of tp and pcp; write tp2ep or pcp2ep")
    sizes = zip(KNOBS, (tp, pcp, dcp), strict=False)
    knobs: dict[str, Any] = {knob: int(size) for knob, size in sizes if size}
    if ep:
        knobs["enable_expert_parallel"] = True
    for option in options:
        _add_option(name, option, knobs)
    layout = Layout(name, knobs)
    layout.engine(EngineArgs())
    return layout


def _add_option(name: str, option: str, knobs: dict[str, Any]) -> None:
    """Add what one word behind a hyphen says."""
    knob = _OPTIONS.get(option)
    value: Any = option
    if option == "det":
        knob, value = "deterministic", True
    elif re.fullmatch(r"i[1-9]\d*", option):
        knob, value = "cp_kv_cache_interleave_size", int(option[1:])
    if knob is None:
        raise ConfigError(f"--layouts: {name}: -{option} is no option; there are -det, -{', -'.join(_OPTIONS)} and -iN")
    axis, needed = _AXES.get(knob, ("", ""))
    if axis and needed not in knobs:
        raise ConfigError(f"--layouts: {name}: -{option} means nothing without {axis}")
    if knob in knobs:
        raise ConfigError(f"--layouts: {name}: -{option} is a second value of the same option")
    knobs[knob] = value
