"""The same token ids and the same logits, bit for bit, however the work is cut, shared, cached or interrupted.

Every test compares the digest: SHA-256 over the fp32 logits of all sampled rows. Models with fp8 index keys run the
native indexer where this installation has it; one of them runs the reference all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native import needs_native
from tests.oracle.harness import engine, tokens
from tests.tiny import make_checkpoint
from torch import Tensor

from longfill import LLM, SamplingParams
from longfill.kernels import select
from longfill.kernels.cpu import NativeBackend
from longfill.kernels.interface import Linear, Mlp
from longfill.kernels.reference import linear

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=6, ignore_eos=True)
LENGTH = 341
"""Prompt tokens: above every chunk size but the last, no multiple of a page, far above index_topk (16)."""
MODELS = {
    "float32": ("glm_moe_dsa", torch.float32, {}),
    "bfloat16": ("deepseek_v32", torch.bfloat16, {}),
    "bfloat16_reference": ("deepseek_v32", torch.bfloat16, {"kernel_backend": "reference"}),
    "fp8_ds_mla": ("glm_moe_dsa", torch.bfloat16, {"kv_cache_dtype": "fp8_ds_mla"}),
    "fp8": ("deepseek_v32", torch.bfloat16, {"kv_cache_dtype": "fp8"}),
    "one_head": ("glm_moe_dsa", torch.float32, {"attention_path": "workspace"}),
}
USUAL = ("float32", "bfloat16", "bfloat16_reference")
"""Both formats of index keys, and both backends of one."""
CUTS = (1, 7, 64, 333, 4096)

Result = tuple[list[int], str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("models")
    for name, (family, dtype, _) in MODELS.items():
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1} if name == "one_head" else {}
        make_checkpoint(root / name, family, dtype=dtype, **heads)
    yield {name: root / name for name in MODELS}
    _expected.cache_clear()


def start(folder: Path, model: str, **args: Any) -> LLM:
    return engine(folder, **({"dtype": "auto", "digest": True} | MODELS[model][2] | args))


def results(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Result]:
    outputs = llm.generate(prompts, params)
    assert all(out.finished and out.digest is not None for out in outputs)
    return [(out.outputs[0].token_ids, str(out.digest)) for out in outputs]


@functools.cache
def _expected(folder: Path, model: str, seed: int, length: int, params: SamplingParams) -> Result:
    llm = start(folder, model, max_num_batched_tokens=4096, enable_prefix_caching=False)
    return results(llm, [tokens(length, seed)], params)[0]


def expected(folders: dict[str, Path], model: str, seed: int = 0, length: int = LENGTH) -> Result:
    """What a request alone gives, in one step, with nothing cached."""
    return _expected(folders[model], model, seed, length, GREEDY)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", CUTS)
def test_det_01_same_bits_for_every_chunk_size(folders: dict[str, Path], model: str, chunk: int) -> None:
    page = {1: 64, 7: 4, 64: 1, 333: 64, 4096: 4}[chunk]
    length = 40 if chunk == 1 else LENGTH
    llm = start(folders[model], model, max_num_batched_tokens=chunk, block_size=page)
    assert results(llm, [tokens(length)]) == [expected(folders, model, length=length)]
    assert llm.stats.steps >= length // chunk, "the prompt was not really cut"


@pytest.mark.parametrize("page", [1, 4, 64])
def test_same_bits_for_every_page_size(folders: dict[str, Path], page: int) -> None:
    for model in USUAL:
        llm = start(folders[model], model, block_size=page, max_num_batched_tokens=50)
        assert results(llm, [tokens(LENGTH)]) == [expected(folders, model)]


@needs_native
def test_the_models_run_the_kernels_that_they_are_here_for(folders: dict[str, Path]) -> None:
    for model in MODELS:
        assert start(folders[model], model).engine.worker.kernels.native_index == (model != "bfloat16_reference")


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    """An engine sets the process's thread count; the tests behind it count on one."""
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("one_thread_after")
@pytest.mark.parametrize(
    ("model", "threads"),
    [
        ("bfloat16", 2),
        ("bfloat16", 3),
        *[pytest.param(model, 2, marks=pytest.mark.slow) for model in ("float32", "bfloat16_reference")],
    ],
)
def test_same_bits_for_every_number_of_threads(folders: dict[str, Path], model: str, threads: int) -> None:
    for chunk in (64, 4096):
        llm = start(folders[model], model, num_threads=threads, max_num_batched_tokens=chunk)
        assert torch.get_num_threads() == threads
        assert results(llm, [tokens(LENGTH)]) == [expected(folders, model)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread_after")
@pytest.mark.parametrize("model", ["float32", "bfloat16_reference"])
def test_det_01_same_bits_for_every_chunk_size_with_three_threads(folders: dict[str, Path], model: str) -> None:
    """From three threads on the BLAS may sum float32 products in other orders than one thread does; cuts stay alike."""
    given = [
        results(start(folders[model], model, num_threads=3, max_num_batched_tokens=chunk), [tokens(LENGTH)])
        for chunk in (7, 64, 4096)
    ]
    assert given[1:] == given[:1] * 2


@needs_native
@pytest.mark.usefixtures("one_thread_after")
def test_same_bits_when_threads_share_a_rows_keys(tmp_path: Path) -> None:
    """Contexts above 4,096: the native indexer cuts the keys of few rows among threads, but those of many rows not."""
    length, chunk = 4600, 4096
    args: dict[str, Any] = {"dtype": "auto", "digest": True, "kernel_backend": "cpu", "max_model_len": length + 8}
    make_checkpoint(tmp_path, "deepseek_v32", dtype=torch.bfloat16, num_hidden_layers=1, max_position_embeddings=8192)
    given = [
        results(engine(tmp_path, **args, num_threads=threads, max_num_batched_tokens=budget), [tokens(length)])
        for threads, budget in ((1, length), (2, chunk), (3, chunk))
    ]
    assert given[1:] == given[:1] * 2


@pytest.mark.parametrize("model", USUAL)
def test_same_bits_after_a_prefix_hit_of_every_page_count(folders: dict[str, Path], model: str) -> None:
    page, prompt = 4, tokens(41)
    want = expected(folders, model, length=41)
    llm = start(folders[model], model, block_size=page)
    for hit_pages in range(len(prompt) // page + 1):
        llm.engine.cache.reset_prefix_cache()
        if hit_pages:
            # Fills exactly `hit_pages` pages of the same prefix, then leaves it.
            llm.generate(prompt[: hit_pages * page], SamplingParams(temperature=0, max_tokens=1))
        out = llm.generate(prompt, GREEDY)[0]
        assert out.num_cached_tokens == hit_pages * page
        assert (out.outputs[0].token_ids, out.digest) == want


@pytest.mark.parametrize("model", USUAL)
def test_same_bits_beside_sixteen_other_requests(folders: dict[str, Path], model: str) -> None:
    others = [tokens(5 + 9 * i, seed=100 + i) for i in range(16)]
    llm = start(folders[model], model, max_num_seqs=17, max_num_batched_tokens=64)
    got = results(llm, [*others[:8], tokens(LENGTH), *others[8:]])
    assert got[8] == expected(folders, model)
    alone = [expected(folders, model, seed=100 + i, length=5 + 9 * i) for i in range(16)]
    assert got[:8] + got[9:] == alone


@pytest.mark.parametrize("model", USUAL)
@pytest.mark.parametrize("caching", [True, False])
def test_same_bits_when_requests_preempt_each_other(folders: dict[str, Path], model: str, caching: bool) -> None:
    lengths = [30, 33, 29, 31]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = start(
        folders[model], model, block_size=4, max_num_batched_tokens=23, max_model_len=60, num_gpu_blocks_override=36,
        enable_prefix_caching=caching,
    )  # fmt: skip
    got = results(llm, [tokens(n, seed=i) for i, n in enumerate(lengths)], params)
    assert llm.stats.preemptions > 0, "the pool was not tight enough to test anything"
    assert got == [_expected(folders[model], model, i, n, params) for i, n in enumerate(lengths)]


def test_sampled_tokens_do_not_depend_on_the_cut_either(folders: dict[str, Path]) -> None:
    want = _expected(folders["float32"], "float32", 0, LENGTH, SAMPLED)
    assert want[0] != expected(folders, "float32")[0]
    for chunk in (7, 64):
        llm = start(folders["float32"], "float32", max_num_batched_tokens=chunk)
        assert results(llm, [tokens(LENGTH)], SAMPLED) == [want]


def test_the_digest_sees_a_sum_in_another_order(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate: without the padding of narrow products, cutting the prompt shows in the digest."""
    given = {"kernel_backend": "reference", "max_num_batched_tokens": 1}
    want = results(start(folders["one_head"], "one_head", **given), [tokens(70)])[0]
    monkeypatch.setattr(linear, "MIN_ROWS", 1)
    token_ids, digest = results(start(folders["one_head"], "one_head", **given), [tokens(70)])[0]
    assert digest != want[1]
    assert len(token_ids) == GREEDY.max_tokens


class _SplitsAloneRows(NativeBackend):
    """A product of one row takes its sum in two halves: a split that depends on the number of rows."""

    def linear(
        self, x_TC: Tensor, weight: Linear, *, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if x_TC.shape[0] > 1:
            return super().linear(x_TC, weight, dtype=dtype, out=out)
        half = x_TC.shape[1] // 2
        low, high = x_TC.clone(), x_TC.clone()
        low[:, half:], high[:, :half] = 0, 0
        total = super().linear(low, weight, dtype=dtype) + super().linear(high, weight, dtype=dtype)
        return total if out is None else out.copy_(total)


class _BreaksOneRow(NativeBackend):
    """A padded row's NaN that leaks: the last row of calls with several is broken."""

    def mlp(self, x_TC: Tensor, weights: Mlp) -> Tensor:
        out_TC = super().mlp(x_TC, weights)
        if x_TC.shape[0] > 1:
            out_TC[-1] = float("nan")
        return out_TC


@needs_native
def test_the_digest_sees_a_native_sum_in_another_order(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate: a native product that splits its sum by the number of rows shows as soon as the prompt is cut."""
    monkeypatch.setattr(select, "NativeBackend", _SplitsAloneRows)
    for model in ("float32", "bfloat16"):
        uncut = results(start(folders[model], model, max_num_batched_tokens=4096), [tokens(70)])[0]
        cut = results(start(folders[model], model, max_num_batched_tokens=1), [tokens(70)])[0]
        assert cut[1] != uncut[1]


@needs_native
def test_a_nan_in_one_row_is_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate: what a broken row would give is no token, and the request fails; rows that are alone are not broken."""
    monkeypatch.setattr(select, "NativeBackend", _BreaksOneRow)
    [broken] = start(folders["bfloat16"], "bfloat16", max_num_batched_tokens=4096).generate([tokens(70)], GREEDY)
    assert broken.outputs[0].finish_reason == "error"
    assert "contain NaN" in str(broken.outputs[0].stop_reason)
    [whole] = start(folders["bfloat16"], "bfloat16", max_num_batched_tokens=1).generate([tokens(70)], GREEDY)
    assert whole.outputs[0].finish_reason == "length"
