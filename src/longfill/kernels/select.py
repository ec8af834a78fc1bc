"""Which implementation runs each operation: decided once at start, logged, and read by the memory plan.

May import the backends. Invariant: no other file chooses a kernel, and a choice never changes after start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.kernels.backend import Backend
from longfill.kernels.cpu import NativeBackend, available, check_screen, describe, selected_isa, self_test
from longfill.kernels.reference.backend import ReferenceBackend

HEAD_DIM_STEP = 16
"""The native indexer takes head dims that are multiples of this."""
NATIVE_DTYPES = ("float32", "bfloat16")
"""What native kernels compute in; float16 models run on the reference."""


@dataclass(frozen=True)
class KernelChoice:
    """The start-up decisions. `topk` is None for a model without an indexer."""

    topk: int | None
    native: bool
    """Whether everything but `index_topk` runs natively."""
    native_index: bool
    """Whether `index_topk` runs natively: scores stream through registers, so none is ever written down."""
    use_workspace: bool
    """Whether sparse attention reads a gathered workspace instead of the pages."""
    screen: str
    """"auto", "on" or "off": whether index keys are tested in int8 before their exact scores."""
    force_mqa: bool
    """Whether rows that select all their keys run as sparse attention too."""
    why_reference: str = ""
    """What stands against native kernels for this model, where they were not refused by name."""

    @property
    def paths(self) -> dict[str, str]:
        """Operation -> what runs it, for the log and `longfill check`."""
        runs = describe() if self.native else "reference" + (f" ({self.why_reference})" if self.why_reference else "")
        paths = dict.fromkeys(("linear", "experts", "norm_rope_store"), runs)
        if self.topk is None:
            return paths | {"dense_mla": f"{runs} (every row)"}
        dense = "off (--sparse-mla-force-mqa)" if self.force_mqa else f"{runs} (positions below {self.topk:,})"
        return paths | {
            "index_topk": describe() if self.native_index else "reference",
            "sparse_mla": f"{runs}, " + ("gathered workspace" if self.use_workspace else "paged"),
            "dense_mla": dense,
        }


def choose_kernels(
    args: EngineArgs, *, dtype: str, topk: int | None, index_format: str | None, index_head_dim: int
) -> KernelChoice:
    """Decide for a model. Raises ConfigError where `--kernel-backend cpu` cannot be had here or for its shapes.

    Options that exclude `--kernel-backend cpu` are refused before, by `compatibility.check`.
    """
    obstacles = [] if available() else [describe()]
    has_indexer = topk is not None
    index_obstacles = []
    if has_indexer and index_head_dim % HEAD_DIM_STEP:
        index_obstacles.append(
            f"no native index_topk: index_head_dim {index_head_dim} is no multiple of {HEAD_DIM_STEP}"
        )
    if args.kernel_backend == "cpu" and obstacles + index_obstacles:
        raise ConfigError(f"--kernel-backend cpu: {'; '.join(obstacles + index_obstacles)}")
    if args.indexer_screen == "on" and available() and index_format is not None:
        check_screen(args.indexer_screen, selected_isa(), index_format)
    missing = [] if available() else ["this installation has no native kernels; reinstall where a C++ compiler is"]
    wanted = args.kernel_backend != "reference"
    dtype_obstacles = [] if dtype in NATIVE_DTYPES else [f"no native kernels for {dtype}"]
    return KernelChoice(
        topk=topk,
        native=wanted and not obstacles + dtype_obstacles,
        native_index=wanted and has_indexer and index_format is not None and not obstacles + index_obstacles,
        use_workspace=has_indexer and args.attention_path == "workspace",
        screen=args.indexer_screen,
        force_mqa=has_indexer and args.sparse_mla_force_mqa,
        why_reference="; ".join(missing + dtype_obstacles) if wanted else "",
    )


def make_backends(choice: KernelChoice, dtype: torch.dtype, num_threads: int) -> tuple[Backend, Backend]:
    """The backend of everything but `index_topk`, and the one of `index_topk`.

    Raises KernelError where a native kernel is wrong on this machine.
    """
    reference = ReferenceBackend()
    if not (choice.native or choice.native_index):
        return reference, reference
    _check_once(dtype)
    native = NativeBackend(dtype, num_threads, choice.screen)
    return native if choice.native else reference, native if choice.native_index else reference


@cache
def _check_once(dtype: torch.dtype) -> None:
    """Compare the native kernels with the reference, the first time that a process runs a model of this dtype."""
    self_test(ReferenceBackend(), dtype)
