"""The template for a row's question: `--task.template 'Solve: {prompt}'`. It may name other columns of the row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from flowrl.errors import ConfigError
from flowrl.tasks.rows import OF_TASK, Row

AnyRow = TypeVar("AnyRow", bound=Row)
NAMED, EMPTY = "{prompt}", "{}"
FIELD = re.compile(r"\{(\w+)\}")
KEPT_BACK = ("answer", "chosen", "rejected", "completion")
"""Columns that a question must not reveal."""


def check_template(template: str) -> None:
    """Raise ConfigError for a template that has no place for the prompt."""
    if template and NAMED not in template and EMPTY not in template:
        raise ConfigError(f"the task's template {template!r} has no place for the prompt; write {NAMED} where it goes")


def asked_by(template: str, rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """The rows with their last message put into the template. Other braces are unchanged, such as those of
    \\boxed{}."""
    for row in rows:
        yield dataclasses.replace(row, turns=(*row.turns[:-1], {**row.turns[-1], "content": _asked(template, row)}))


def asked_of_source(row: AnyRow, source: str, template: str) -> AnyRow:
    """The row, with the name of its source in a mixture added unless that is "", and put into the template if there is
    one."""
    if source:
        row = dataclasses.replace(row, columns={**row.columns, OF_TASK: source})
    return next(asked_by(template, [row])) if template else row


def _asked(template: str, row: Row) -> str:
    if NAMED not in template:
        template = template.replace(EMPTY, NAMED, 1)

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name == "prompt":
            return row.prompt
        if name in row.columns and name not in KEPT_BACK:
            return str(row.columns[name])
        return found[0]

    return FIELD.sub(value, template)
