"""Texts without roles: a column of each record, or a .txt file, which is one text."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.tasks.row_reading.files import MALFORMED, WHERE, require_choices
from flowrl.tasks.row_reading.record_formats import Malformed, NothingInIt, RawRow
from flowrl.tasks.rows import Row


@dataclass(frozen=True)
class TextKeys:
    """Options of a task whose rows are texts."""

    text: str = "text"
    """The column that holds the text."""
    split: str = "train"
    """Datasets with several splits: the one to read."""
    config: str = ""
    """Datasets of the Hub with several configurations: the one to read."""
    malformed: str = "stop"
    """Rows that cannot be used: stop before training, or skip and count them."""
    rows: str = "auto"
    """Where texts and their tokens are: memory; disk; auto, which is disk for files of more than 256 MiB."""

    def __post_init__(self) -> None:
        require_choices(self, malformed=MALFORMED, rows=WHERE)


def of_record(keys: TextKeys, place: str, record: RawRow) -> tuple[Row, ...]:
    """The row of one record. Raises Malformed."""
    row = _row(place, record, keys)
    if not row.prompt.strip():
        raise NothingInIt(f"{place}: the text is empty")
    return (row,)


def _row(place: str, record: RawRow, keys: TextKeys) -> Row:
    text = record.get(keys.text)
    if not isinstance(text, str):
        there = f"is {str(text)[:60]!r}" if keys.text in record else f"is missing (there are {', '.join(record)})"
        raise Malformed(
            f"{place}: the column {keys.text!r} {there}; it needs text; to use another column, name it after the "
            "task's name: FILE:text=COLUMN"
        )
    return Row(({"role": "user", "content": text},), place=place)
