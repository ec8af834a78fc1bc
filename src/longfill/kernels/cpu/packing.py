"""Weights in the layout that the native products read, written once at load.

May import torch and the extension. Invariant: packed values are the stored ones, bit for bit: bf16 and fp32 as they
are, fp8 as bytes that are scaled where they are read, to the values that `StoredLinear.rows` gives. A pack is
for one instruction set; none of it is shared between them.

Suffixes: O outputs · C inputs · H heads · A inputs of a head · B outputs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longfill.errors import ConfigError
from longfill.kernels.cpu.extension import selected_isa
from longfill.kernels.interface import StoredLinear, StoredMlp

if TYPE_CHECKING:
    from longfill.kernels.cpu import _native

ALIGNMENT = 64
"""Bytes: every packed matrix starts at a multiple of it."""
FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8"}
"""What a stored dtype is called."""


@dataclass(frozen=True)
class PackedLinear:
    """A weight [O, C] that the native products read. `data` holds it all; the tensor it came from is not needed."""

    data: Tensor
    """uint8 [bytes], starting at a multiple of ALIGNMENT."""
    out_size: int
    in_size: int
    format: str
    """What is stored: "float32", "bfloat16" or "fp8"."""
    scale: Tensor | None
    """float32 [ceil(O / block[0]), ceil(C / block[1])] for fp8."""
    block: tuple[int, int] | None
    bias: Tensor | None
    """float32 [O]."""
    compute_dtype: torch.dtype
    """The model's dtype: bfloat16 products use the instruction for them, where there is one."""
    isa: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed values, the scales and the bias."""
        return sum(t.nbytes for t in (self.data, self.scale, self.bias) if t is not None)

    @cached_property
    def native(self) -> _native.PackedMatrix:
        """The extension's view of it."""
        return _native_matrix(self, self.in_size, self.out_size, 1)

    def rows(self, first: int, last: int) -> Tensor:
        """Outputs [first, last) as fp32 [last - first, C], scaled and rounded as the products use them.

        Raises ValueError for rows outside the weight.
        """
        from longfill.kernels.cpu import _native

        out = torch.empty(max(0, last - first), self.in_size)
        _native.unpack(self.native, first, last, out, 1)
        return out


@dataclass(frozen=True)
class PackedHeads:
    """One matrix [A, B] a head, all of a kind."""

    data: Tensor
    """uint8: the heads one after the other, each from a multiple of ALIGNMENT on."""
    num_heads: int
    in_size: int
    out_size: int
    format: str
    compute_dtype: torch.dtype
    isa: str
    scale = block = bias = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed values."""
        return self.data.nbytes

    @cached_property
    def native(self) -> _native.PackedMatrix:
        """The extension's view of it."""
        return _native_matrix(self, self.in_size, self.out_size, self.num_heads)


@dataclass(frozen=True)
class PackedMlp:
    """Weights of one SwiGLU block."""

    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of all three."""
        return self.gate.num_bytes + self.up.num_bytes + self.down.num_bytes

    @cached_property
    def native(self) -> tuple[_native.PackedMatrix, _native.PackedMatrix, _native.PackedMatrix]:
        """The extension's view of it."""
        return self.gate.native, self.up.native, self.down.native


def _native_matrix(packed: PackedLinear | PackedHeads, in_size: int, out_size: int, count: int) -> _native.PackedMatrix:
    from longfill.kernels.cpu import _native

    bf16 = _is_bf16(packed.compute_dtype)
    block = packed.block or (1, 1)
    return _native.PackedMatrix(
        packed.isa, packed.format, bf16, out_size, in_size, count, packed.data, packed.scale, block, packed.bias
    )


def _is_bf16(compute_dtype: torch.dtype) -> bool:
    if compute_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"native products compute in float32 or bfloat16, not {compute_dtype}")
    return compute_dtype == torch.bfloat16


