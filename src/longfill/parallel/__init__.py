"""Ranks that exchange tensors: the mesh, its groups, and what crosses between them.

May import torch, partition and errors. Invariant: what crosses is counted, to the byte, and no wait is without a limit.
"""

from longfill.parallel.comm import Comm
from longfill.parallel.group import Group, Pending
from longfill.parallel.link import Link
from longfill.parallel.mesh import Mesh
from longfill.parallel.sums import tree_sum

__all__ = ["Comm", "Group", "Link", "Mesh", "Pending", "tree_sum"]
