"""Columns that other trainers read, and that would be lost in silence here: rows that have them are refused.

What becomes of a column depends on what is done with the rows: their prompts are asked (the columns go to rewards),
their responses are learned from, or their completions are compared. docs/data.md has a table of these columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.tasks.rows import OF_TASK, WEIGHT, Row
from flowrl.tasks.task import Task

RowUse = Literal["prompts", "responses", "preferences"]
"""What is done with rows: prompts are asked, responses are learned from, preferences are compared."""
LEARNED: tuple[RowUse, ...] = ("responses", "preferences")
EVERYWHERE: tuple[RowUse, ...] = ("prompts", *LEARNED)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REFUSED: Mapping[str, tuple[tuple[RowUse, ...], str]] = {
    **dict.fromkeys(MEDIA, (EVERYWHERE, "policies read text alone; take the column, or such rows, out of the data")),
    "chat_template_kwargs": (
        EVERYWHERE,
        "variables of the chat template are the same for all rows; take the column out of the data, and set them with "
        "--chat-template-kwargs",
    ),
    "functions": (
        EVERYWHERE,
        "definitions of tools are read from the column 'tools'; write FILE:tools=functions, or tools=none if it has "
        "another meaning",
    ),
    WEIGHT: (
        LEARNED,
        "a row has no weight in the loss, only its messages have one; repeat rows or leave rows out, and take the "
        "column out of the data",
    ),
    "label": (
        ("responses",),
        "its completion is undesirable, and would be imitated; leave such rows out, train with kto, or write "
        "FILE:answer=completion to learn from all completions",
    ),
    **dict.fromkeys(
        ("completion_mask", "assistant_masks"),
        (LEARNED, "what is trained is told by the messages' roles and weights; take the column out of the data"),
    ),
}
"""Column -> (where rows with a value in it are refused, what to do)."""


def require_served(task: Task, rows: Iterable[Row], use: RowUse) -> None:
    """Raise ConfigError for the first row with a column that another trainer would read, and this one would not."""
    wanted = {name: advice for name, (uses, advice) in REFUSED.items() if use in uses}
    mixed = len(task.sources) > 1
    options: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if wanted.keys().isdisjoint(row.columns):
            continue
        source = str(row.columns[OF_TASK]) if mixed else task.name
        if source not in options:
            options[source] = Task(source).options
        for name, advice in wanted.items():
            if name in row.columns and _is_lost(name, row.columns, options[source]):
                raise ConfigError(
                    f"{row.place or source}: the row has {name} = {str(row.columns[name])[:40]!r}, which is not read "
                    f"here: {advice}"
                )


def _is_lost(name: str, columns: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the column's value says something that other trainers heed."""
    value = columns[name]
    if name == "functions":
        return "tools" not in options and bool(value)
    if name == WEIGHT:
        return isinstance(value, int | float) and value != 1
    if name == "label":
        return value is False and "completion" in columns and "answer" not in options
    return value is not None and value != "" and (not isinstance(value, tuple | Mapping) or len(value) > 0)
