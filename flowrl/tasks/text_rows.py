"""Texts without roles: a column of each record, or a .txt file, which is one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.hub.name import HubName
from flowrl.tasks.files import read_records
from flowrl.tasks.formats import Record
from flowrl.tasks.malformed import Malformed, Reading
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

    def __post_init__(self) -> None:
        if self.malformed not in ("stop", "skip"):
            raise ConfigError(f"option malformed of a task is {self.malformed!r}; it needs stop, or skip")


def text_rows(source: Path | HubName, keys: TextKeys, reading: Reading) -> Iterator[Row]:
    """A row for each text; one without any text is left out and counted. Raises ConfigError."""
    for place, record in read_records(source, keys, reading):
        row = reading.at(place, lambda place=place, record=record: _row(place, record, keys))  # type: ignore[misc]
        if row is not None and row.prompt.strip():
            yield row
        elif row is not None:
            reading.skipped.append(f"{place}: the text is empty")


def _row(place: str, record: Record, keys: TextKeys) -> Row:
    text = record.get(keys.text)
    if not isinstance(text, str):
        there = f"is {str(text)[:60]!r}" if keys.text in record else f"is missing (there are {', '.join(record)})"
        raise Malformed(
            f"{place}: the column {keys.text!r} {there}; it needs text; to use another column, name it after the "
            "task's name: FILE:text=COLUMN"
        )
    return Row(({"role": "user", "content": text},), place=place)
