"""Tasks: the sources of prompts, answers and verdicts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowrl.errors import ConfigError
from flowrl.hub.name import HubName
from flowrl.tasks import maths, preference_rows
from flowrl.tasks.answer_checks import NEEDED, STRUCTURED, check_references
from flowrl.tasks.arithmetic import Arithmetic, demonstrate
from flowrl.tasks.files import Keys, left_on_disk
from flowrl.tasks.files import rows as file_rows
from flowrl.tasks.formats import FORMATS, is_file_task, require_there
from flowrl.tasks.hub_rows import hub_dataset
from flowrl.tasks.input_template import asked_by
from flowrl.tasks.judge import place_of
from flowrl.tasks.malformed import Reading
from flowrl.tasks.rewards import MODEL, Part, needs_rows, parse_reward, row_columns
from flowrl.tasks.rows import OF_TASK, Row, Rows
from flowrl.tasks.sticks import SticksRules, demonstrate_move
from flowrl.tasks.task import Task
from flowrl.tasks.text_rows import TextKeys, text_rows

__all__ = [
    "Demonstrator",
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
    "place_of_rows",
    "reward_parts",
    "right_answer",
]

Options = TypeVar("Options")


def reward_parts(task: Task, function: str | Callable[..., Any] | None = None) -> tuple[Part, ...]:
    """The reward that scores responses to `task`: its verifier, or `function` (an object, or a reward as text).

    Without the reward model that a sum may have, which a node of its own asks.
    """
    heads = tuple(task.head_weights.items())
    if function is None or isinstance(function, str):
        parts = parse_reward(function or task.verifier, verifier=task.own_verifier)
        others = tuple(part for part in parts if part.place != MODEL)
        return tuple(dataclasses.replace(part, heads=heads) for part in others or parse_reward(task.own_verifier))
    return (Part(place_of(function), name=function.__name__, heads=heads),)


def conversation(task: Task, row: Row) -> list[dict[str, str]]:
    """The messages before the response to `row`, as the model receives them: a row's own system message comes first."""
    own = row.turns[0]["role"] == "system"
    system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt and not own else []
    return [*system, *(dict(turn) for turn in row.turns)]


def asked_columns(parts: Sequence[Part], task: Task, row: Row) -> dict[str, Any]:
    """What a reward gets of `row` besides its columns."""
    return row_columns(parts, task.name, conversation(task, row), row) if needs_rows(parts) else {}


def check_answers(task: Task, rows: Iterable[Row]) -> None:
    """Raise ConfigError if answers are not what the check of the rows' own source compares with."""
    checks = {term.text: str(Task(term.text).options.get("check", "exact")) for term in task.sources}
    answers: dict[str, dict[str, str]] = {term: {} for term in checks}
    for row in rows:
        term = row.columns.get(OF_TASK, task.sources[0].text)
        check = checks[term]
        if row.answer is not None and task.compares and not row.text_answer and check not in STRUCTURED:
            raise ConfigError(
                f"{row.place}: the answer is {str(row.answer)[:60]!r}, and check={check} compares with a text; "
                "name the column that has one with answer=, or give the task a reward function"
            )
        if row.answer is not None and (check in NEEDED or (check == "math" and not answers[term])):
            answers[term][row.place or term] = str(row.answer)
    for term, check in checks.items():
        if check == "math":
            maths.check(answers[term])
        check_references(check, answers[term])


Demonstrator = Callable[[Row, random.Random], str]


@functools.lru_cache(maxsize=8)
def load_rows(task: Task, *, whole: bool = False) -> Rows:
    """Read or generate all rows of `task`, once per process. Raises ConfigError if the task is invalid.

    `whole`: both parts are used alike, so all rows may be in the part that others hold out.
    """
    reading = _reading(task)
    if (found := _on_disk(task, reading, every=False)) is None:
        rows = _mixed(task, reading, load_rows) if len(task.sources) > 1 else _source(task, reading)
        found = Rows.split(_asked(task, rows))
    return _parted(task, found, reading, whole)


@functools.lru_cache(maxsize=8)
def load_demonstrations(task: Task, *, whole: bool = False) -> Rows:
    """`load_rows` to learn from the answers: of a file also those that answer one prompt in several ways."""
    if task.generated:
        return load_rows(task, whole=whole)
    reading = _reading(task)
    if (found := _on_disk(task, reading, every=True)) is None:
        rows = _mixed(task, reading, load_demonstrations) if len(task.sources) > 1 else _source(task, reading)
        found = Rows.every(_asked(task, rows))
    return _parted(task, found, reading, whole)


@functools.lru_cache(maxsize=4)
def load_texts(task: Task, *, whole: bool = False) -> Rows:
    """The texts of `task`, each the prompt of a row, also those that are repeated; the split is by text."""
    if len(task.sources) > 1:
        raise ConfigError(f"task {task.name!r} is a mixture, and texts are read from one; name a pattern of files")
    if (place := place_of_rows(task)) is None:
        raise ConfigError(
            f"task {task.name!r} has no texts: it is neither a file ({FORMATS}), pattern or dataset directory on this "
            "machine, nor a dataset of the Hub; name one with the column text"
        )
    reading = _reading(task)
    return _parted(task, Rows.every(text_rows(place, _options(TextKeys, task), reading)), reading, whole)


