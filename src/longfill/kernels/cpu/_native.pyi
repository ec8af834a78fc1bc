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
    num_threads: int,
) -> None: ...
def index_topk_scratch_bytes(isa: str, heads: int, dim: int, k: int, num_threads: int) -> int: ...
def spin(isa: str, iterations: int) -> float: ...
def sparse_mla(
    isa: str,
    queries: Tensor,
    layout: tuple[str, int, int, float, float],
    pool: Tensor,
    pages: Tensor,
    context: Tensor | None,
    selection: Tensor,
    scale: float,
    out: Tensor,
    num_threads: int,
) -> None: ...
def dense_mla(
    isa: str,
    queries: Tensor,
    layout: tuple[str, int, int, float, float],
    pool: Tensor,
    pages: Tensor,
    first_position: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    num_threads: int,
) -> None: ...
def gather_rows(
    isa: str,
    layout: tuple[str, int, int, float, float],
    pool: Tensor,
    pages: Tensor,
    length: int,
    out: Tensor,
    num_threads: int,
) -> None: ...
def attention_scratch_bytes(isa: str, heads: int, rank: int, rope_dim: int, num_threads: int) -> int: ...
