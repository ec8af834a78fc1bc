"""The comparison at start: silent on sound kernels, and the name of one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.native import needs_native
from torch import Tensor

from longfill.errors import KernelError
from longfill.kernels import select
from longfill.kernels.cpu import (
    NativeBackend,
    attention,
    experts,
    indexer,
    isa_names,
    linear,
    packing,
    rows,
    self_test,
    selftest,
)
from longfill.kernels.reference.backend import ReferenceBackend
from longfill.kernels.select import KernelChoice, make_backends

pytestmark = needs_native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = KernelChoice(topk=8, native=True, native_index=True, use_workspace=False, screen="auto", force_mqa=False)
REFERENCE = replace(NATIVE, native=False, native_index=False)


def written(method: str, args: tuple[Any, ...], result: Any) -> Tensor:
    """What a backend's method gives: its result, or the argument that it writes to."""
    if method in ("store_latent", "store_index_keys"):
        cache = args[5] if method == "store_latent" else args[4]
        values: Tensor = cache.rows_NBX if method == "store_latent" else cache.scales_NB
        return values
    out = {
        "per_head": 2,
        "rotate": 3,
        "index_topk": 4,
        "merge_topk": 2,
        "sparse_mla": 5,
        "dense_mla": 5,
        "gather_rows": 2,
        "put_rows": 2,
    }
    found: Tensor = args[out[method]] if method in out else result[1] if isinstance(result, tuple) else result
    return found


def break_method(monkeypatch: pytest.MonkeyPatch, method: str, spoil: Callable[[Tensor], object]) -> None:
    sound = getattr(NativeBackend, method)

    def broken(self: NativeBackend, *args: Any, **kwargs: Any) -> Any:
        result = sound(self, *args, **kwargs)
        spoil(written(method, args, result))
        return result

    monkeypatch.setattr(NativeBackend, method, broken)


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    """A process in which nothing has been compared yet."""
    select._check_once.cache_clear()
    yield
    select._check_once.cache_clear()


@pytest.mark.parametrize("isa", isa_names())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_01_sound_kernels_of_every_instruction_set_pass(
    monkeypatch: pytest.MonkeyPatch, isa: str, dtype: torch.dtype
) -> None:
    for module in (attention, experts, indexer, linear, packing, rows):
        monkeypatch.setattr(module, "selected_isa", lambda: isa)
    self_test(ReferenceBackend(), dtype)


METHODS = (
    "linear", "per_head", "mlp", "route", "experts", "fold_experts", "rms_norm", "rotate", "store_latent",
    "store_index_keys", "put_rows", "index_queries", "index_topk", "merge_topk", "sparse_mla", "dense_mla",
    "gather_rows",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_dsa_12_one_wrong_number_names_the_kernel_and_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, method: str, dtype: torch.dtype
) -> None:
    def spoil(values: Tensor) -> None:
        last = values.flatten(0, -2)[-1] if values.dim() > 1 else values
        if values.dtype == torch.uint8:
            values[0, 0, -4:] = 0x66  # a slot that rows are stored in
        else:
            last[-1] = 99

    break_method(monkeypatch, method, spoil)
    with pytest.raises(KernelError, match=rf"native kernel .*\b{method}\b.*LONGFILL_ISA.*--kernel-backend reference"):
        make_backends(NATIVE, dtype, 1)


def test_dsa_12_a_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, "mlp", lambda out_TC: out_TC[-1].fill_(float("nan")))
    with pytest.raises(KernelError, match=r"native kernel mlp .* differs by nan"):
        make_backends(NATIVE, torch.float32, 1)


def test_dsa_12_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(attention, "dense_mla", fails)
    with pytest.raises(KernelError, match=r"native kernel dense_mla \(.*fails: no such page"):
        make_backends(NATIVE, torch.bfloat16, 1)


def test_a_process_compares_once_a_dtype_and_never_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[torch.dtype] = []
    monkeypatch.setattr(select, "self_test", lambda _, dtype: compared.append(dtype))
    make_backends(REFERENCE, torch.float32, 1)
    assert compared == []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        make_backends(NATIVE, dtype, 1)
    assert compared == [torch.float32, torch.bfloat16]


def test_every_operation_of_a_backend_is_compared() -> None:
    packing_only = {"pack", "pack_mlp", "pack_heads", "packed_bytes"}
    assert {name for name in vars(NativeBackend) if not name.startswith("_")} - packing_only - {"copies"} == set(
        METHODS
    )
    assert selftest.CONTEXT > 64 > selftest.ROWS
