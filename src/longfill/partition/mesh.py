"""The mesh of ranks as integers: where each stands on every axis, and with whom it exchanges what.

Imports nothing of the house but `partition.lengths`. Invariant: ranks are numbered DP, PP, PCP, TP, the last one
fastest, and DCP groups are runs of ranks within that order.

World = DP x PP x PCP x TP. Decode context parallelism needs no ranks of its own: with PCP 1 its groups lie within those
of TP, else it spans PCP (DCP = PCP) or both (DCP = PCP x TP).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from longfill.partition.lengths import positive

Axis = Literal["tp", "pcp", "dcp", "rows", "ep", "world"]
"""`rows`: the ranks among which a step's rows are spread (TP x PCP); `ep`: those among which experts are (TP x PCP x
DP)."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes. Raises ValueError for ones that are no mesh."""

    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pcp", "dcp", "pp", "dp"):
            positive(name, getattr(self, name))
        if self.pcp == 1 and self.tp % self.dcp:
            raise ValueError(f"dcp is {self.dcp}; without pcp it must divide tp, which is {self.tp}")
        if self.pcp > 1 and self.dcp not in (1, self.pcp, self.tp * self.pcp):
            raise ValueError(
                f"dcp is {self.dcp}; with pcp {self.pcp} and tp {self.tp} it must be 1, {self.pcp} or "
                f"{self.tp * self.pcp}"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.pcp * self.tp

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank on the axes dp, pp, pcp and tp."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; with {self.world} ranks it must be in [0, {self.world})")
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        dp, pp = divmod(rest, self.pp)
        return {"dp": dp, "pp": pp, "pcp": pcp, "tp": tp}

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """World ranks of the group along `axis` that `rank` belongs to, rising; one rank has place `index(rank)`."""
        at = self.place(rank)
        rows = self.tp * self.pcp
        first = rank - rank % rows
        if axis == "world":
            return tuple(range(self.world))
        if axis == "rows":
            return tuple(range(first, first + rows))
        if axis == "tp":
            return tuple(range(rank - at["tp"], rank - at["tp"] + self.tp))
        if axis == "pcp":
            return tuple(range(first + at["tp"], first + rows, self.tp))
        if axis == "ep":
            replica, stage = self.pp * rows, at["pp"] * rows
            return tuple(r for d in range(self.dp) for r in range(d * replica + stage, d * replica + stage + rows))
        if axis == "dcp":
            return self._dcp_group(rank, first, rows)
        raise ValueError(f"axis {axis!r} is not one of {', '.join(get_args(Axis))}")

    def _dcp_group(self, rank: int, first: int, rows: int) -> tuple[int, ...]:
        if self.dcp == 1:
            return (rank,)
        if self.pcp == 1:
            start = rank - rank % self.dcp
            return tuple(range(start, start + self.dcp))
        if self.dcp == self.pcp:
            return self.group("pcp", rank)
        return tuple(range(first, first + rows))
