from collections.abc import Sequence

from torch import Tensor

def isa_names() -> list[str]: ...
def index_topk(
    isa: str,
    queries: Tensor,
    weights: Tensor,
    values: Tensor,
    scales: Tensor,
    rows: Sequence[tuple[int, int, int, Tensor]],
    selection: Tensor,
    scores: Tensor | None,
    screen: str,
    num_threads: int,
) -> tuple[int, int, int]: ...
def index_topk_scratch_bytes(isa: str, heads: int, dim: int, k: int, screen: str, num_threads: int) -> int: ...
def screen_check(
    isa: str,
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    thresholds: Tensor,
    bound_factor: float,
    passed: Tensor,
) -> None: ...
def spin(isa: str, iterations: int) -> float: ...
