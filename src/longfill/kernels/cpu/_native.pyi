from collections.abc import Sequence

from torch import Tensor

def isa_names() -> list[str]: ...
def read_memory(data: Tensor, num_threads: int) -> int: ...
def copy_memory(target: Tensor, source: Tensor, num_threads: int) -> None: ...
def index_topk(
    isa: str,
    queries: Tensor,
    weights: Tensor,
    values: Tensor,
    scales: Tensor,
    rows: Sequence[tuple[int, int, int, Tensor]],
    selection: Tensor,
    scores: Tensor | None,
    num_threads: int,
) -> None: ...
def index_topk_scratch_bytes(isa: str, heads: int, dim: int, k: int, num_threads: int) -> int: ...
def spin(isa: str, iterations: int) -> float: ...