def _format_of(weight: Tensor, compute_dtype: torch.dtype) -> str:
    name = FORMATS.get(weight.dtype)
    if name is None:
        raise ConfigError(f"native products read float32, bfloat16 and float8_e4m3fn weights, not {weight.dtype}")
    if name == "float32" and _is_bf16(compute_dtype):
        raise ConfigError("a float32 weight needs products in float32")
    return name


def packed_bytes(
    out_size: int, in_size: int, dtype: torch.dtype, *, compute_dtype: torch.dtype, isa: str | None = None
) -> int:
    """Bytes of the `data` that a weight [O, C] stored as `dtype` packs into."""
    from longfill.kernels.cpu import _native

    chosen = isa or selected_isa()
    return _native.packed_bytes(chosen, FORMATS[dtype], _is_bf16(compute_dtype), out_size, in_size)


def packed_heads_bytes(
    num_heads: int,
    in_size: int,
    out_size: int,
    dtype: torch.dtype,
    *,
    compute_dtype: torch.dtype,
    isa: str | None = None,
) -> int:
    """Bytes of the `data` that H matrices [A, B] stored as `dtype` pack into."""
    one = packed_bytes(out_size, in_size, dtype, compute_dtype=compute_dtype, isa=isa)
    return num_heads * (-(-one // ALIGNMENT) * ALIGNMENT)


def pack_linear(
    weight: StoredLinear, *, compute_dtype: torch.dtype, isa: str | None = None, num_threads: int
) -> PackedLinear:
    """Pack a stored weight, whatever its strides. The result shares no memory with it.

    `compute_dtype` is the model's dtype. Raises ConfigError for dtypes that the native products do not read, ValueError
    for scales or a bias that do not fit.
    """
    from longfill.kernels.cpu import _native

    chosen = isa or selected_isa()
    stored_OC = weight.weight
    name = _format_of(stored_OC, compute_dtype)
    out_size, in_size = stored_OC.shape
    size = packed_bytes(out_size, in_size, stored_OC.dtype, compute_dtype=compute_dtype, isa=chosen)
    data = torch.empty(size, dtype=torch.uint8)
    _native.pack(chosen, name, _is_bf16(compute_dtype), _bits(stored_OC), data, num_threads)
    packed = PackedLinear(
        data,
        out_size,
        in_size,
        name,
        None if weight.scale is None else weight.scale.float().contiguous(),
        weight.block,
        None if weight.bias is None else weight.bias.float().contiguous(),
        compute_dtype,
        chosen,
    )
    _ = packed.native  # checks that scales and bias fit
    return packed


def pack_heads(
    weight_HAB: Tensor, *, compute_dtype: torch.dtype, isa: str | None = None, num_threads: int
) -> PackedHeads:
    """Pack H matrices [A, B] (float32 or bfloat16, any strides) for `per_head`. Raises ConfigError for other dtypes."""
    from longfill.kernels.cpu import _native

    chosen = isa or selected_isa()
    num_heads, in_size, out_size = weight_HAB.shape
    name = _format_of(weight_HAB, compute_dtype)
    if name == "fp8":
        raise ConfigError("weights of heads are packed from float32 or bfloat16")
    size = packed_heads_bytes(num_heads, in_size, out_size, weight_HAB.dtype, compute_dtype=compute_dtype, isa=chosen)
    data = torch.empty(size, dtype=torch.uint8)
    for head, own in enumerate(data.view(num_heads, -1)):
        _native.pack(chosen, name, _is_bf16(compute_dtype), _bits(weight_HAB[head].T), own, num_threads)
    return PackedHeads(data, num_heads, in_size, out_size, name, compute_dtype, chosen)


def pack_mlp(weights: StoredMlp, *, compute_dtype: torch.dtype, isa: str | None = None, num_threads: int) -> PackedMlp:
    """`pack_linear` of all three."""
    gate, up, down = (
        pack_linear(w, compute_dtype=compute_dtype, isa=isa, num_threads=num_threads)
        for w in (weights.gate, weights.up, weights.down)
    )
    return PackedMlp(gate, up, down)


def _bits(weight: Tensor) -> Tensor:
    """The stored values as integers of their size: the extension copies them and need not know fp8."""
    return weight.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.itemsize])
