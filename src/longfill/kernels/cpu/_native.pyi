from collections.abc import Sequence

from torch import Tensor

def isa_names() -> list[str]: ...
def tasks_done() -> int: ...
def read_memory(data: Tensor, num_threads: int) -> int: ...
def copy_memory(target: Tensor, source: Tensor, num_threads: int) -> None: ...
def index_topk(
    isa: str,
    queries: Tensor,
    weights: Tensor,
    values: Tensor,
    scales: Tensor | None,
    rows: Sequence[tuple[int, int, int, Tensor | None, Tensor]],
    selection: Tensor,
    scores: Tensor | None,
    screen: str,
    num_threads: int,
) -> tuple[int, int, int]: ...
def index_topk_scratch_bytes(
    isa: str, fp8_keys: bool, heads: int, dim: int, k: int, screen: str, num_threads: int
) -> int: ...
def merge_topk(isa: str, scores: Tensor, positions: Tensor, selection: Tensor, num_threads: int) -> None: ...
def merge_topk_scratch_bytes(entries: int, num_threads: int) -> int: ...
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

class PackedMatrix:
    def __init__(
        self,
        isa: str,
        format: str,
        bf16: bool,
        n: int,
        k: int,
        count: int,
        data: Tensor,
        scale: Tensor | None,
        block: tuple[int, int],
        bias: Tensor | None,
    ) -> None: ...

_Mlp = tuple[PackedMatrix, PackedMatrix, PackedMatrix]

def pack(isa: str, format: str, bf16: bool, source: Tensor, out: Tensor, num_threads: int) -> None: ...
def unpack(weight: PackedMatrix, first: int, last: int, out: Tensor, num_threads: int) -> None: ...
def packed_bytes(isa: str, format: str, bf16: bool, n: int, k: int) -> int: ...
def linear(weight: PackedMatrix, x: Tensor, out: Tensor, num_threads: int) -> None: ...
def per_head(weight: PackedMatrix, x: Tensor, out: Tensor, num_threads: int) -> None: ...
def mlp(weights: _Mlp, x: Tensor, out: Tensor, num_threads: int) -> None: ...
def experts(
    weights: Sequence[_Mlp],
    shared: _Mlp | None,
    ids: Tensor,
    factors: Tensor,
    x: Tensor,
    out: Tensor,
    num_threads: int,
) -> None: ...
def fold_experts(
    isa: str,
    outputs: Tensor,
    slots: Tensor,
    factors: Tensor,
    shared: Tensor | None,
    out: Tensor,
    num_threads: int,
) -> None: ...
def route(
    router: PackedMatrix,
    bias: Tensor | None,
    scoring: str,
    group_value: str,
    groups: int,
    kept_groups: int,
    normalise: bool,
    scale: float,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_threads: int,
) -> None: ...
def linear_scratch_bytes(isa: str, bf16: bool, n: int, k: int, rows: int, num_threads: int) -> int: ...
def per_head_scratch_bytes(isa: str, bf16: bool, n: int, k: int, rows: int, num_threads: int) -> int: ...
def mlp_scratch_bytes(isa: str, bf16: bool, width: int, inner: int, rows: int, num_threads: int) -> int: ...
def experts_scratch_bytes(
    isa: str,
    bf16: bool,
    width: int,
    inner: int,
    shared_inner: int,
    num_experts: int,
    k: int,
    rows: int,
    num_threads: int,
) -> int: ...
def route_scratch_bytes(isa: str, experts: int, width: int, rows: int, num_threads: int) -> int: ...
def rms_norm(isa: str, x: Tensor, weight: Tensor, eps: float, out: Tensor, num_threads: int) -> None: ...
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
def put_rows(rows: Tensor, order: Tensor, cache: Tensor, slots: Tensor, num_threads: int) -> None: ...
def rotate(isa: str, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor, num_threads: int) -> None: ...
def row_scratch_bytes(width: int, num_threads: int) -> int: ...
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
    lse: Tensor | None,
    num_threads: int,
) -> None: ...
def dense_mla(
    isa: str,
    queries: Tensor,
    layout: tuple[str, int, int, float, float],
    pool: Tensor,
    pages: Tensor,
    visible: Tensor,
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
