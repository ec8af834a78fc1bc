"""Which parts of a model's weights a rank holds.

May import config, errors and `partition.lengths`. Invariant: the parts of all ranks are the whole, each output row and
each expert once; slices of an inner width are numbered alike on every number of ranks.

Column-parallel weights (query heads, the gate and up of an MLP, the head) are cut along their outputs: every output
keeps its bits. Row-parallel ones (what attention and an MLP put out) are cut along their inputs, and their partial
results added: in one part a rank, or with `deterministic` in `DETERMINISTIC_SLICES` parts whatever the ranks, added as
a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from longfill.config import DETERMINISTIC_SLICES
from longfill.errors import ConfigError
from longfill.partition.lengths import even_cuts


@dataclass(frozen=True)
class WeightShards:
    """The parts of one rank. The default holds everything, as one part."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_parallel: bool = False
    """Whether it holds whole experts, a range of them, instead of a part of each."""
    deterministic: bool = False

    @property
    def num_slices(self) -> int:
        """Slices of an inner width in all."""
        return DETERMINISTIC_SLICES if self.deterministic else self.tp_size

    @property
    def is_whole(self) -> bool:
        """Whether inner widths are in one piece: no partial results, nothing to add."""
        return self.num_slices == 1

    def outputs(self, size: int) -> range:
        """Its contiguous part of `size` outputs."""
        return _part(size, self.tp_rank, self.tp_size)

    def slices(self, size: int) -> list[range]:
        """Its slices of an inner width; empty ones where the width is less than the number of slices."""
        count = self.num_slices
        return [_part(size, i, count) for i in _part(count, self.tp_rank, self.tp_size)]

    def experts(self, count: int) -> range:
        """The experts that it holds, wholly or in part."""
        if not self.expert_parallel:
            return range(count)
        return _part(count, self.ep_rank, self.ep_size)


def _part(size: int, rank: int, ranks: int) -> range:
    cuts = even_cuts(size, ranks)
    return range(cuts[rank], cuts[rank + 1])


def check_heads(num_heads: int, tp_size: int) -> None:
    """Raise ConfigError where heads cannot be split evenly."""
    if num_heads % tp_size:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"--tensor-parallel-size {tp_size}: the model has {num_heads} heads (num_attention_heads), which are not "
            f"split evenly; give one of {', '.join(map(str, fitting))}"
        )


WHOLE = WeightShards()
