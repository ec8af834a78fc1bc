"""Tables and pictures from what the benchmarks print."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from longfill.bench import plots
from longfill.bench.prefill_plot import draw_prefill
from longfill.bench.roofline import draw_roofline
from longfill.bench.tables import markdown, nanoseconds
from longfill.errors import ConfigError

PNG = b"\x89PNG\r\n"
MACHINE = {"processor": "Test 1", "cores": 2, "memory_bytes": 2**34, "torch": "2", "longfill": "0"}


def kernel_values() -> dict[str, Any]:
    roofs = {"threads": 1, "bf16": 5e11, "fp32": 2.5e11, "read": 4e10, "copy": 3e10}
    case = {
        "kernel": "linear", "case": "2 rows", "threads": 1, "seconds": 0.002, "ns_per_item": 1234.0, "item": "row",
        "flops": 1e9, "flops_per_s": 4e11, "bytes_per_s": 1e10, "intensity": 40.0, "limit": "bf16",
        "of_ceiling": 0.8, "torch_ratio": 1.25,
    }  # fmt: skip
    moved = case | {"kernel": "gather_rows", "flops": 0, "limit": "copy", "of_ceiling": 0.333, "torch_ratio": None}
    two = [c | {"threads": 2} for c in (case, moved)]
    return {"machine": MACHINE, "ceilings": [roofs, roofs | {"threads": 2}], "kernels": [case, moved, *two]}


def prefill_values() -> dict[str, Any]:
    def result(engine: str, mode: str, length: int, status: str = "ok", **changes: Any) -> dict[str, Any]:
        done = status == "ok"
        return {
            "engine": engine, "mode": mode, "length": length, "status": status, "figures": {}, "ratio": None,
            "tokens_per_s": 1000.0 if done else None, "peak_rss_bytes": 2**30 if done else None,
        } | changes  # fmt: skip

    results = []
    for length in (1024, 4096):
        results.append(result("longfill", "", length, tokens_per_s=2500.0, ratio=2.5, figures={"share_of_peak": 0.7}))
        results.append(result("peer", "one-shot", length, "ok" if length == 1024 else "out of memory"))
    return {"machine": MACHINE, "model": "toy", "threads": 2, "results": results}


def test_the_kernel_table_has_a_row_a_case_and_columns_of_one_width():
    text = markdown(kernel_values())
    rows = [line for line in text.splitlines() if line.startswith("| `linear`")]
    assert rows[0].split("|")[1:-1] == [
        " `linear`      ", " 2 rows ", "     2.00 ", " 1.2 us/row ", " 400 GFLOP/s ", "   0.80 of bf16 ",
        "         1.2 ",
    ]  # fmt: skip
    assert len(rows) == 2
    assert "|   10.0 GB/s |   0.33 of copy |           - |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(line) for line in tables[4:8]} == {len(tables[4])}


def test_the_prefill_table_has_a_row_a_length_and_says_why_there_is_no_figure():
    rows = [line for line in markdown(prefill_values()).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells[0] == [
        "length", "longfill: tokens/s (GiB)", "peer, one-shot: tokens/s (GiB)", "times transformers", "share of peak",
    ]  # fmt: skip
    assert cells[2:] == [
        ["1,024", "2,500 (1.0)", "1,000 (1.0)", "2.5", "0.70"],
        ["4,096", "2,500 (1.0)", "out of memory", "2.5", "0.70"],
    ]


@pytest.mark.parametrize(("value", "text"), [(0.4321, "0.43 ns"), (12_345.0, "12.3 us"), (2.5e6, "2.50 ms")])
def test_short_times_are_readable(value, text):
    assert nanoseconds(value) == text


@pytest.mark.parametrize(("draw", "values"), [(draw_roofline, kernel_values()), (draw_prefill, prefill_values())])
def test_a_picture_is_drawn_for_light_and_for_dark_pages(tmp_path, draw, values):
    written = draw(values, tmp_path / "picture.png")
    assert [path.name for path in written] == ["picture.png", "picture-dark.png"]
    light, dark = (path.read_bytes() for path in written)
    assert light.startswith(PNG)
    assert dark.startswith(PNG)
    assert light != dark


def test_a_picture_of_an_unknown_kind_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="--plot"):
        draw_prefill(prefill_values(), tmp_path / "picture.nope")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'longfill\[bench\]'"):
        plots.require_matplotlib()


def test_lengths_are_labelled_in_powers_of_two():
    assert [plots.thousands(n) for n in (512, 1024, 3000, 2**20)] == ["512", "1K", "3,000", "1M"]


def test_the_processor_is_named(tmp_path: Path):
    from longfill.bench.machine import describe_machine, processor_name

    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Chip X\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n")
    assert processor_name(info) == "Chip X (cpu family 26, model 2)"
    assert processor_name(tmp_path / "nothing")
    assert describe_machine()["cores"] >= 1
