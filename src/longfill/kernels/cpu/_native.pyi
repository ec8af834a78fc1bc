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
def rms_norm(
    isa: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, num_threads: int
) -> None: ...
def store_latent(
    isa: str,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    format: str,
    scale: float,
    rope_scale: float,
    slots: Tensor,
    num_threads: int,
) -> None: ...
def store_index_keys(
    isa: str,
    keys: Tensor,
    weight: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    values: Tensor,
    scales: Tensor | None,
    slots: Tensor,
    num_threads: int,
) -> None: ...
def index_queries(
    isa: str,
    queries: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    quantise: bool,
    weight_scale: float,
    out_queries: Tensor,
    out_weights: Tensor,
    num_threads: int,
) -> None: ...
def rotate(isa: str, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor, num_threads: int) -> None: ...
def row_scratch_bytes(width: int, num_threads: int) -> int: ...
