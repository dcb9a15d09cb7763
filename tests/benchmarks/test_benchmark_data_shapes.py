"""The table of data shapes: its cells are those of a run, and what would be a traceback is a fault."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.data import data_shapes
from benchmarks.data.data_shape_cases import CASES, SHAPES, Shape
from benchmarks.data.data_shapes import BEGIN, END, PAGE, Cell, cell_of, results, table
from flowrl.errors import ConfigError

OF_NAME: Mapping[str, Shape] = {shape.name: shape for shape in SHAPES}
CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "name", ["JSON array", "Parquet", "Alpaca", "pairs as messages", "labels", "GSM8K, its answers"]
)
def test_no_cell_is_a_traceback_or_several_lines(name: str, tmp_path: Path) -> None:
    found = dict(results([OF_NAME[name]], tmp_path / "cell"))
    assert [place for place, cell in found.items() if cell.fault] == []
    assert found[name, "good"] == Cell(20) and all(cell.rows or cell.said for cell in found.values())


@pytest.mark.parametrize(
    ("shape", "case", "says", "skipping"),
    [
        ("JSON array", "bytes that are not UTF-8", "rows.json:19: the byte 0xe9 at position 13", None),
        ("Parquet", "bytes that are not UTF-8", "row 5: the column 'prompt' has the byte 0xe9 at position 0", 19),
        ("pairs as messages", "a row without its key", "rows.jsonl:5: the column 'rejected' is missing", 19),
        ("Alpaca", "a value of another type", "rows.jsonl:5: the instruction with its input", 19),
        ("answers of SFT", "a row without its key", "no answer to learn from, the first at rows.jsonl:5", None),
        ("answers of SFT", "a value of another type", "rows.jsonl:5: the answer is", 19),
        ("GSM8K, its answers", "a value of 8 MiB", "rows.jsonl:5: the columns hold 8.0 MiB of text", 19),
        ("GSM8K, its answers", "a row without its key", "rows.jsonl:5: the row has no answer to compare", None),
        ("dataset of the Hub, offline", "empty", "task 'acme/rows' has no rows at all", None),
    ],
)
def test_what_is_said_names_place_and_remedy(
    shape: str, case: str, says: str, skipping: int | None, tmp_path: Path
) -> None:
    cell = cell_of(OF_NAME[shape], CASE[case], tmp_path / "cell")
    assert says in cell.said and "; " in cell.said and cell.skipping == skipping and not cell.fault


@pytest.mark.parametrize(
    ("raised", "fault"),
    [(KeyError("x"), "a traceback"), (ConfigError("one\ntwo"), "several lines"), (ConfigError("x" * 501), "too long")],
)
def test_what_nobody_should_see_is_a_fault(
    raised: Exception, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise raised

    monkeypatch.setattr(data_shapes, "_used", fail)
    cell = cell_of(OF_NAME["JSON lines"], CASE["good"], tmp_path / "cell")
    assert cell.fault == fault and f"**{fault}** 1" in data_shapes._text(cell, {})


def test_the_table_has_every_shape_and_each_sentence_once() -> None:
    cells = {
        (shape.name, case.name): Cell(None, f"a/rows.{n}: no", skipping=3)
        for n in ("csv", "tsv")
        for shape in SHAPES
        for case in CASES
    }
    text = table(cells)
    assert all(f"| {shape.name} |" in text for shape in SHAPES)
    assert text.endswith("\n\n1. `FILE: no`") and "refused 1; skipping 3" in text


def test_the_page_has_the_table_of_these_shapes() -> None:
    kept = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in kept.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]] == [shape.name for shape in SHAPES]
    assert "**" not in kept
