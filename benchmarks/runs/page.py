"""A generated part of a page of the documents, between two marks."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, text: str, begin: str, end: str) -> None:
    """Replace what is between the lines `begin` and `end`. Raises ValueError if they are not there."""
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} has no place for the table: it needs the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
