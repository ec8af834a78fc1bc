"""Which implementation runs each operation: decided once at start, logged, and read by the memory plan.

May import the backends. Invariant: no other file chooses a kernel, and a choice never changes after start.
"""

from __future__ import annotations

from dataclasses import dataclass

from longfill.config import EngineArgs
from longfill.errors import ConfigError
from longfill.kernels.cpu import available, describe

HEAD_DIM_STEP = 16
"""The native indexer takes head dims that are multiples of this."""


@dataclass(frozen=True)
class KernelChoice:
    """The start-up decisions. `topk` is None for a model without an indexer."""

    topk: int | None
    native_index: bool
    """Whether `index_topk` runs natively: scores stream through registers, so none is ever written down."""
    use_workspace: bool
    """Whether sparse attention reads a gathered workspace instead of the pages."""
    force_mqa: bool
    """Whether rows that select all their keys run as sparse attention too."""

    @property
    def paths(self) -> dict[str, str]:
        """Operation -> what runs it, for the log and `longfill check`."""
        paths = {"linear": "reference", "experts": "reference", "norm_rope_store": "reference"}
        if self.topk is None:
            return paths | {"dense_mla": "reference (every row)"}
        dense = f"reference (positions below {self.topk:,})"
        return paths | {
            "index_topk": describe() if self.native_index else "reference",
            "sparse_mla": "reference, " + ("gathered workspace" if self.use_workspace else "paged"),
            "dense_mla": "off (--sparse-mla-force-mqa)" if self.force_mqa else dense,
        }


def choose_kernels(
    args: EngineArgs, *, topk: int | None, index_format: str | None, index_head_dim: int
) -> KernelChoice:
    """Decide for a model. Raises ConfigError where `--kernel-backend cpu` cannot be had here or for its shapes.

    Options that exclude `--kernel-backend cpu` are refused before, by `compatibility.check`.
    """
    has_indexer = topk is not None
    return KernelChoice(
        topk=topk,
        native_index=has_indexer and _native_index(args.kernel_backend, index_format, index_head_dim),
        use_workspace=has_indexer and args.attention_path == "workspace",
        force_mqa=has_indexer and args.sparse_mla_force_mqa,
    )


def _native_index(backend: str, index_format: str | None, head_dim: int) -> bool:
    if backend == "reference" or index_format != "fp8":
        return False
    obstacles = []
    if not available():
        obstacles.append(describe())
    if head_dim % HEAD_DIM_STEP:
        obstacles.append(f"index_head_dim {head_dim} is no multiple of {HEAD_DIM_STEP}")
    if obstacles and backend == "cpu":
        raise ConfigError(f"--kernel-backend cpu: no native index_topk for this model: {'; '.join(obstacles)}")
    return not obstacles
