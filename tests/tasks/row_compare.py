"""Rows in memory and on disk, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flowrl.tasks import Rows, Task, load_preferences
from flowrl.tasks.row_reading import row_loading
from flowrl.tasks.row_reading.rows_on_disk import (
    IndexedRows,
    asked_ids,
    join_rows,
    lowest_asked,
    lowest_rows,
    match_rows,
    prompt_ids,
    rows_by_id,
)

WHERE = {"memory": 1 << 60, "disk": -1}
"""Where rows are, and how large files have to be that stay on disk."""


@contextmanager
def rows_in(where: str) -> Iterator[None]:
    """Rows of tasks that leave it open are in `memory` or on `disk`; what was loaded before is forgotten."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_loading, "AUTO_BYTES", WHERE[where])
        for load in (row_loading.all_rows, row_loading.all_demonstrations, row_loading.all_texts, load_preferences):
            load.cache_clear()
        row_loading.UNREPEATED.clear()
        yield


def both(name: str, load: Callable[..., Rows], *args: Any, **options: Any) -> tuple[Rows, Rows]:
    """The rows of a task in memory and on disk."""
    found = []
    for where in WHERE:
        with rows_in(where):
            found.append(load(Task(name, **options), *args))
    memory, disk = found
    assert isinstance(disk.train, IndexedRows) and isinstance(memory.train, tuple)
    return memory, disk


def require_same(memory: Rows, disk: Rows) -> None:
    """Raise AssertionError unless both have the same rows in the same order and part, by everything asked of them."""
    for kept, read in ((memory.train, disk.train), (memory.held_out, disk.held_out)):
        assert tuple(read) == kept and [row.place for row in read] == [row.place for row in kept] and len(kept) > 1
        assert list(prompt_ids(read)) == [row.prompt_id for row in read] == list(prompt_ids(kept))
        assert list(asked_ids(read)) == [row.asked_id for row in read] == list(asked_ids(kept))
        assert all(rows_by_id(read)[row.prompt_id] == row for row in kept) and len(rows_by_id(read)) == len(kept)
        assert tuple(lowest_rows(read, 3)) == lowest_rows(kept, 3) and tuple(lowest_asked(read, 3)) == lowest_asked(
            kept, 3
        )
        assert tuple(read[2:5]) == kept[2:5] and read[-1] == kept[-1]
        others = [*range(1, len(kept)), 0]
        assert dict(match_rows(read, others)) == match_rows(kept, others)
    assert (disk.repeated, disk.skipped) == (memory.repeated, memory.skipped)
    assert tuple(join_rows(disk.train, disk.held_out)) == (*memory.train, *memory.held_out)
