"""How a row's messages are worded: the template for its question, `--task.template 'Solve: {prompt}'`, which may name
other columns of the row, and what becomes of reasoning apart from the text, `--task.reasoning inline`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from flowrl.errors import ConfigError
from flowrl.tasks.rows import OF_TASK, REASONING, Row

AnyRow = TypeVar("AnyRow", bound=Row)
NAMED, EMPTY = "{prompt}", "{}"
FIELD = re.compile(r"\{(\w+)\}")
KEPT_BACK = ("answer", "chosen", "rejected", "completion")
"""Columns that a question must not reveal."""
THOUGHT = "<think>\n{}\n</think>\n\n{}"
"""A message with its reasoning as the templates of Qwen3, DeepSeek and others write it."""
WORDED = ("", "inline", "drop")
"""Values of the option `reasoning`."""


def check_template(template: str) -> None:
    """Raise ConfigError for a template that has no place for the prompt."""
    if template and NAMED not in template and EMPTY not in template:
        raise ConfigError(f"the task's template {template!r} has no place for the prompt; write {NAMED} where it goes")


def asked_by(template: str, rows: Iterable[AnyRow]) -> Iterator[AnyRow]:
    """The rows with their last message put into the template. Other braces are unchanged, such as those of
    \\boxed{}."""
    for row in rows:
        yield dataclasses.replace(row, turns=(*row.turns[:-1], {**row.turns[-1], "content": _asked(template, row)}))


def asked_of_source(row: AnyRow, source: str, template: str, reasoning: str = "") -> AnyRow:
    """The row, with the name of its source in a mixture added unless that is "", put into the template if there is
    one, and with its reasoning as `reasoning` says."""
    if source:
        row = dataclasses.replace(row, columns={**row.columns, OF_TASK: source})
    if reasoning:
        row = row.reworded(partial(_worded, how=reasoning))
    return next(asked_by(template, [row])) if template else row


def _worded(turns: Sequence[Mapping[str, Any]], how: str) -> tuple[Mapping[str, Any], ...]:
    found = []
    for turn in turns:
        thoughts = [turn[name].strip("\n") for name in REASONING if name in turn]
        told = {name: value for name, value in turn.items() if name not in REASONING}
        if thoughts and how == "inline":
            told["content"] = THOUGHT.format("\n".join(thoughts), turn["content"].lstrip("\n"))
        found.append(told)
    return tuple(found)


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
