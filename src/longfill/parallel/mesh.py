"""The mesh of ranks as this process sees it: its groups along every axis, and the account of what they exchange.

May import torch, partition and errors. Invariant: all groups share one link and no group has a communicator of its own,
so that only the order of operations between two ranks matters.

The link is gloo on CPU, since all kernels are CPU kernels; NCCL comes with the first kernels for CUDA.
"""

from __future__ import annotations

from longfill.parallel.comm import Comm
from longfill.parallel.group import Group
from longfill.parallel.link import Link
from longfill.partition.mesh import Axis, MeshShape


class Mesh:
    """One rank's place among `shape.world` ranks."""

    def __init__(self, shape: MeshShape, rank: int, link: Link | None) -> None:
        """`link` connects all ranks, and is None where there is one. Raises ValueError for another mesh's."""
        if link is None and shape.world > 1:
            raise ValueError(f"{shape.world} ranks need a link")
        if link is not None and (link.size, link.rank) != (shape.world, rank):
            raise ValueError(f"the link is of rank {link.rank} of {link.size}, the mesh of {rank} of {shape.world}")
        self.shape = shape
        self.rank = rank
        """World rank."""
        self.comm = Comm()

        def group(axis: Axis) -> Group:
            return Group(shape.group(axis, rank), rank, link, self.comm)

        self.tp = group("tp")
        self.pcp = group("pcp")
        self.dcp = group("dcp")
        self.rows = group("rows")
        """The ranks among which a step's rows are spread."""
        self.ep = group("ep")
        """The ranks among which experts are spread."""
        self.world = group("world")

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of one rank, which exchanges nothing."""
        return cls(MeshShape(), 0, None)