@functools.lru_cache(maxsize=8)
def load_preferences(task: Task, kind: preference_rows.Kind) -> Rows:
    """The pairs of `task`, or its labelled completions (a pair makes two); the split is by prompt.

    `arithmetic` prefers right answers to answers without carrying.
    """
    if task.options.get("rows") == "disk":
        raise ConfigError(f"task {task.name!r}: preferences are held in memory; leave rows=disk out")
    reading = _reading(task)
    rows: Iterable[Row]
    if len(task.sources) > 1:
        rows = _mixed(task, reading, lambda term, whole: load_preferences(term, kind))
    elif task.source == "arithmetic":
        rows = preference_rows.careless(_source(task, reading), kind)
    elif (place := place_of_rows(task)) is not None:
        rows = preference_rows.rows(place, _options(Keys, task), reading, kind)
    else:
        raise ConfigError(
            f"task {task.name!r} has no preferences: it is neither arithmetic, nor a file ({FORMATS}) or dataset "
            "directory on this machine, nor a dataset of the Hub; name one with the columns chosen and rejected, or "
            "completion and label"
        )
    return _parted(task, Rows.split(_asked(task, rows)), reading)


def _on_disk(task: Task, reading: Reading, *, every: bool) -> Rows | None:
    """The rows of one source that stay in its files, None if they go into memory."""
    if len(task.sources) > 1 or (place := place_of_rows(task)) is None:
        return None
    return left_on_disk(place, _options(Keys, task), reading, template=task.template, every=every)


def _asked(task: Task, rows: Iterable[Row]) -> Iterable[Row]:
    """`rows`, asked as the task's template says."""
    return asked_by(task.template, rows) if task.template else rows


def _reading(task: Task) -> Reading:
    return Reading(str(task.options.get("malformed", "stop")) if len(task.sources) == 1 else "stop")


def _parted(task: Task, rows: Rows, reading: Reading, whole: bool = False) -> Rows:
    """`rows` with what was skipped. Raises ConfigError if there are none to train on."""
    if not len(rows.train) and not len(rows.held_out):
        skipped = f", {len(reading.skipped)} are skipped: {reading.skipped[0]}" if reading.skipped else ""
        raise ConfigError(f"task {task.name!r} has no rows at all{skipped}; add rows, or name other data")
    if not rows.train and not whole:
        raise ConfigError(f"task {task.name!r} has no training rows ({len(rows.held_out)} are held out); add rows")
    return dataclasses.replace(rows, skipped=tuple(reading.skipped))


def _mixed(task: Task, reading: Reading, load: Callable[..., Rows]) -> Iterator[Row]:
    """The rows of all sources; a column of each row names its source."""
    for term in task.sources:
        found = load(Task(term.text), whole=True)
        reading.skipped += found.skipped
        for row in (*found.train, *found.held_out):
            yield dataclasses.replace(row, columns={**row.columns, OF_TASK: term.text})


def demonstrator(task: Task) -> Demonstrator:
    """The function that gives a warm start the answers to imitate: the task's own, at the quality that it provides."""
    if len(task.sources) > 1:
        return lambda row, rng: demonstrator(Task(row.columns[OF_TASK]))(row, rng)
    if task.source == "sticks":
        return functools.partial(demonstrate_move, _options(SticksRules, task))
    return demonstrate if task.source == "arithmetic" else right_answer


def right_answer(row: Row, rng: random.Random) -> str:
    """The answer of a perfect teacher."""
    return str(row.answer)


def _source(task: Task, reading: Reading) -> Iterable[Row]:
    if task.source == "arithmetic":
        return _options(Arithmetic, task).rows()
    if task.source == "sticks":
        return _options(SticksRules, task).rows()
    if task.source.startswith("reasoning_gym/"):
        from flowrl.tasks import reasoning

        return reasoning.rows(task)
    if (place := place_of_rows(task)) is not None:
        return file_rows(place, _options(Keys, task), reading)
    close = difflib.get_close_matches(task.source, ["arithmetic", "sticks", "reasoning_gym/chain_sum"], 1, 0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"there is no task {task.source!r}: it is neither arithmetic, nor sticks, nor reasoning_gym/NAME, nor a file "
        f"({FORMATS}), pattern or dataset directory on this machine, nor OWNER/NAME, as datasets of the Hub are named."
        f"{hint}"
    )


def place_of_rows(task: Task) -> Path | HubName | None:
    """Where the rows of a task are that generates none; None if it names neither files nor a dataset of the Hub.

    Raises ConfigError for a file that is not there.
    """
    if task.source.startswith("reasoning_gym/"):
        return None
    require_there(task.path)
    return task.path if is_file_task(task.path) else hub_dataset(task.source)


def _options(kind: type[Options], task: Task) -> Options:
    """`task.options` as the dataclass `kind`; names and types are checked."""
    fields: Mapping[str, Any] = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in task.options.items():
        if key not in fields:
            raise ConfigError(f"task {task.name!r} has no option {key!r}; it has {', '.join(fields)}")
        wanted = type(fields[key].default)
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise ConfigError(f"task {task.name!r}: option {key} is {value!r} and needs {wanted.__name__}")
    return kind(**task.options)
