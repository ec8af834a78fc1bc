"""The kernel cases: what they count, that kernel and torch formulation compute the same, and what is reported."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.native import needs_native

from longfill.errors import ConfigError
from longfill.kernels.cpu import available, isa_names

if available():
    from longfill.bench import cases_attention, cases_index, cases_linear, cases_rows, kernels
    from longfill.bench.ceilings import Ceilings, Machine
    from longfill.bench.timing import clock
    from longfill.bench.work import Case, Setting, TorchPeer, Work

pytestmark = needs_native

SETTING_ARGS = {"threads": 2, "shrink": 1}
CLOSE = {"rtol": 0.05, "atol": 0.06}
"""bf16 results whose sums are cut differently."""


@pytest.fixture(params=isa_names())
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(isa=request.param, **SETTING_ARGS)


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"HIDDEN": 128, "INNER": 256, "EXPERTS": 4, "PER_TOKEN": 2}.items():
        monkeypatch.setattr(cases_linear, name, size)


def best() -> Setting:
    return Setting(isa=isa_names()[0], **SETTING_ARGS)


def test_index_topk_and_torch_choose_the_same(setting):
    shape = cases_index.Shape(heads=4, dim=32, topk=16, rows=70, keys=1500)
    work = cases_index.index_case(shape, setting)
    work.call()
    selection_TK = work.call.args[4]
    chosen = torch.cat(work.torch.call()).sort(-1).values
    # Scores are bf16 in torch: near ties may fall the other way.
    shared = sum(len(set(a) & set(b)) for a, b in zip(selection_TK.tolist(), chosen.tolist(), strict=True))
    assert shared >= 0.97 * chosen.numel()
    pairs = sum(position + 1 for position in range(1430, 1500))
    assert (work.items, work.flops) == (pairs, 2 * pairs * 4 * 32)


@pytest.mark.parametrize("data", ["ascending", "narrow", "zeros"])
def test_the_hard_data_sets_are_what_they_say(data):
    shape = cases_index.Shape(heads=2, dim=16, topk=8, rows=4, keys=256, data=data)
    k_LD, q_TID, w_TI = cases_index._data(shape, 4, 256)
    scores_TL = torch.einsum("ti,til->tl", w_TI, torch.relu(q_TID @ k_LD.T))
    if data == "ascending":
        assert (scores_TL.diff(dim=-1) >= 0).all()
    elif data == "narrow":
        assert (scores_TL.std(-1) <= 0.02 * scores_TL.amax(-1)).all()
    else:
        assert (scores_TL == 0).float().mean() > 0.8


@pytest.mark.parametrize("format", ["bfloat16", "fp8", "fp8_ds_mla"])
def test_sparse_mla_and_torch_agree(setting, format):
    shape = cases_attention.Shape(heads=3, rank=128, rope_dim=16, topk=1500, rows=5, context=1600, format=format)
    work = cases_attention.sparse_case(shape, setting)
    work.call()
    torch.testing.assert_close(work.call.args[5], work.torch.call(), **CLOSE)
    assert work.flops == 2 * 5 * 3 * 1500 * (144 + 128)


def test_sparse_mla_of_many_rows_at_a_time_agrees_too():
    shape = cases_attention.Shape(heads=2, rank=128, rope_dim=16, topk=64, rows=70, context=300, format="bfloat16")
    work = cases_attention.sparse_case(shape, best())
    work.call()
    torch.testing.assert_close(work.call.args[5], work.torch.call(), **CLOSE)


def test_dense_mla_and_torch_agree(setting):
    shape = cases_attention.Shape(heads=2, rank=128, rope_dim=16, topk=1, rows=37, context=37, format="bfloat16")
    work = cases_attention.dense_case(shape, setting)
    work.call()
    torch.testing.assert_close(work.call.args[5], work.torch.call(), **CLOSE)
    assert work.flops == sum(2 * 2 * (row + 1) * (144 + 128) for row in range(37))


@pytest.mark.parametrize("format", ["bfloat16", "fp8", "fp8_ds_mla"])
def test_gather_rows_and_torch_agree(format):
    shape = cases_attention.Shape(heads=1, rank=128, rope_dim=16, topk=1, rows=1, context=150, format=format)
    work = cases_attention.gather_case(shape, best())
    out_LX = work.call.args[2]
    work.call()
    gathered = out_LX.clone()
    work.torch.call()
    assert torch.equal(gathered, out_LX)


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 9])
def test_linear_and_torch_agree(setting, format, rows):
    work = cases_linear.linear_case(rows, 256, 128, format, setting)
    for got, want in zip(work.call(), work.torch.call(), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    copies = len(work.call())
    assert work.flops == 2 * copies * rows * 256 * 128
    assert work.bytes > copies * 256 * 128


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.usefixtures("small_weights")
def test_experts_and_torch_agree(setting, format):
    work = cases_linear.experts_case(24, format, setting)
    torch.testing.assert_close(work.call(), work.torch.call(), **CLOSE)
    assert work.flops == 2 * 3 * 24 * 2 * 128 * 256


@pytest.mark.parametrize("case", cases_rows.CASES if available() else (), ids=lambda case: case.name)
def test_row_operations_run(case):
    work = case.make(dataclasses.replace(best(), shrink=1024))
    work.call()
    work.torch.call()
    assert work.flops == 0 < work.bytes


def test_rms_norm_and_torch_agree():
    work = cases_rows.norm_case(5, 96, best())
    torch.testing.assert_close(work.call(), work.torch.call(), **CLOSE)


def test_cases_have_names_of_their_own():
    names = [(case.kernel, case.name) for case in kernels.CASES]
    assert len(set(names)) == len(names)
    assert {kernel for kernel, _ in names} >= {"index_topk", "sparse_mla", "dense_mla", "linear", "experts"}


def test_cases_are_chosen_by_kernel_and_name():
    assert kernels.choose_cases([]) == list(kernels.CASES)
    chosen = kernels.choose_cases(["linear", "experts"], "fp8")
    assert {case.kernel for case in chosen} == {"linear", "experts"}
    assert all("fp8" in case.name for case in chosen)


def test_a_kernel_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(ConfigError, match=r"--kernel softmax.*index_topk"):
        kernels.choose_cases(["linear", "softmax"])
    with pytest.raises(ConfigError, match="--case no such"):
        kernels.choose_cases([], "no such")


ROOFS = {"bf16": 100.0, "fp32": 50.0, "read": 10.0, "copy": 5.0}


def make_work(**changes: object) -> Work:
    fields = {"flops": 1000.0, "bytes": 10.0, "math": "bf16", "traffic": "read", "items": 4, "item": "row"}
    return Work(call=lambda: None, torch=TorchPeer(lambda: None, "nothing"), **(fields | changes))


def test_the_roof_that_binds_is_the_one_that_takes_longer():
    roofs = Ceilings(1, **ROOFS)
    assert kernels.binding_ceiling(make_work(), roofs) == "bf16"
    assert kernels.binding_ceiling(make_work(bytes=99.0), roofs) == "bf16"
    assert kernels.binding_ceiling(make_work(bytes=101.0), roofs) == "read"
    assert kernels.binding_ceiling(make_work(bytes=51.0, traffic="copy"), roofs) == "copy"
    assert kernels.binding_ceiling(make_work(flops=0.0), roofs) == "read"


def test_a_result_is_held_against_the_better_ceiling_and_torch(monkeypatch):
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    machine = Machine(isa_names()[0], 1, lambda: now[0], buffer=64)
    ceilings = iter([80.0, 100.0])
    monkeypatch.setattr(machine, "measure", lambda _: next(ceilings))
    work = make_work(flops=100.0, bytes=1.0)
    work = dataclasses.replace(work, call=lambda: take(2.0), torch=TorchPeer(lambda: take(5.0), "slow"))
    [result] = kernels.run_cases([Case("k", "c", lambda _: work)], machine, Ceilings(1, **ROOFS), repeats=2)
    assert (result.seconds, result.flops_per_s, result.ceiling, result.of_ceiling) == (2.0, 50.0, 100.0, 0.5)
    assert (result.torch_seconds, result.torch_ratio, result.intensity) == (5.0, 2.5, 100.0)
    assert (result.ns_per_item, result.item, result.limit) == (0.5e9, "row", "bf16")


@pytest.mark.slow  # a busy machine has a lower ceiling while it is measured than afterwards
def test_a_real_case_stays_below_its_ceiling_by_no_more_than_noise():
    shape = cases_index.Shape(heads=8, dim=64, topk=16, rows=32, keys=4096)
    case = Case("index_topk", "small", lambda setting: cases_index.index_case(shape, setting))
    machine = Machine(isa_names()[0], 1, clock(1, processor_time=True), buffer=2**20)
    seen: list[kernels.KernelResult] = []
    [result] = kernels.run_cases([case], machine, machine.all(), repeats=3, with_torch=False, on_result=seen.append)
    assert seen == [result]
    assert 0.02 < result.of_ceiling < 1.1
    assert result.torch_seconds is None
