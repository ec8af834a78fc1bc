"""A page is one record: its sizes are the published numbers, its segments tile it, bad dimensions are refused."""

import itertools
from dataclasses import replace

import pytest

from longfill.cache import RecordLayout
from longfill.cache.formats import INDEX_FORMATS, LATENT_FORMATS, latent_row_bytes
from longfill.errors import ConfigError
from longfill.units import NumPages, PageSize

GLM = RecordLayout(
    page_size=PageSize(64),
    num_layers=78,
    full_layers=tuple(range(0, 78))[:21],
    latent_format="bfloat16",
    index_format="fp8",
    kv_lora_rank=512,
    rope_dim=64,
    index_head_dim=128,
)


@pytest.mark.parametrize(
    ("latent_format", "row", "total"),
    [
        ("bfloat16", 1152, 97_127_497_728),
        ("fp8", 576, 50_017_075_200),
        ("fp8_ds_mla", 656, 56_560_189_440),
        ("float32", 2304, 1_048_576 * (78 * 2304 + 21 * 132)),
    ],
)
def test_a_million_tokens_of_glm_take_the_published_bytes(latent_format: str, row: int, total: int) -> None:
    layout = replace(GLM, latent_format=latent_format)
    assert layout.latent_row_bytes == row
    assert layout.bytes_per_token * 1_048_576 == total
    assert layout.pool_bytes(NumPages(1_048_576 // 64)) == total
    assert layout.record_bytes == 64 * layout.bytes_per_token


def test_a_record_matches_the_page_sizes_of_vllm() -> None:
    layout = replace(GLM, latent_format="fp8_ds_mla")
    assert layout.latent_offset(1) - layout.latent_offset(0) == 41_984
    assert layout.index_values_offset(1) - layout.index_values_offset(0) == 8_448


@pytest.mark.parametrize("full_layers", [(), (0,), (0, 2, 3), (1,)])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("latent", "index"), list(itertools.product(LATENT_FORMATS, INDEX_FORMATS)))
def test_segments_tile_the_record_without_gap_or_overlap(
    full_layers: tuple[int, ...], page_size: int, latent: str, index: str
) -> None:
    layout = RecordLayout(
        page_size=PageSize(page_size),
        num_layers=4,
        full_layers=full_layers,
        latent_format=latent,
        index_format=index if full_layers else None,
        kv_lora_rank=132,
        rope_dim=8,
        index_head_dim=12,
    )
    segments = [(layout.latent_offset(i), page_size * layout.latent_row_bytes) for i in range(4)]
    for layer in full_layers:
        segments.append((layout.index_values_offset(layer), page_size * 12 * {"fp8": 1, "float32": 4}[index]))
        if index == "fp8":
            segments.append((layout.index_scales_offset(layer), page_size * 4))
    end = 0
    for offset, size in segments:
        assert offset == end
        assert offset % 4 == 0
        end += size
    assert end == layout.record_bytes == page_size * layout.bytes_per_token


def test_fp8_ds_mla_has_one_scale_per_started_group_of_128_values() -> None:
    assert latent_row_bytes("fp8_ds_mla", 128, 8) == 128 + 4 + 16
    assert latent_row_bytes("fp8_ds_mla", 132, 8) == 132 + 8 + 16
    assert latent_row_bytes("fp8_ds_mla", 124, 8) == 124 + 4 + 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lora_rank": 31, "latent_format": "bfloat16"}, "kv_lora_rank 31 and rope_dim 64"),
        ({"rope_dim": 62, "latent_format": "fp8"}, "kv_lora_rank 512 and rope_dim 62"),
        ({"kv_lora_rank": 510, "rope_dim": 66, "latent_format": "fp8_ds_mla"}, "kv_lora_rank 510 and rope_dim 66"),
        ({"rope_dim": 63, "latent_format": "fp8_ds_mla"}, "rope_dim 63"),
        ({"index_head_dim": 30}, "index_head_dim 30"),
        ({"latent_format": "int8"}, "'int8' is not one of"),
        ({"index_format": "bfloat16"}, "'bfloat16' is not one of"),
        ({"index_format": None}, "index_format must be given"),
        ({"full_layers": (0, 78)}, "within 0..77"),
        ({"full_layers": (-1, 3)}, "within 0..77"),
        ({"full_layers": (3, 1)}, "must ascend"),
        ({"full_layers": (1, 1)}, "must ascend"),
        ({"page_size": PageSize(0)}, "page_size"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(GLM, **change)


def test_segments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer 78"):
        GLM.latent_offset(78)
    with pytest.raises(ConfigError, match="layer 21 has no indexer"):
        GLM.index_values_offset(21)
    with pytest.raises(ConfigError, match="no scales"):
        replace(GLM, index_format="float32").index_scales_offset(0)


def test_a_model_without_indexer_has_latent_rows_only() -> None:
    layout = replace(GLM, full_layers=(), index_format=None, index_head_dim=0)
    assert layout.bytes_per_token == 78 * 1152
