"""Tasks: the sources of prompts, answers and verdicts."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.checks.answer_checks import NEEDED, STRUCTURED, check_references
from flowrl.tasks.checks.code_tests import check_tests
from flowrl.tasks.checks.maths import check_formulas
from flowrl.tasks.reward_calls.judge import place_of
from flowrl.tasks.rewards import MODEL, Part, needs_rows, parse_reward, row_columns
from flowrl.tasks.row_reading.row_loading import (
    KnownRows,
    load_demonstrations,
    load_preferences,
    load_rows,
    load_texts,
    options_of,
    place_of_rows,
)
from flowrl.tasks.rows import OF_TASK, Row, Rows, without_weight
from flowrl.tasks.task import Task
from flowrl.tasks.toy_tasks import SticksRules, demonstrate_move, demonstrate_sum

__all__ = [
    "Demonstrator",
    "KnownRows",
    "Row",
    "Rows",
    "Task",
    "asked_columns",
    "check_answers",
    "conversation",
    "demonstrator",
    "load_demonstrations",
    "load_preferences",
    "load_rows",
    "load_texts",
    "parts_of",
    "place_of_rows",
    "reward_parts",
    "right_answer",
]


def reward_parts(task: Task, function: str | Callable[..., Any] | None = None) -> tuple[Part, ...]:
    """The reward that scores responses to `task`: its verifier, or `function` (an object, or a reward as text).

    The reward model that a sum may contain is left out: a node of its own asks it.
    """
    if function is None or isinstance(function, str):
        return tuple(part for part in parts_of(task, function or task.verifier) if part.place != MODEL)
    return (Part(place_of(function), name=function.__name__, heads=tuple(task.head_weights.items())),)


def parts_of(task: Task, text: str) -> tuple[Part, ...]:
    """The parts of the reward that `text` gives for responses to `task`, including its reward model."""
    heads, own = tuple(task.head_weights.items()), task.own_verifier
    mixed = task.sources if len(task.sources) > 1 else ()
    asked = tuple(dict.fromkeys(Task(term.text).own_verifier for term in mixed))
    return tuple(
        dataclasses.replace(part, heads=heads, asks=asked if part.place == own else ())
        for part in parse_reward(text, verifier=own)
    )


def conversation(task: Task, row: Row) -> list[dict[str, str]]:
    """The messages before the response to `row`, as the model receives them. A row's own system message replaces the
    task's."""
    own = row.turns[0]["role"] == "system"
    system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt and not own else []
    return [*system, *map(without_weight, row.turns)]


def asked_columns(parts: Sequence[Part], task: Task, row: Row) -> dict[str, Any]:
    """What a reward receives about `row` in addition to its columns; {} if no part needs more."""
    return row_columns(parts, task.name, conversation(task, row), row) if needs_rows(parts) else {}


def check_answers(task: Task, rows: Iterable[Row]) -> None:
    """Raise ConfigError if an answer is not of the kind that the check of its row's source compares with.

    Answers that are lists or mappings are accepted if the task's own verifier does not compare with them: another
    reward then reads them.
    """
    checks = {term.text: str(Task(term.text).options.get("check", "exact")) for term in task.sources}
    answers: dict[str, dict[str, tuple[str, Any]]] = {term: {} for term in checks}
    mixed = len(task.sources) > 1
    for row in rows:
        term = row.columns[OF_TASK] if mixed else task.sources[0].text  # a file may have a column of this name
        check = checks[term]
        structured = not row.text_answer and check not in STRUCTURED
        if structured and task.compares:
            raise ConfigError(
                f"{row.place}: the answer is {str(row.answer)[:60]!r}, and check={check} compares with a text; "
                "name the column that has one with answer=, give the task a reward function, or leave such rows out "
                "with malformed=skip"
            )
        if row.answer is not None and not structured and (check in NEEDED or check in ("math", "code")):
            answers[term][row.place or term] = (str(row.answer), row.columns.get("entry_point"))
    for term, check in checks.items():
        texts = {place: text for place, (text, _) in answers[term].items()}
        if check == "math":
            check_formulas(texts)
        if check == "code":
            check_tests(answers[term])
        check_references(check, texts)


Demonstrator = Callable[[Row, random.Random], str]


def demonstrator(task: Task) -> Demonstrator:
    """The function that gives a warm start the answers to imitate: the task's own demonstrations, which may be
    imperfect, or right answers."""
    if len(task.sources) > 1:
        return lambda row, rng: demonstrator(Task(row.columns[OF_TASK]))(row, rng)
    if task.source == "sticks":
        return functools.partial(demonstrate_move, options_of(SticksRules, task))
    return demonstrate_sum if task.source == "arithmetic" else right_answer


def right_answer(row: Row, rng: random.Random) -> str:
    """The answer of a perfect teacher."""
    return str(row.answer)
